"""The time that a grammar adds to each token, for a vocabulary of 128,256 tokens.

    python -m benchmarks.decoding.grammars [--quick] [--threads 2]

free      our step without a grammar: one answer, and several at once
bound     the same with a grammar each, a list of records, whose masks are made beside the forward
waited    the same with masks made after the forward, on the compute thread
drafted   lossless blocks of eight by the same weights, so that all are accepted, with and without

The weights are random: SmolLM2-135M's shape, and a smaller one of which a step takes a fifth. The
vocabulary is made up as well: numbers, punctuation and words of one to nine letters, over bytes.
All ways are taken in turn within a repetition, and a ratio is the median of the repetitions' own
ratios. The 500 generated schemas of the tests are compiled beside that, up to their first mask.

It takes 25 minutes on two quiet cores; `--quick` measures one answer of the smaller model.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks.engine.filled import SMOLLM2_SHAPE, random_model
from benchmarks.reporting import keep, ratios, shown, spread, table
from rapid.config import SamplingConfig, SpeculationConfig
from rapid.constraints.grammars import Grammars, GrammarShaping
from rapid.constraints.structured_outputs import compile_schema
from rapid.engines.engine import Engine
from rapid.engines.forward.weights.loading import LoadedModel
from rapid.engines.local_ports import EngineDrafter, EngineVerifier
from rapid.messages import LeaseRequest, Terms, as_prompt
from rapid.speculation.loop import speculate
from tests.rapid.constraints.json_schemas import NUM_SCHEMAS, make_schema

Taken = tuple[float, float, float]
VOCAB, EOS = 128_256, 0
MAX_DRAFT = 8
PROMPT = 64  # tokens
SHAPES = {
    "SmolLM2-135M's": SMOLLM2_SHAPE,
    "4 layers of 256": {"hidden_size": 256, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2},
}
RECORD = {
    "type": "object",
    "properties": {
        "who": {"type": "string", "maxLength": 24},
        "year": {"type": "integer", "minimum": 1000, "maximum": 2000},
        "kind": {"enum": ["ship", "town", "lighthouse"]},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]+$"}},
    },
    "required": ["who", "year", "kind", "tags"],
}
ENDLESS = {"type": "array", "items": RECORD, "minItems": 1000}  # no answer here is that long


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of made-up words over bytes, the end of an answer its first token."""
    generator = random.Random(0)
    words = dict.fromkeys(["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())])
    for number in range(1000):
        words |= dict.fromkeys([str(number), f"{number:02}", f"{number:03}"])
    marks = '{}[]":,.-'
    words |= dict.fromkeys(a + b + c for a in marks for b in marks for c in ["", *marks])
    letters = "etaoinshrdlucmfwypvbgkqjxz"
    weights = [1 / (place + 1) for place in range(len(letters))]
    while len(words) < VOCAB:
        word = "".join(generator.choices(letters, weights, k=generator.randint(2, 9)))
        words[generator.choice(["", "Ġ", "Ġ"]) + word] = None
    backend = Tokenizer(models.BPE(vocab={word: at for at, word in enumerate(words)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")


class Answers:
    """An engine that answers several prompts at once, each time anew."""

    def __init__(self, loaded: LoadedModel, batch: int, num_tokens: int, threads: int) -> None:
        self._batch, self._num_tokens = batch, num_tokens
        most = PROMPT + num_tokens + MAX_DRAFT + loaded.config.page_tokens
        config = {"max_context": most, "kv_cache_tokens": 2 * batch * most, "max_leases": 2 * batch}
        config |= {"threads": threads, "draft_ahead": False, "lease_ttl_s": 3600.0}
        self.engine = Engine(loaded, loaded.config.model_copy(update=config), is_watched=False)
        self._prompts = np.random.default_rng(0).integers(10, VOCAB, (batch, PROMPT))

    async def answer(self, *, is_drafted: bool, **sampling: Any) -> Taken:
        """Return the milliseconds of a token of every answer, on the wall and of processors.

        Behind them is the share of tokens that were forced.
        """
        engine, count = self.engine, self._num_tokens
        settings = SamplingConfig(seed=1, **sampling)
        terms = Terms("local", settings, SpeculationConfig(eta=0, max_draft=MAX_DRAFT), count)
        names = [f"{role}{at}" for at in range(self._batch) for role in "td"[: 1 + is_drafted]]
        for name in names:
            await engine.open(LeaseRequest(name, terms, as_prompt(self._prompts[int(name[1:])])))
            await engine.prefill(name)

        async def draft(at: int) -> int:
            drafter = EngineDrafter(engine, f"d{at}")
            verifier = EngineVerifier(engine, f"t{at}")
            rounds = speculate(drafter, verifier, max_tokens=count, max_draft=MAX_DRAFT)
            told = [each async for each in rounds]
            assert sum(len(each.token_ids) for each in told) == count
            return sum(each.num_forced for each in told)

        began, cpu_began = time.perf_counter(), time.process_time()
        answers = range(self._batch)
        if is_drafted:
            forced = sum(await asyncio.gather(*map(draft, answers)))
        else:
            await asyncio.gather(*(engine.decode(f"t{at}", 0, count) for at in answers))
            forced = 0
        taken_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
        for name in names:
            engine.release(name)
        return 1e3 * taken_s / count, 1e3 * cpu_s / count, forced / (count * self._batch)


@contextmanager
def mask_afterwards() -> Iterator[None]:
    """Leave all masks to the compute thread, after its forwards."""
    prepare = GrammarShaping.prepare
    GrammarShaping.prepare = lambda *_: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        GrammarShaping.prepare = prepare  # type: ignore[method-assign]


async def compare(
    loaded: LoadedModel, batch: int, temperature: float, options: argparse.Namespace
) -> dict[str, Any]:
    """Return the times of all ways, and their ratios to those without a grammar."""
    answers = Answers(loaded, batch, options.tokens, options.threads)
    ask = partial(answers.answer, temperature=temperature)
    grammar = compile_schema(ENDLESS)

    async def answer_afterwards() -> Taken:
        with mask_afterwards():
            return await ask(is_drafted=False, grammar=grammar)

    ways: dict[str, Callable[[], Awaitable[Taken]]] = {
        "free": partial(ask, is_drafted=False),
        "bound": partial(ask, is_drafted=False, grammar=grammar),
        "waited": answer_afterwards,
        "free, drafted": partial(ask, is_drafted=True),
        "bound, drafted": partial(ask, is_drafted=True, grammar=grammar),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    cpu_times: dict[str, list[float]] = {name: [] for name in ways}
    forced = 0.0
    try:
        for repeat in range(options.repeats + 1):
            for name, way in ways.items():
                taken_ms, cpu_ms, share = await way()
                forced = max(forced, share)
                times[name] += [taken_ms] * bool(repeat)
                cpu_times[name] += [cpu_ms] * bool(repeat)
    finally:
        answers.engine.close()
    free, drafted = times["free"], times["free, drafted"]
    return {
        "answers": batch,
        "temperature": temperature,
        "ms": {name: spread(each) for name, each in times.items()},
        "cpu_ms": {name: spread(each) for name, each in cpu_times.items()},
        "bound": ratios(times["bound"], free),
        "bound_cpu": ratios(cpu_times["bound"], cpu_times["free"]),
        "waited": ratios(times["waited"], free),
        "drafted": ratios(times["bound, drafted"], drafted),
        "forced": round(forced, 3),
    }


def compile_all(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """Return the milliseconds in which schemas become grammars with a first mask."""
    grammars, taken = Grammars(tokenizer, {EOS}, VOCAB), list[float]()
    grammars.open(compile_schema(RECORD))  # reads the vocabulary
    for number in range(NUM_SCHEMAS):
        schema = make_schema(random.Random(number))
        began = time.perf_counter()
        grammars.open(compile_schema(schema))
        taken.append(1e3 * (time.perf_counter() - began))
    names = {"median": 50, "99 %": 99, "most": 100}
    return {name: round(float(np.percentile(taken, share)), 2) for name, share in names.items()}


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure all shapes, numbers of answers and temperatures."""
    tokenizer, cases = make_tokenizer(), []
    compiled = compile_all(tokenizer)
    for name, shape in list(SHAPES.items())[options.quick :]:
        model = random_model("float32", **shape, vocab_size=VOCAB)
        loaded = replace(model.ours, tokenizer=tokenizer, eos_ids=frozenset({EOS}))
        for batch in (1,) if options.quick else (1, 8):
            for temperature in (0.0, 1.0):
                cases.append({"model": name} | await compare(loaded, batch, temperature, options))
                print(show(cases[-1:]).splitlines()[-1], flush=True)
    return {"cases": cases, "compile_ms": compiled}


def show(cases: list[dict[str, Any]]) -> str:
    """Return a table of milliseconds and ratios."""
    rows = [
        [
            case["model"],
            case["answers"],
            case["temperature"],
            shown(case["ms"]["free"], 1),
            *(shown(case[name]) for name in ("bound", "bound_cpu", "waited")),
            shown(case["ms"]["free, drafted"], 1),
            shown(case["drafted"]),
            f"{case['forced']:.0%}",
        ]
        for case in cases
    ]
    header = ["model", "answers", "temperature", "free, ms a token", "bound / free",
              "the same in processor time", "waited / free", "drafted, free, ms a token",
              "drafted, bound / free", "forced"]  # fmt: skip
    return table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few tokens, nothing kept")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    options.tokens, options.repeats = (9, 2) if options.quick else (49, 5)
    torch.set_num_threads(1)  # for this thread, which only waits; the engine's has its own
    report = asyncio.run(measure(options))
    compiled = ", ".join(f"{name} {value}" for name, value in report["compile_ms"].items())
    text = (
        f"{options.threads} threads, {VOCAB} tokens, {options.tokens} a time. Medians, in brackets "
        "the least and the most of the repetitions; ratios are of neighbours in time.\n"
        "*Forced* are drafts of the only token allowed, for each token of the answers.\n\n"
        f"{show(report['cases'])}\n"
        f"{NUM_SCHEMAS} schemas, ms from the schema to its first mask: {compiled}.\n"
    )
    report |= {"threads": options.threads, "shapes": SHAPES, "torch": torch.__version__}
    keep(None if options.quick else "grammars", "Time of a token under a grammar", text, report)


if __name__ == "__main__":
    main()

"""First tokens and decoding of a GGUF file on a CPU, beside llama.cpp on the same file.

    python -m benchmarks.decoding.beside_llama_cpp [--model smollm2-135m] [--threads 2] [--runs 3]

needs `rapid models get smollm2-135m` and llama.cpp's Python package, which pip builds in minutes.
Both read the same token ids, our LICENSE with a question (2,238 tokens of SmolLM2), then another
question on it, whose beginning they have kept, and decode the likeliest tokens. They take turns in
one process, three minutes; one thread is timed in seconds of processor time, which hardly depend on
the load. Distributions are compared with those in float32 (`kv_fp8_models.py`).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.engine.kv_fp8_models import PAGE, TEXT, compare, log_probs
from benchmarks.reporting import ROOT, keep, ratios, settings, shown, spread, table
from rapid.checkpoints.files import checkpoint_source
from rapid.config import EngineConfig, SamplingConfig, SpeculationConfig
from rapid.engines.engine import Engine
from rapid.engines.forward import loading
from rapid.engines.kv.cache import KVCache
from rapid.messages import LeaseRequest, Terms, as_prompt

QUESTIONS = ("What may I do with a copy of this work?", "Who may bring a patent claim?")
ROOM, NUM_TOKENS, NUM_COMPARED = 4096, 64, 384
# Reads a prompt: yields once its first token is there, and again after all `NUM_TOKENS`.
Decode = Callable[[list[int]], Iterator[object]]


def ours(engine: Engine) -> Decode:
    names = map(str, itertools.count())
    terms = Terms("-", SamplingConfig(temperature=0), SpeculationConfig(), NUM_TOKENS)

    def decode(prompt: list[int]) -> Iterator[object]:
        name = next(names)

        async def read() -> None:
            await engine.open(LeaseRequest(name, terms, as_prompt(prompt)))
            await engine.prefill(name)
            await engine.decode(name, 0, 1)

        yield asyncio.run(read())
        yield asyncio.run(engine.decode(name, 0, NUM_TOKENS - 1))
        engine.release(name)

    return decode


def theirs(llama: Any) -> Decode:
    def decode(prompt: list[int]) -> Iterator[object]:
        tokens = llama.generate(prompt, temp=0.0)
        yield next(tokens)
        yield list(itertools.islice(tokens, NUM_TOKENS - 1))

    return decode


def measure(
    decode: Decode, prompts: list[list[int]], clock: Callable[[], float]
) -> dict[str, float]:
    """Return the times of a question, those of another one, and the tokens a second of both."""
    found: dict[str, float] = {}
    speeds = []
    for name, prompt in zip(("first token, s", "second question's, s"), prompts, strict=True):
        answer, began = decode(prompt), clock()
        next(answer)
        found[name] = (first := clock()) - began
        next(answer)
        speeds.append((NUM_TOKENS - 1) / (clock() - first))
        next(answer, None)
    return found | {"tokens a second": statistics.mean(speeds)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one run, nothing kept")
    options = parser.parse_args()
    try:
        from llama_cpp import Llama
    except ImportError:
        raise SystemExit("needs llama.cpp's package: pip install llama-cpp-python") from None
    torch.set_num_threads(options.threads)
    config = EngineConfig(
        model=options.model, device="cpu", dtype="float32", threads=options.threads,
        max_context=ROOM, kv_cache_tokens=2 * ROOM,
    )  # fmt: skip
    loaded = loading.load_model(config)
    shared = {"n_threads": options.threads, "n_threads_batch": options.threads, "verbose": False}
    path = checkpoint_source(options.model)
    ids = loaded.tokenizer(TEXT.read_text())["input_ids"][:NUM_COMPARED]

    def distributions(of: loading.LoadedModel) -> torch.Tensor:
        return log_probs(of, ids, KVCache(of.kv_layout, len(ids) // PAGE + 1, PAGE))

    loading.can_pack = lambda: False  # type: ignore[assignment]
    exact, found = distributions(loading.load_model(config)), {"rapid": distributions(loaded)}
    llama = Llama(path, n_ctx=ROOM, logits_all=True, **shared)
    llama.eval(ids)
    logits = torch.tensor(llama.scores[: len(ids), : exact.shape[1]])
    found["llama.cpp"] = logits.log_softmax(-1)
    compared = {side: compare(exact, each, ids) for side, each in found.items()}
    text = (ROOT / "LICENSE").read_text()
    chats = [[{"role": "user", "content": f"{text}\n\n{question}"}] for question in QUESTIONS]
    prompts = [
        loaded.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        for chat in chats
    ]
    clock = time.process_time if options.threads == 1 else time.perf_counter
    runs: dict[str, list[dict[str, float]]] = {"rapid": [], "llama.cpp": []}
    for _ in range(1 if options.quick else options.runs):
        engine = Engine(loaded, config)  # an empty cache
        runs["rapid"].append(measure(ours(engine), prompts, clock))
        engine.close()
        llama = Llama(path, n_ctx=ROOM, **shared)
        runs["llama.cpp"].append(measure(theirs(llama), prompts, clock))
        print({side: each[-1] for side, each in runs.items()}, flush=True)
    cases = []
    for what in runs["rapid"][0]:
        own, other = ([run[what] for run in each] for each in runs.values())
        pair = (own, other) if what == "tokens a second" else (other, own)
        case: dict[str, Any] = {"what": what, "rapid": spread(own), "llama.cpp": spread(other)}
        cases.append(case | {"speed over it": ratios(*pair)})
    rows = [[each.pop("what"), *map(shown, each.values())] for each in map(dict, cases)]
    lines = [[side, *told.values()] for side, told in compared.items()]
    told = table(["", "rapid", "llama.cpp", "speed over it"], rows) + "\n"
    told += table(["beside float32", *compared["rapid"]], lines)
    report = {"settings": settings(options), "prompt_tokens": [len(each) for each in prompts]}
    suffix = "-one-thread" if options.threads == 1 else ""
    name = None if options.quick else f"beside_llama_cpp{suffix}"
    keep(name, "A GGUF file beside llama.cpp", told, report | {"times": cases, **compared})


if __name__ == "__main__":
    main()

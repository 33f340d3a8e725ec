"""The time that a drafter saves by keeping the KV of each passage, and the drafts that it loses.

    python -m benchmarks.decoding.chunk_kv [--quick] [--threads 2]

first block  from the request to the drafter's first 10 tokens, over 2,048 retrieved ones: read
             `together`, `apart` where each passage of 128 is new, and `seen` where each was read
             before, in another order and for another question
follow-ups   tokens that the drafter reads anew on later questions about a real document, each asked
             in a chat behind the last one, with passages in the order of document and of cache
overlap      sum min(p, q) as the gate at start measures it, read apart over read together, with
             kept passages as they are and in 8 and 4 bits: the embedded pair on generated text,
             SmolLM2-135M drafting for itself on real text

Times are of SmolLM2-135M's shape with random weights, in turn within a repetition; a ratio is the
median of the repetitions' own. `--quick` takes a smaller model and asks less.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from contextlib import suppress
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

import rapid
from benchmarks.engine.filled import SMOLLM2_SHAPE, random_model
from benchmarks.reporting import keep, ratios, settings, shown, spread, table
from evaluation.texts.text_questions import document_names, document_text, questions_of
from rapid.answering.passage_gate import ask_generated, compute_share_kept, measure_overlaps
from rapid.answering.prompt.prompting import RequestPrompts
from rapid.chat_messages import Document, Message
from rapid.checkpoints.text import ChatText
from rapid.config import EngineConfig, SamplingConfig, SpeculationConfig
from rapid.engines.engine import Engine
from rapid.errors import RapidError
from rapid.messages import GenerateRequest, LeaseRequest, Terms, as_prompt
from rapid.pair.pair import Pair
from retrieval import RetrievalConfig, open_retriever

VOCAB, HEAD, PASSAGE, QUESTION, BLOCK = 4096, 24, 128, 32, 10  # tokens
SMALL = {"hidden_size": 256, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2}
SMOLLM2 = "smollm2-135m"
ROLES = ("target", "drafter")
FOR_TEXT = RetrievalConfig(chunk_tokens=64, budget_tokens=512)


class FirstBlocks:
    """A drafter's engine, and prompts of passages."""

    def __init__(self, options: argparse.Namespace) -> None:
        model = random_model("float32", **(SMALL if options.quick else SMOLLM2_SHAPE))
        retrieved = 512 if options.quick else 2048
        most = (HEAD + retrieved + QUESTION + 79) // 16 * 16  # whole pages
        changes = {"max_context": most, "kv_cache_tokens": most, "threads": options.threads}
        # Room for one prompt, so that no pages are found again: only passages are.
        changes |= {"passage_cache_tokens": retrieved, "lease_ttl_s": 3600.0}
        config = model.ours.config.model_copy(update=changes)
        self.engine = Engine(model.ours, config, is_watched=False)
        self._random = np.random.default_rng(0)
        self._head = self._draw(HEAD)
        self.passages = [self._draw(PASSAGE) for _ in range(retrieved // PASSAGE)]

    def _draw(self, length: int) -> Any:
        return self._random.integers(10, VOCAB, length)

    async def take(self, passages: list[Any], *, is_apart: bool) -> float:
        """Return the seconds from a request to the first block."""
        prompt = as_prompt(np.concatenate([self._head, *passages, self._draw(QUESTION)]))
        ends = range(HEAD, HEAD + PASSAGE * len(passages) + 1, PASSAGE)
        sampling = SamplingConfig(temperature=0.0, seed=0)
        terms = Terms("local", sampling, SpeculationConfig(eta=0.0), 32)
        spans = tuple(pairwise(ends)) if is_apart else ()
        engine, began = self.engine, time.perf_counter()
        await engine.open(LeaseRequest("a", terms, prompt, passages=spans))
        await engine.prefill("a")
        await engine.draft("a", 0, None, BLOCK)
        taken_s = time.perf_counter() - began
        engine.release("a")
        return taken_s

    async def measure(self, repeats: int) -> dict[str, list[float]]:
        """Return the seconds of all ways, by repetition."""
        times: dict[str, list[float]] = {"together": [], "apart": [], "seen": []}
        for repeat in range(repeats + 1):
            fresh = [self._draw(PASSAGE) for _ in self.passages]
            other = random.Random(repeat).sample(fresh, len(fresh))
            for name, passages in (("together", fresh), ("apart", fresh), ("seen", other)):
                taken_s = await self.take(passages, is_apart=name != "together")
                times[name] += [taken_s] * bool(repeat)  # the first is for warming up
        self.engine.close()
        return times


async def count_follow_ups(num_documents: int) -> dict[str, list[int]]:
    """Return the tokens read anew by each later question, by order of the passages."""
    text = ChatText.load("embedded:target")
    retriever = await open_retriever(FOR_TEXT, text.token_offsets, tokenizer=text.fingerprint)
    budget: Any = {"budget_tokens": FOR_TEXT.budget_tokens, "budget_for": FOR_TEXT.budget_for}
    counts: dict[str, list[int]] = {"document": [], "cache": []}
    for name in document_names()[:num_documents]:
        for order, read in counts.items():
            prompts = RequestPrompts(text, text, retriever, **budget)
            before: list[list[int]] = []
            asked = [each.question for each in questions_of(name)]
            for last, question in zip([None, *asked], asked, strict=False):
                request = ask_text(name, question, last)
                found = await prompts.drafter_prompt(request, ignores_drafts=order == "cache")
                ids = found.prompt_ids.tolist()
                if before:
                    read.append(len(ids) - max(num_shared(ids, each) for each in before))
                before.append(ids)
            prompts.close()
    await retriever.close()
    return counts


def num_shared(some: list[int], others: list[int]) -> int:
    """Return the length of the common beginning."""
    pairs = enumerate(zip(some, others, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(some), len(others)))


def ask_text(name: str, question: str, before: str | None = None) -> GenerateRequest:
    """Return a question about the first 6,000 characters of a real document, alone or asked on."""
    document = Document(name, document_text(name)[:6000])
    earlier = (Message("user", before), Message("assistant", "Yes.")) if before else ()
    chat = (*earlier, Message("user", question))
    return GenerateRequest("r", "local", chat, (document,), max_tokens=24)


def measure_pair(pair: Pair, requests: list[GenerateRequest]) -> dict[str, Any]:
    """Return the overlap read apart as a share of that read together, with its 95 % interval."""
    pair._loop.run(pair._services.gate.end)
    found = list[tuple[float, float, int]]()
    for seed, asked in enumerate(requests):
        services = pair._services
        measure = partial(measure_overlaps, services.prompts, services.pools, asked, seed)
        with suppress(RapidError):  # nothing was retrieved
            found.append(pair._loop.run(measure))
    draw = random.Random(0)
    shares = sorted(compute_share_kept(draw.choices(found, k=len(found))) for _ in range(1000))
    return {
        "questions": len(found),
        "together": round(sum(each[1] for each in found) / sum(each[2] for each in found), 4),
        "kept": round(compute_share_kept(found), 4),
        "interval": [round(shares[25], 4), round(shares[-26], 4)],
    }


def engine_of(model: str, bits: Any, options: argparse.Namespace) -> EngineConfig:
    """Return the settings of an engine with room for passages."""
    room = {"max_context": 4096, "kv_cache_tokens": 16_384, "passage_cache_tokens": 8192}
    room |= {"threads": options.threads, "passage_cache_bits": bits}
    return EngineConfig(model=model, **room)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--questions", type=int, default=60, help="for each overlap")
    parser.add_argument("--quick", action="store_true", help="print a smaller measurement")
    options = parser.parse_args()
    if options.quick:
        options.repeats, options.questions = 1, 2
    times = asyncio.run(FirstBlocks(options).measure(options.repeats))
    read = asyncio.run(count_follow_ups(2 if options.quick else 99))
    overlaps, generated = {}, [*map(ask_generated, range(options.questions))]
    asked = [ask_text(n, q.question) for n in document_names() for q in questions_of(n)]
    asked = random.Random(0).sample(asked, options.questions)
    for bits in (None, 8, 4):
        kept = "as they are" if bits is None else f"{bits} bits"
        target, drafter = (engine_of(f"embedded:{role}", bits, options) for role in ROLES)
        with rapid.open(target, drafter=drafter) as pair:
            overlaps[f"embedded, {kept}"] = measure_pair(pair, generated)
        if not options.quick:
            with rapid.open(engine_of(SMOLLM2, bits, options), retrieval=FOR_TEXT) as pair:
                overlaps[f"{SMOLLM2}, {kept}"] = measure_pair(pair, asked)
    over = {name: ratios(times[name], times["together"]) for name in ("apart", "seen")}
    means = {name: round(statistics.mean(each)) for name, each in read.items()}
    report = {
        "settings": settings(options),
        "first_block_s": {name: spread(each) for name, each in times.items()},
        "over_together": over,
        "follow_ups_read_anew": means | {"ratio": round(means["cache"] / means["document"], 3)},
        "overlaps": overlaps,
    }
    rows = [[name, shown(spread(each))] for name, each in times.items()]
    rows += [[f"{name} over together", shown(each)] for name, each in over.items()]
    text = table(["first block", "seconds, or the ratio: median (least to most)"], rows)
    text += f"\nTokens of follow-ups read anew, mean: {report['follow_ups_read_anew']}\n\n"
    rows = [[name, *each.values()] for name, each in overlaps.items()]
    text += table(["overlap", "questions", "together", "kept", "interval"], rows)
    keep(None if options.quick else "chunk_kv", "Passages read once", text, report)


if __name__ == "__main__":
    main()

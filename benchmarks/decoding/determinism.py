"""Seeded answers that differ when only the batching of their computation does, and the cost of it.

    python -m benchmarks.decoding.determinism [--questions 84] [--quick]

The embedded target (documents of 300 tokens) and drafter answer at temperature 1 with a seed for
each question, 27 tokens and `shared_noise`. In exact arithmetic every way of computing gives the
same tokens. Ways of `lossless` are compared with blocks of 10, prefill chunks of 512, alone,
nothing cached; `fused` is compared with itself. The engines compute in float32, in bfloat16, and
`deterministic` in bfloat16, with one thread each. Times are CPU seconds of this process, so that
other processes on the machine count little, and ratios are of the same question. It takes fifteen
minutes of one core.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from benchmarks.decoding.embedded_prompts import prompts
from benchmarks.reporting import keep, ratios, table
from rapid.config import EngineConfig, SamplingConfig, SpeculationConfig
from rapid.engines.engine import Engine
from rapid.engines.forward.weights.loading import load_model
from rapid.engines.local_ports import EngineDrafter, EngineVerifier
from rapid.messages import LeaseRequest, Terms, as_prompt
from rapid.speculation.loop import speculate

DOCUMENT_TOKENS, MAX_TOKENS = 300, 27
MODES: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16, deterministic": {"dtype": "bfloat16", "deterministic": True},
}

WAYS: dict[str, dict[str, Any]] = {
    "plain": {"block": 0},
    "blocks of 4": {"block": 4},
    "prefill in chunks of 64": {"chunk": 64},
    "four at once": {"crowd": 3},
    "prefix cached": {"is_cached": True},
}
NUMBERS = itertools.count()

Prompts = tuple[list[int], list[int]]


@dataclass(frozen=True)
class Answer:
    """The tokens of an answer, and the CPU seconds of its prefill and decoding."""

    token_ids: list[int]
    prefill_s: float
    decode_s: float


class Place:
    """The engines of one mode: a drafter, and targets with large and with small prefill chunks."""

    def __init__(self, settings: dict[str, Any]) -> None:
        target, drafter = (load_model(_config(role, settings)) for role in ("target", "drafter"))
        self._targets = {
            chunk: Engine(target, _config("target", settings | {"step_tokens": chunk}))
            for chunk in (512, 64)
        }
        self._drafter = Engine(drafter, _config("drafter", settings))

    async def answer(
        self,
        asked: Prompts,
        seed: int,
        *,
        block: int = 10,
        eta: float = 0.0,
        chunk: int = 512,
        crowd: int = 0,
        is_cached: bool = False,
    ) -> Answer:
        """Answer in one way of computing; a block of 0 is plain decoding."""
        tenant = f"tenant-{next(NUMBERS)}"  # a new tenant finds only what it cached itself
        if is_cached:
            await self._one(asked, seed + 1, tenant, 0, 0.0, chunk)
        others = [
            self._one(asked, seed + 2 + i, f"{tenant}-{i}", block, eta, chunk) for i in range(crowd)
        ]
        own = self._one(asked, seed, tenant, block, eta, chunk)
        return (await asyncio.gather(own, *others))[0]

    async def _one(
        self, asked: Prompts, seed: int, tenant: str, block: int, eta: float, chunk: int
    ) -> Answer:
        lease_id, target = f"answer-{next(NUMBERS)}", self._targets[chunk]
        settings = (
            SamplingConfig(temperature=1.0, seed=seed),
            SpeculationConfig(eta=eta, max_draft=block or 10, coupling="shared_noise"),
        )
        async with AsyncExitStack() as held:
            prefill_s = 0.0
            for engine, prompt in zip(
                (target, self._drafter)[: 1 + bool(block)], asked, strict=False
            ):
                request = LeaseRequest(
                    lease_id, Terms(tenant, *settings, MAX_TOKENS), as_prompt(prompt)
                )
                await engine.open(request)
                held.callback(engine.release, lease_id)
                began = time.process_time()
                await engine.prefill(lease_id)
                prefill_s = prefill_s or time.process_time() - began
            token_ids: list[int] = []
            began = time.process_time()
            async for verdict in speculate(
                EngineDrafter(self._drafter, lease_id) if block else None,
                EngineVerifier(target, lease_id),
                max_tokens=MAX_TOKENS,
                max_draft=block or 10,
            ):
                token_ids += verdict.token_ids
            return Answer(token_ids, prefill_s, time.process_time() - began)


def _config(role: str, settings: dict[str, Any]) -> EngineConfig:
    return EngineConfig(
        model=f"embedded:{role}",
        device="cpu",
        threads=1,
        max_context=1024,
        kv_cache_tokens=16 * 1024,
        draft_ahead=False,
        **settings,
    )


async def measure(num_questions: int) -> tuple[list[list[object]], dict[str, Any]]:
    places = {mode: Place(settings) for mode, settings in MODES.items()}
    differing = {mode: dict.fromkeys([*WAYS, "fused, blocks of 4"], 0) for mode in MODES}
    ms: dict[str, dict[str, list[float]]] = {
        mode: {"prefill": [], "plain": [], "lossless": []} for mode in MODES
    }
    for number in range(num_questions):
        asked, seed = prompts(f"determinism-{number}", DOCUMENT_TOKENS), 1000 * number
        for mode, place in places.items():
            usual = await place.answer(asked, seed)
            ms[mode]["prefill"].append(1e3 * usual.prefill_s / len(asked[0]))
            ms[mode]["lossless"].append(1e3 * usual.decode_s / len(usual.token_ids))
            for name, way in WAYS.items():
                other = await place.answer(asked, seed, **way)
                differing[mode][name] += other.token_ids != usual.token_ids
                if name == "plain":
                    ms[mode]["plain"].append(1e3 * other.decode_s / len(other.token_ids))
            fused, other = [await place.answer(asked, seed, eta=10.0, block=k) for k in (10, 4)]
            differing[mode]["fused, blocks of 4"] += other.token_ids != fused.token_ids
    rows, cases = [], {}
    for mode in MODES:
        slower = {what: ratios(ms[mode][what], ms["bfloat16"][what]) for what in ms[mode]}
        cases[mode] = {"differing": differing[mode], "over_bfloat16": slower}
        num_differing = sum(differing[mode].values())
        total = f"{num_differing} of {num_questions * len(differing[mode])}"
        medians = [f"{slower[what]['median']:.2f}" for what in ("prefill", "plain", "lossless")]
        rows.append([mode, *differing[mode].values(), total, *medians])
    return rows, cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--questions", type=int, default=84)
    parser.add_argument("--quick", action="store_true", help="four questions, nothing kept")
    arguments = parser.parse_args()
    num_questions = 4 if arguments.quick else arguments.questions
    rows, cases = asyncio.run(measure(num_questions))
    header = ["", *WAYS, "fused, blocks of 4", "differ", "prefill", "plain", "lossless"]
    text = (
        table(header, rows)
        + "\nAnswers of each way that differ from the usual one's; the last three columns are CPU "
        + "time over bfloat16's, median over the questions.\n"
    )
    settings = {
        "questions": num_questions,
        "document_tokens": DOCUMENT_TOKENS,
        "max_tokens": MAX_TOKENS,
        "threads": 1,
    }
    title = "Seeded answers that differ with what is computed together: the embedded models, CPU"
    report = {"settings": settings, "cases": cases}
    keep(None if arguments.quick else "determinism", title, text, report)


if __name__ == "__main__":
    main()

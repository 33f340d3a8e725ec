"""The loops that `rounds.py` times: between bare actors, over leases, behind an orchestrator."""

from __future__ import annotations

import asyncio
import functools
import time
from typing import Any

import numpy as np
import ray

from cluster.leases import hold
from deployments.orchestrator.call_batches import find_shared_calls
from deployments.orchestrator.ray_verifiers import RayDrafter, RayVerifier
from rapid.answering.answers import GrowingAnswer
from rapid.chat_messages import Message
from rapid.checkpoints.text import ChatText
from rapid.config import EngineConfig, SamplingConfig, SpeculationConfig
from rapid.estimators import Patience
from rapid.messages import (
    DraftBlock,
    GenerateRequest,
    LeaseRequest,
    SpeculationRequest,
    Terms,
    Verdict,
    as_prompt,
)
from rapid.speculation.loop import speculate
from tests.fakes import FakeEngine

BLOCK, CANDIDATES, CONCURRENT = 10, 64, 16
SHARING = 4  # loops that one call serves, where loops share calls


def block(num_tokens: int = BLOCK) -> DraftBlock:
    return DraftBlock(
        lease_id="bare",
        choice=0,
        position=0,
        token_ids=np.arange(num_tokens, dtype=np.int32),
        candidate_ids=np.zeros((num_tokens, CANDIDATES), np.int32),
        candidate_probs=np.zeros((num_tokens, CANDIDATES), np.float32),
    )


@ray.remote(num_cpus=0, max_concurrency=1000)
class Bare:
    """An actor at either end of the bare ping-pong."""

    async def draft(self, verdict: Verdict | None, num_tokens: int) -> DraftBlock:
        return block(num_tokens)

    async def verify(self, drafted: DraftBlock) -> Verdict:
        return Verdict("bare", 0, drafted.position, tuple(range(BLOCK)), BLOCK, BLOCK, False)

    async def draft_all(self, verdicts: list[Verdict | None], num_tokens: int) -> list[DraftBlock]:
        return [block(num_tokens) for _ in verdicts]

    async def verify_all(self, drafted: list[DraftBlock]) -> list[Verdict]:
        return [await self.verify(each) for each in drafted]


@ray.remote(num_cpus=0, max_concurrency=1000)
class Loops:
    """An actor that runs loops side by side and times them."""

    def __init__(self, target: Any, drafter: Any) -> None:
        self._pools = target, drafter
        self._text = ChatText.load("embedded:target")

    async def bare(self, ping: Any, pong: Any, length: int, loops: int, rounds: int) -> float:
        async def loop() -> None:
            verdict = None
            for _ in range(rounds):
                verdict = await pong.verify.remote(ping.draft.remote(verdict, length))

        began = time.perf_counter()
        await asyncio.gather(*(loop() for _ in range(loops)))
        return time.perf_counter() - began

    async def shared(self, ping: Any, pong: Any, loops: int, rounds: int) -> float:
        """Loops in step: one call drafts for several of them, and one judges their blocks."""

        async def together(num_loops: int) -> None:
            verdicts: list[Verdict | None] = [None] * num_loops
            for _ in range(rounds):
                verdicts = await pong.verify_all.remote(ping.draft_all.remote(verdicts, BLOCK))

        began = time.perf_counter()
        sizes = [SHARING] * (loops // SHARING) + [loops % SHARING] * bool(loops % SHARING)
        await asyncio.gather(*map(together, sizes))
        return time.perf_counter() - began

    async def ours(self, loops: int, rounds: int, is_shared: bool = True) -> float:
        ready = asyncio.Barrier(loops + 1)

        async def loop(index: int) -> None:
            request = LeaseRequest(
                f"{time.time_ns()}-{index}",
                Terms("local", SamplingConfig(seed=1), SpeculationConfig(), BLOCK * rounds),
                np.arange(100, dtype=np.int32),
            )
            take = functools.partial(hold, request=request, timeout_s=30, renew_every_s=5)
            async with take(self._pools[0]) as target, take(self._pools[1]) as drafter:
                answer = GrowingAnswer(0, self._text, (), BLOCK * rounds)
                verdicts = speculate(
                    RayDrafter(
                        drafter, 0, find_shared_calls(drafter.engine) if is_shared else None
                    ),
                    RayVerifier(
                        target,
                        lambda: drafter,
                        Patience(30),
                        calls=find_shared_calls(target.engine) if is_shared else None,
                    ),
                    max_tokens=BLOCK * rounds,
                    max_draft=BLOCK,
                )
                await ready.wait()
                async for _ in answer.follow(verdicts):
                    pass
                assert answer.statistics.rounds == rounds
                await ready.wait()

        running = [asyncio.create_task(loop(index)) for index in range(loops)]
        await ready.wait()
        began = time.perf_counter()
        await ready.wait()
        took = time.perf_counter() - began
        await asyncio.gather(*running)
        return took

    async def answers(
        self, target: Any, drafter: Any, asked: list[tuple[list[int], list[int]]]
    ) -> dict[str, float]:
        """Return the milliseconds of all rounds over engines that compute, and the engines' times.

        Args:
            asked: Pairs of prompts, for target and drafter.
        """
        totals = dict.fromkeys(("ms", "rounds", "draft_ms", "verify_ms"), 0.0)
        speculation = SpeculationConfig(eta=0, max_draft=BLOCK)
        for long, short in asked:
            requests = [
                LeaseRequest(
                    f"{time.time_ns()}",
                    Terms("local", SamplingConfig(seed=1), speculation, 64),
                    as_prompt(ids),
                )
                for ids in (long, short)
            ]
            take = functools.partial(hold, timeout_s=30, renew_every_s=5)
            async with take(target, requests[0]) as reader, take(drafter, requests[1]) as other:
                for lease in (reader, other):
                    await lease.engine.prefill.remote(lease.lease_id)
                answer = GrowingAnswer(0, self._text, (), 64)
                rounds = speculate(
                    RayDrafter(other),
                    RayVerifier(reader, lambda: other, Patience(30)),
                    max_tokens=64,
                    max_draft=BLOCK,
                )
                began = time.perf_counter()
                async for _ in answer.follow(rounds):
                    pass
                totals["ms"] += 1e3 * (time.perf_counter() - began)
            totals["rounds"] += answer.statistics.rounds
            totals["draft_ms"] += answer.statistics.draft_ms
            totals["verify_ms"] += answer.statistics.verify_ms
        return totals


async def requests(orchestrator: Any, method: str, loops: int, rounds: int) -> float:
    """Return the seconds of so many rounds of all requests, without opening them.

    That is the difference between answers of twice as many rounds and of as many.
    """
    generate = orchestrator.options(stream=True, method_name=method, _by_reference=False)

    async def ask(index: int, num_tokens: int) -> None:
        request = GenerateRequest(
            f"{time.time_ns()}-{index}",
            "local",
            (Message("user", "Which harbour?"),),
            seed=1,
            max_tokens=num_tokens,
            is_streamed=method == "generate",
            speculation=SpeculationRequest(mode="lossless"),
        )
        async for _ in generate.remote(request):
            pass

    async def seconds(rounds: int) -> float:
        began = time.perf_counter()
        await asyncio.gather(*(ask(index, BLOCK * rounds) for index in range(loops)))
        return time.perf_counter() - began

    return await seconds(2 * rounds) - await seconds(rounds)


async def fake_engine_ms(rounds: int) -> float:
    """Return the milliseconds that the two fakes spend on a round in process."""
    engine = FakeEngine(EngineConfig(model="fake", kv_cache_tokens=2**20), candidates=CANDIDATES)
    for role in "td":
        await engine.open(
            LeaseRequest(
                role,
                Terms("local", SamplingConfig(seed=1), SpeculationConfig(), BLOCK * rounds),
                np.arange(100, dtype=np.int32),
            )
        )
    verdict = None
    began = time.perf_counter()
    for _ in range(rounds):
        verdict = await engine.verify("t", 0, await engine.draft("d", 0, verdict, BLOCK))
    return 1e3 * (time.perf_counter() - began) / rounds

"""Stand-ins with real ledgers and no models, for tests of everything around the engines."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from dataclasses import dataclass, field, replace

import numpy as np

from rapid.config import EngineConfig
from rapid.engine_status import EngineStatus, Erasure, LeaseUsage
from rapid.engines.kv.cache import PageTable
from rapid.engines.kv.sequences import Sequence
from rapid.errors import EngineFailed, LeaseNotFound, OutOfStep, PromptTooLong
from rapid.messages import (
    DraftBlock,
    LeaseRequest,
    PrefillReceipt,
    ReadSoFar,
    TargetLogits,
    TokenLogprobs,
    Verdict,
)

FIRST_ID, NUM_IDS = 30, 400


def scripted_token(seed: int, choice: int, position: int) -> int:
    """The answer of every fake: a function of seed, choice and position, of nothing else."""
    return FIRST_ID + (7 * position + 31 * choice + 13 * seed) % NUM_IDS


@dataclass
class FakeLease:
    request: LeaseRequest
    num_pages: int
    committed: list[list[int]] = field(default_factory=list)
    last_used: float = field(default_factory=time.monotonic)
    closed: asyncio.Event = field(default_factory=asyncio.Event)


class WatchedBlock:
    """A block that writes down in which processes it is opened; there it is a plain block."""

    def __init__(self, path: str, block: DraftBlock) -> None:
        self.path, self.block = path, block
        self.candidate_ids, self.candidate_probs = block.candidate_ids, block.candidate_probs

    def __reduce__(self) -> tuple[object, ...]:
        return _open_block, (self.path, self.block)


def _open_block(path: str, block: DraftBlock) -> DraftBlock:
    with open(path, "a") as file:
        file.write(f"{os.getpid()}\n")
    return block


class FakeEngine:
    """The engine's facade without a model: same methods, same errors, same ledger.

    Every engine's answer is `scripted_token`; as a drafter it proposes a wrong token at each
    `wrong_every`-th position. A step takes as many milliseconds as the seed has thousands, so a
    request with seed 50_007 takes 50 ms a step. With `eos_at` the answer ends there. `opened_by`
    names a file to which every process that unpickles a block adds its id.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        wrong_every: int = 0,
        prefill_s: float = 0.0,
        eos_id: int = 2,
        eos_at: int | None = None,
        candidates: int = 1,
        vocab: int = 768,
        opened_by: str | None = None,
    ) -> None:
        self.config = config
        self.wrong_every, self.prefill_s = wrong_every, prefill_s
        self.eos_id, self.eos_at, self.candidates = eos_id, eos_at, candidates
        self.vocab, self.opened_by = vocab, opened_by
        self.leases: dict[str, FakeLease] = {}
        self.pages_total = config.kv_cache_tokens // config.page_tokens
        self.pages_in_use = self.num_waiting = 0
        self._room = asyncio.Condition()
        self.closed = asyncio.Event()

    async def open(self, request: LeaseRequest) -> None:
        self.check_running()
        context = self.config.max_context or self.config.kv_cache_tokens
        num_tokens = len(request.prompt_ids) + request.terms.max_tokens
        if num_tokens > context:
            raise PromptTooLong(f"{num_tokens - context} tokens too long for this engine")
        num_pages = -(-num_tokens // self.config.page_tokens) * request.terms.num_choices
        self.num_waiting += 1
        try:
            async with self._room:
                await self._room.wait_for(lambda: self._has_room(num_pages))
                self.pages_in_use += num_pages
        finally:
            self.num_waiting -= 1
        committed = request.committed or ((),) * request.terms.num_choices
        self.leases[request.lease_id] = FakeLease(request, num_pages, [list(c) for c in committed])

    async def prefill(self, lease_id: str) -> PrefillReceipt:
        lease = self._lease(lease_id)
        await asyncio.sleep(self.prefill_s)
        return PrefillReceipt(lease_id, len(lease.request.prompt_ids), 0)

    def read_so_far(self, lease_id: str) -> ReadSoFar:
        self._lease(lease_id)
        return ReadSoFar()

    async def forget(self, documents: object) -> tuple[Erasure, ...]:
        return (Erasure("nothing"),)  # it computes no KV

    def settle(self, lease_id: str) -> LeaseUsage:
        self._lease(lease_id)
        return LeaseUsage(0.25, 1000.0)

    async def draft(
        self, lease_id: str, choice: int, verdict: Verdict | None, num_tokens: int
    ) -> DraftBlock:
        lease = self._lease(lease_id)
        if verdict is not None:
            self._commit(lease, verdict)
        await self._compute(lease)
        start = len(lease.committed[choice])
        ids = np.array(
            [self._drafted(lease, choice, start + i) for i in range(num_tokens)], np.int32
        )
        spread = np.arange(self.candidates, dtype=np.int32)
        probs = np.full((num_tokens, self.candidates), 1e-6, np.float32)
        probs[:, 0] = 1.0 - 1e-6 * (self.candidates - 1)
        block = DraftBlock(
            lease_id=lease_id,
            choice=choice,
            position=start,
            token_ids=ids,
            candidate_ids=(ids[:, None] + spread) % self.vocab,
            candidate_probs=probs,
            digest=self._digest(lease, choice),
        )
        return WatchedBlock(self.opened_by, block) if self.opened_by else block

    async def verify(
        self,
        lease_id: str,
        choice: int,
        block: DraftBlock,
        witness: tuple[FakeEngine, str] | None = None,
    ) -> Verdict:
        lease = self._lease(lease_id)
        told = self._lease(witness[1]) if witness else None
        assert told is None or told.committed[choice] == lease.committed[choice]
        await self._compute(lease)
        start = len(lease.committed[choice])
        if block.position != start:
            raise OutOfStep(f"a block for position {block.position} at {start}")
        if block.digest not in (None, self._digest(lease, choice)):
            raise OutOfStep("a block for another text")
        token_ids: list[int] = []
        num_accepted = 0
        for drafted in block.token_ids.tolist() or [None]:  # an empty block decodes one token
            token_ids.append(self._answer(lease, choice, start + len(token_ids)))
            num_accepted += token_ids[-1] == drafted
            if token_ids[-1] != drafted or token_ids[-1] == self.eos_id:
                break
        verdict = self._verdict(lease, choice, start, token_ids, len(block), num_accepted)
        verdict = replace(verdict, lease_id=block.lease_id)
        for each in (lease, told) if told else (lease,):
            self._commit(each, verdict)
        return verdict

    async def score(self, lease_id: str, choice: int, block: DraftBlock) -> TargetLogits:
        lease = self._lease(lease_id)
        await self._compute(lease)
        start = len(lease.committed[choice])
        logits = np.zeros((max(len(block), 1), self.vocab), np.float32)
        for row in range(len(logits)):
            logits[row, self._answer(lease, choice, start + row)] = 100.0
        return TargetLogits(lease_id, choice, start, logits)

    async def commit(self, lease_id: str, verdict: Verdict) -> None:
        self._commit(self._lease(lease_id), verdict)

    async def decode(self, lease_id: str, choice: int, num_tokens: int) -> Verdict:
        lease = self._lease(lease_id)
        await self._compute(lease)
        start = len(lease.committed[choice])
        token_ids: list[int] = []
        while len(token_ids) < num_tokens and self.eos_id not in token_ids:
            token_ids.append(self._answer(lease, choice, start + len(token_ids)))
        verdict = self._verdict(lease, choice, start, token_ids, 0, 0)
        self._commit(lease, verdict)
        return verdict

    async def wait_closed(self, lease_id: str) -> str:
        lease = self._lease(lease_id)
        while not lease.closed.is_set():
            left = lease.last_used + self.config.lease_ttl_s - time.monotonic()
            if left <= 0:
                self.release(lease_id)
                return "expired"
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(lease.closed.wait(), left)
        return "released"

    def renew(self, lease_id: str) -> None:
        self._lease(lease_id)

    def release(self, lease_id: str) -> None:
        lease = self.leases.pop(lease_id, None)
        if lease is not None:
            self.pages_in_use -= lease.num_pages
            lease.closed.set()
            self._waking = asyncio.ensure_future(self._wake())

    def forgo_companion(self, lease_id: str) -> None:
        pass

    def check_running(self) -> None:
        if self.closed.is_set():
            raise EngineFailed("the engine is closed")

    async def until_closed(self) -> None:
        await self.closed.wait()

    def status(self) -> EngineStatus:
        return EngineStatus(
            leases_open=len(self.leases),
            max_leases=self.config.max_leases,
            kv_pages_in_use=self.pages_in_use,
            kv_pages_total=self.pages_total,
            page_tokens=self.config.page_tokens,
            max_context=self.config.max_context or self.config.kv_cache_tokens,
            leases_waiting=self.num_waiting,
        )

    def check_integrity(self) -> None:
        assert self.pages_in_use == sum(lease.num_pages for lease in self.leases.values())

    def close(self) -> None:
        self.leases.clear()

    def _has_room(self, num_pages: int) -> bool:
        free = self.pages_total - self.pages_in_use
        return num_pages <= free and len(self.leases) < self.config.max_leases

    async def _wake(self) -> None:
        async with self._room:
            self._room.notify_all()

    async def _compute(self, lease: FakeLease) -> None:
        milliseconds, _ = divmod(lease.request.terms.sampling.seed, 1000)
        if 0 < milliseconds < 1000:  # a drawn seed is larger
            await asyncio.sleep(milliseconds / 1000)

    def _lease(self, lease_id: str) -> FakeLease:
        if lease_id not in self.leases:
            raise LeaseNotFound(f"no lease {lease_id}")
        lease = self.leases[lease_id]
        lease.last_used = time.monotonic()
        return lease

    def _answer(self, lease: FakeLease, choice: int, position: int) -> int:
        if position == self.eos_at:
            return self.eos_id
        return scripted_token(lease.request.terms.sampling.seed % 1000, choice, position)

    def _drafted(self, lease: FakeLease, choice: int, position: int) -> int:
        answer = self._answer(lease, choice, position)
        is_wrong = self.wrong_every and position % self.wrong_every == self.wrong_every - 1
        return answer + 1 if is_wrong else answer

    def _digest(self, lease: FakeLease, choice: int) -> int:
        name = f"{lease.request.terms.answer_id}/{choice}"
        return Sequence((), lease.committed[choice], PageTable((), 1), 0, name=name).digest

    def _commit(self, lease: FakeLease, verdict: Verdict) -> None:
        committed = lease.committed[verdict.choice]
        if verdict.position != len(committed):
            raise OutOfStep(f"a verdict for position {verdict.position} at {len(committed)}")
        committed.extend(verdict.token_ids)

    def _verdict(
        self,
        lease: FakeLease,
        choice: int,
        position: int,
        token_ids: list[int],
        num_drafted: int,
        num_accepted: int,
    ) -> Verdict:
        logprobs: tuple[TokenLogprobs, ...] = ()
        if (count := lease.request.terms.num_logprobs) is not None:
            logprobs = tuple(TokenLogprobs(t, 0.0, ((t, 0.0),) * count) for t in token_ids)
        return Verdict(
            lease_id=lease.request.lease_id,
            choice=choice,
            position=position,
            token_ids=tuple(token_ids),
            num_drafted=num_drafted,
            num_accepted=num_accepted,
            is_finished=token_ids[-1] == self.eos_id,
            logprobs=logprobs,
        )

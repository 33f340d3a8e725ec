"""An engine over toy models: the real ledger and the real rule, and no step that computes.

Every call visits a `FaultSource`, which decides what befalls it: nothing, a delay, a failure, the
loss of its lease.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import torch

from rapid.config import EngineConfig
from rapid.engine_status import EngineStatus, LeaseUsage
from rapid.engines.kv.cache import PagePool
from rapid.engines.kv.leases.lease import Lease
from rapid.engines.kv.leases.lease_ledger import LeaseLedger
from rapid.errors import LeaseNotFound, OutOfStep
from rapid.messages import (
    DraftBlock,
    LeaseRequest,
    PrefillReceipt,
    ReadSoFar,
    TargetLogits,
    Verdict,
)
from rapid.speculation.acceptance import num_rows
from tests.toy import ToyDrafter, ToyVerifier

VOCAB, EOS = 1024, 5  # of the embedded tokenizer
NUM_SAID = 36  # of its tokens are ever said


class ToyReader:
    """A toy model with its prompt, as the engines and as `rapid.reference` ask it.

    All models share most of what they think, so that many drafts are accepted.
    """

    def __init__(self, name: str, prompt_ids: Sequence[int]) -> None:
        self._key = f"{name}:{zlib.crc32(str(list(prompt_ids)).encode())}"

    def row(self, answer: Sequence[int]) -> np.ndarray[Any, Any]:
        """The logits after an answer so far [vocab]."""
        told = str(list(answer))
        row = np.full(VOCAB, -100, np.float32)
        row[:NUM_SAID] = 2 * _numbers(told) + _numbers(f"{self._key}:{told}")
        return row

    def logits(self, answer: Sequence[int], count: int | None = None) -> Any:
        """One row as an engine's, or the last `count` of them as the reference reads them."""
        if count is None:
            return torch.from_numpy(self.row(answer))
        first = len(answer) - count + 1
        return np.stack([self.row(answer[:stop]) for stop in range(first, len(answer) + 1)]).astype(
            np.float64
        )


class ReferenceReader(ToyReader):
    """The same model for `rapid.reference.generate`."""

    def logits(self, answer: Sequence[int], count: int | None = 1) -> Any:
        return super().logits(answer, count)


@lru_cache(100_000)
def _numbers(key: str) -> np.ndarray[Any, Any]:
    random = np.random.default_rng(zlib.crc32(key.encode()))
    numbers: np.ndarray[Any, Any] = random.normal(size=NUM_SAID).astype(np.float32)
    return numbers


class FaultSource(Protocol):
    """What befalls the calls of engines."""

    async def visit(self, engine: ToyEngine, method: str, lease_id: str) -> None:
        """Let a call through, late or early, or raise what it ends with."""
        ...

    def read_s(self, engine: ToyEngine, lease_id: str) -> float:
        """Seconds that a piece of a prompt takes to read; infinite for one that hangs."""
        ...


@dataclass(frozen=True)
class ToyLease:
    """The answers of a lease."""

    request: LeaseRequest
    lease: Lease
    drafters: list[ToyDrafter]
    verifiers: list[ToyVerifier]
    closed: asyncio.Event

    def committed(self, choice: int) -> list[int]:
        return self.verifiers[choice].committed


class ToyEngine:
    """The facade of `rapid.engines.engine.Engine` over a toy model."""

    def __init__(
        self, name: str, config: EngineConfig, faults: FaultSource, clock: Callable[[], float]
    ) -> None:
        self.name, self.config, self._faults = name, config, faults
        self._leases: dict[str, ToyLease] = {}
        self.ledger = LeaseLedger(
            PagePool(config.kv_cache_tokens // config.page_tokens),
            config.page_tokens,
            config.max_leases,
            config.max_context or config.kv_cache_tokens,
            config.lease_ttl_s,
            clock,
        )

    # --- leases ---------------------------------------------------------------------------------

    async def open(self, request: LeaseRequest, *, expires: bool = True) -> None:
        await self._faults.visit(self, "open", request.lease_id)
        admitted = asyncio.get_running_loop().create_future()
        waiter = self.ledger.prepare(request, admitted.set_result)
        self.ledger.submit(waiter)
        try:
            lease = await admitted
        except asyncio.CancelledError:
            if not self.ledger.withdraw(waiter):
                self.release(request.lease_id)
            raise
        if isinstance(lease, Exception):
            raise lease
        lease.expires = expires
        reader = ToyReader(self.name, request.prompt_ids.tolist())
        settings = reader, request.terms.sampling, request.terms.speculation
        choices = range(request.terms.num_choices)
        toy = ToyLease(
            request,
            lease,
            [ToyDrafter(*settings, each) for each in choices],  # type: ignore[arg-type]
            [
                ToyVerifier(*settings, each, frozenset({EOS}), request.terms.max_tokens)  # type: ignore[arg-type]
                for each in choices
            ],
            asyncio.Event(),
        )
        for choice, committed in enumerate(request.committed):
            toy.committed(choice).extend(committed)
        for choice, log_odds in enumerate(request.log_odds):
            toy.verifiers[choice].log_odds = log_odds
        self._leases[request.lease_id] = toy

    def release(self, lease_id: str) -> None:
        self.ledger.release(lease_id)
        if toy := self._leases.pop(lease_id, None):
            toy.closed.set()

    async def wait_closed(self, lease_id: str) -> str:
        toy = self._lease(lease_id)
        while not toy.closed.is_set():
            self._expire()
            try:
                async with asyncio.timeout(1):
                    await toy.closed.wait()
            except TimeoutError:
                continue
        return "released"

    def renew(self, lease_id: str) -> None:
        self.ledger.touch(self._lease(lease_id).lease)

    def forgo_companion(self, lease_id: str) -> None:
        self.ledger.forgo_companion(lease_id)

    def check_running(self) -> None:
        pass

    def status(self) -> EngineStatus:
        return self.ledger.status()

    def check_integrity(self) -> None:
        self.ledger.check_integrity()
        assert {each.lease_id for each in self.ledger.leases()} == set(self._leases)

    # --- calls ----------------------------------------------------------------------------------

    async def prefill(self, lease_id: str) -> PrefillReceipt:
        return await self._call("prefill", lease_id, self._read)

    async def _read(self, toy: ToyLease) -> PrefillReceipt:
        piece_s = self._faults.read_s(self, toy.request.lease_id)
        num_tokens = len(toy.request.prompt_ids)
        for piece in range(1, 9):
            await _sleep(piece_s)
            self._lease(toy.request.lease_id).lease.read_so_far = ReadSoFar(num_tokens * piece // 8)
        return PrefillReceipt(toy.request.lease_id, num_tokens, 0)

    def settle(self, lease_id: str) -> LeaseUsage:
        return self.ledger.settle(self._lease(lease_id).request.lease_id)

    def read_so_far(self, lease_id: str) -> ReadSoFar:
        return self._lease(lease_id).lease.read_so_far

    async def draft(
        self, lease_id: str, choice: int, verdict: Verdict | None, num_tokens: int
    ) -> DraftBlock:
        async def draft(toy: ToyLease) -> DraftBlock:
            self._check_read(toy)
            if verdict is not None:
                self._commit(toy, verdict)
            block = toy.drafters[choice].block(toy.committed(choice), num_tokens)
            return replace(block, lease_id=lease_id)

        return await self._call("draft", lease_id, draft)

    async def verify(
        self,
        lease_id: str,
        choice: int,
        block: DraftBlock,
        witness: tuple[ToyEngine, str] | None = None,
    ) -> Verdict:
        async def verify(toy: ToyLease) -> Verdict:
            told = self._told(toy, choice, witness)
            verifier = toy.verifiers[choice]
            self._check_read(toy)
            self._check(block.position, toy, choice)
            verifier.witness = told.verifiers[choice].model if told else None
            verdict = await verifier.verify(block)
            if told is not None:
                told.committed(choice).extend(verdict.token_ids)
            return verdict

        return await self._call("verify", lease_id, verify)

    async def score(self, lease_id: str, choice: int, block: DraftBlock) -> TargetLogits:
        async def score(toy: ToyLease) -> TargetLogits:
            self._check_read(toy)
            self._check(block.position, toy, choice)
            tokens = [*toy.committed(choice), *block.token_ids.tolist()]
            model = toy.verifiers[choice].model
            num_left = toy.request.terms.max_tokens - block.position
            count = num_rows(len(block), num_left, toy.request.terms.speculation)
            stops = range(block.position, block.position + count)
            rows = np.stack([model.logits(tokens[:stop]).numpy() for stop in stops])
            return TargetLogits(lease_id, choice, block.position, rows)

        return await self._call("score", lease_id, score)

    async def commit(self, lease_id: str, verdict: Verdict) -> None:
        async def commit(toy: ToyLease) -> None:
            self._commit(toy, verdict)

        await self._call("commit", lease_id, commit)

    async def decode(self, lease_id: str, choice: int, num_tokens: int) -> Verdict:
        async def decode(toy: ToyLease) -> Verdict:
            self._check_read(toy)
            return await toy.verifiers[choice].decode(num_tokens)

        return await self._call("decode", lease_id, decode)

    async def _call(
        self, method: str, lease_id: str, work: Callable[[ToyLease], Awaitable[Any]]
    ) -> Any:
        """Do some work on a lease, between what befalls the call before and after it."""
        lease = self._lease(lease_id).lease
        lease.busy.add(0)
        try:
            await self._faults.visit(self, method, lease_id)
            answer = await work(self._lease(lease_id))
            await self._faults.visit(self, method, lease_id)
            self._lease(lease_id)
            return answer
        finally:
            lease.busy.clear()
            self.ledger.touch(lease)

    def _expire(self) -> None:
        for lease in self.ledger.find_expired():
            self.release(lease.lease_id)

    def _lease(self, lease_id: str) -> ToyLease:
        self._expire()
        if lease_id not in self._leases:
            raise LeaseNotFound(f"no lease {lease_id}")
        toy = self._leases[lease_id]
        self.ledger.touch(toy.lease)
        return toy

    def _told(
        self, toy: ToyLease, choice: int, witness: tuple[ToyEngine, str] | None
    ) -> ToyLease | None:
        if witness is None:
            return None
        engine, lease_id = witness
        assert engine is self
        told = self._lease(lease_id)
        self._check_read(told)
        if told.committed(choice) != toy.committed(choice):
            raise OutOfStep("the witness holds another answer")
        return told

    def _check_read(self, toy: ToyLease) -> None:
        if toy.lease.read_so_far.num_tokens < len(toy.request.prompt_ids):
            raise OutOfStep("the prompt is not read")

    def _check(self, position: int, toy: ToyLease, choice: int) -> None:
        if position != len(toy.committed(choice)):
            raise OutOfStep(f"{position} is not {len(toy.committed(choice))}")

    def _commit(self, toy: ToyLease, verdict: Verdict) -> None:
        self._check(verdict.position, toy, verdict.choice)
        toy.committed(verdict.choice).extend(verdict.token_ids)


async def _sleep(seconds: float) -> None:
    if seconds == float("inf"):
        await asyncio.Event().wait()
    await asyncio.sleep(seconds)

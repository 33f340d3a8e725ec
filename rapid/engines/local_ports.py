"""Implementations of `rapid.ports` over engines in this process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from rapid.config import WindowDrafting
from rapid.engine_status import LeaseUsage
from rapid.engines.engine import Engine
from rapid.engines.forward.weights.loading import LoadedModel
from rapid.errors import DrafterUnavailable, EngineFailed, LeaseNotFound, Overloaded
from rapid.messages import DraftBlock, LeaseRequest, PrefillReceipt, ReadSoFar, Verdict
from rapid.ports import EngineLease


def make_engine(loaded: LoadedModel, vocab_size: int | None, **room: Any) -> Engine:
    """Return an engine of this process for a loaded model.

    `vocab_size` is the number of tokens that all models share, and `room` are fields of
    `rapid.config.EngineConfig` in place of the model's own.
    """
    # Drafting ahead would compete with the target for this process's interpreter.
    config = loaded.config.model_copy(update={"draft_ahead": False, **room})
    return Engine(loaded, config, vocab_size=vocab_size, is_watched=False)


@dataclass(eq=False, slots=True)
class LocalPool:
    """Pool of one engine in this process; see `rapid.ports.EnginePool`."""

    engine: Engine

    @asynccontextmanager
    async def lease(
        self, request: LeaseRequest, *, timeout_s: float | None, beside: EngineLease | None
    ) -> AsyncIterator[LocalLease]:
        """Hold a lease while the context lasts, however long; see `rapid.ports.EnginePool`."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(timeout_s):
                await self.engine.open(request, expires=False)
        except TimeoutError:
            raise Overloaded(f"The engine is full: no room within {timeout_s:g} s.") from None
        try:
            yield LocalLease(self.engine, request.lease_id, time.monotonic() - began)
        finally:
            self.engine.release(request.lease_id)


@dataclass(eq=False, slots=True)
class LocalLease:
    """Lease on an engine in this process; see `rapid.ports.EngineLease`."""

    engine: Engine
    lease_id: str
    queued_s: float = 0.0

    async def prefill(self) -> PrefillReceipt:
        """Compute the KV of the prompt; see `Engine.prefill`."""
        return await self.engine.prefill(self.lease_id)

    async def read_so_far(self) -> ReadSoFar:
        """Return how far the prefill has come; see `Engine.read_so_far`."""
        return self.engine.read_so_far(self.lease_id)

    async def settle(self) -> LeaseUsage:
        """Return what the lease used; see `Engine.settle`."""
        return self.engine.settle(self.lease_id)

    def forgo_companion(self) -> None:
        """Give back the room kept for a companion; see `Engine.forgo_companion`."""
        self.engine.forgo_companion(self.lease_id)

    def drafter(self, choice: int, window: WindowDrafting | None = None) -> EngineDrafter:
        """Return a drafter of one choice on this lease, or on a part of its KV."""
        return EngineDrafter(self.engine, self.lease_id, choice, window)

    def verifier(
        self,
        choice: int,
        drafter: Callable[[], EngineLease | None],
        witness: Callable[[], EngineLease | None] = lambda: None,
    ) -> EngineVerifier:
        """Return a verifier of one choice's draft blocks on this lease."""
        return EngineVerifier(self.engine, self.lease_id, choice, witness)


@dataclass(eq=False, slots=True)
class EngineDrafter:
    """Drafter of one choice; a block is handed out as the task that computes it.

    With a window, it drafts on the verifier's own lease, where verdicts are already committed.
    """

    engine: Engine
    lease_id: str
    choice: int = 0
    window: WindowDrafting | None = None

    def draft(self, verdict: Verdict | None, num_tokens: int) -> asyncio.Task[DraftBlock]:
        """Start drafting; see `rapid.ports.Drafter`."""
        engine, lease_id, choice = self.engine, self.lease_id, self.choice
        if self.window is None:
            drafting = engine.draft(lease_id, choice, verdict, num_tokens)
        else:
            drafting = engine.draft_in_window(lease_id, choice, self.window, num_tokens)
        return asyncio.create_task(drafting)


@dataclass(eq=False, slots=True)
class EngineVerifier:
    """Verifier of one choice's draft blocks, which can also decode without a drafter."""

    engine: Engine
    lease_id: str
    choice: int = 0
    witness: Callable[[], EngineLease | None] = lambda: None

    async def verify(self, block: DraftBlock | Awaitable[DraftBlock]) -> Verdict:
        """Judge a block; see `rapid.ports.Verifier`.

        Raises:
            DrafterUnavailable: The drafter's engine failed, or its lease is gone. Any other error
                that drafting raises is a mistake of the caller's and propagates unchanged.
        """
        try:
            drafted = block if isinstance(block, DraftBlock) else await block
        except (EngineFailed, LeaseNotFound) as error:
            # The caller is in this process, and may see what the engine's step raised.
            why = repr(error.__cause__) if error.__cause__ else str(error)
            raise DrafterUnavailable(f"the drafter gave no block: {why}") from error
        witness = self.witness()
        told = (witness.engine, witness.lease_id) if isinstance(witness, LocalLease) else None
        return await self.engine.verify(self.lease_id, self.choice, drafted, told)

    async def decode(self, num_tokens: int) -> Verdict:
        """Decode without a drafter; see `rapid.ports.Verifier`."""
        return await self.engine.decode(self.lease_id, self.choice, num_tokens)

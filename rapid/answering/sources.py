"""Sources of drafts for a request, one class for each kind.

Every source defines what must be held while it drafts (`hold`), and the drafter of each choice
(`drafter`). A request without a source is decoded plainly.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from typing_extensions import override

from rapid.answering.session import Committed, Holding, Session
from rapid.config import WindowDrafting
from rapid.messages import Int32Array
from rapid.ports import Drafter, EngineLease, EnginePool
from rapid.speculation.lookup import PromptIndex, PromptLookupDrafter


class DraftSource(ABC):
    """A source of drafts for all choices of one request.

    Attributes:
        companion_tokens: Length, in tokens, of the prompt for which the target's engine keeps room,
            because the source will take a second lease there; 0 where it will not.
    """

    companion_tokens = 0

    @property
    def lease(self) -> EngineLease | None:
        """The lease on which the source drafts, if it has one of its own."""
        return None

    @abstractmethod
    async def hold(
        self,
        session: Session,
        verifier: Holding,
        prompt_ids: Int32Array | None,
        *,
        timeout_s: float | None = None,
        committed: Committed = (),
    ) -> None:
        """Take what drafting needs, and release what was held for it before.

        Args:
            session: The session that takes the lease.
            verifier: The target's lease, with its prompt.
            prompt_ids: Prompt of a drafter model; other sources read the target's prompt.
            timeout_s: Longest wait for room, in seconds; None waits without limit.
            committed: For each choice, its tokens so far.

        Raises:
            RapidError: No lease could be had, as in `Session.take`.
        """

    @abstractmethod
    def drafter(self, choice: int, committed: Sequence[int] = ()) -> Drafter[Any]:
        """Return a drafter for a choice, to continue after its `committed` tokens."""

    async def read(self) -> None:  # noqa: B027 (most sources read nothing of their own)
        """Wait for the prefill of the source's own prompt."""

    async def release(self) -> None:  # noqa: B027 (most sources hold no lease of their own)
        """Release the source's own lease; it drafts no more."""


class PoolSource(DraftSource):
    """A drafter model in a pool of its own, which reads the retrieved text.

    Attributes:
        pool: Pool for the next lease.
    """

    def __init__(self, pool: EnginePool) -> None:
        self.pool = pool
        self._held: Holding | None = None

    @property
    @override
    def lease(self) -> EngineLease | None:
        return self._held.lease if self._held else None

    @override
    async def hold(
        self,
        session: Session,
        verifier: Holding,
        prompt_ids: Int32Array | None,
        *,
        timeout_s: float | None = None,
        committed: Committed = (),
    ) -> None:
        assert prompt_ids is not None
        await self.release()
        self._held = await session.take(
            self.pool,
            "drafter",
            prompt_ids,
            timeout_s=timeout_s,
            committed=committed,
            beside=self._beside(verifier),
        )

    @override
    def drafter(self, choice: int, committed: Sequence[int] = ()) -> Drafter[Any]:
        assert self._held is not None
        return self._held.lease.drafter(choice)

    @override
    async def read(self) -> None:
        assert self._held is not None
        await self._held.prefill

    @override
    async def release(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            await held.release()

    def _beside(self, verifier: Holding) -> Holding | None:
        return None


class CompanionSource(PoolSource):
    """The target's own engine, which drafts on a second lease beside the verifier's."""

    def __init__(self, pool: EnginePool, companion_tokens: int) -> None:
        super().__init__(pool)
        self.companion_tokens = companion_tokens

    @override
    def _beside(self, verifier: Holding) -> Holding | None:
        return verifier


class LookupSource(DraftSource):
    """Prompt lookup in the target's prompt."""

    def __init__(self) -> None:
        self._index: PromptIndex | None = None

    @override
    async def hold(
        self,
        session: Session,
        verifier: Holding,
        prompt_ids: Int32Array | None,
        *,
        timeout_s: float | None = None,
        committed: Committed = (),
    ) -> None:
        if self._index is None:
            self._index = await asyncio.to_thread(PromptIndex, verifier.prompt_ids)

    @override
    def drafter(self, choice: int, committed: Sequence[int] = ()) -> Drafter[Any]:
        assert self._index is not None
        return PromptLookupDrafter(self._index, choice, committed)


class WindowSource(DraftSource):
    """The target itself, drafting on a part of its own KV (MagicDec)."""

    def __init__(self, window: WindowDrafting) -> None:
        self._window = window
        self._verifier: Holding | None = None

    @override
    async def hold(
        self,
        session: Session,
        verifier: Holding,
        prompt_ids: Int32Array | None,
        *,
        timeout_s: float | None = None,
        committed: Committed = (),
    ) -> None:
        self._verifier = verifier

    @override
    def drafter(self, choice: int, committed: Sequence[int] = ()) -> Drafter[Any]:
        assert self._verifier is not None
        return self._verifier.lease.window_drafter(choice, self._window)

"""What drafts for a request: one class for each kind of draft source.

Every source answers two questions: what must be held while it drafts (`hold`), and what proposes
tokens for a choice (`drafter`). A request without a source is decoded plainly.
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
        companion_tokens: length of the prompt for which the target's engine keeps room, because
            the source will take a second lease there; 0 where it will not.
    """

    companion_tokens = 0

    @property
    def lease(self) -> EngineLease | None:
        """The lease of its own that it drafts on."""
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
        """Take what drafting needs, in the place of what was held before.

        Args:
            session: who holds it.
            verifier: the target's lease, with its prompt.
            prompt_ids: what a drafting model reads; other sources read the target's prompt.
            timeout_s: longest wait for room, in seconds.
            committed: for each choice, its tokens so far.

        Raises:
            RapidError: as `Session.take`.
        """

    @abstractmethod
    def drafter(self, choice: int, committed: Sequence[int] = ()) -> Drafter[Any]:
        """Return what proposes tokens for a choice after its `committed` ones."""

    async def read(self) -> None:  # noqa: B027 (most sources read nothing of their own)
        """Wait until the prompt has been read."""

    async def release(self) -> None:  # noqa: B027 (most sources hold no lease of their own)
        """Give back what is held: nothing will be drafted any more."""


class PoolSource(DraftSource):
    """A model that drafts on the retrieved text, in a pool of its own.

    Attributes:
        pool: where the next lease is taken.
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
    """The target's own engine, which drafts on a second lease beside the first one."""

    def __init__(self, pool: EnginePool, companion_tokens: int) -> None:
        super().__init__(pool)
        self.companion_tokens = companion_tokens

    @override
    def _beside(self, verifier: Holding) -> Holding | None:
        return verifier


class LookupSource(DraftSource):
    """The target's prompt, in which what followed the same words before is found."""

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
    """The target on a part of its own KV (MagicDec)."""

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

"""Sources of drafts for a request, one class for each kind.

Each kind of `DraftSource` defines what must be held while it drafts (`hold`), and the drafter of
each choice (`drafter`). A request without a source is decoded plainly.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from typing_extensions import override

from rapid.answering.session import DraftNeeds, DraftSource, Holding
from rapid.config import WindowDrafting
from rapid.errors import RapidError
from rapid.ports import Drafter, EngineLease, EnginePool
from rapid.speculation.lookup import PromptIndex, PromptLookupDrafter


class PoolSource(DraftSource):
    """A drafter model in a pool of its own, which reads the retrieved text.

    Attributes:
        pool: Pool for the next lease.
    """

    _is_companion = False  # of the verifier's lease, on its engine

    def __init__(self, pool: EnginePool) -> None:
        self.pool = pool
        self._held: Holding | None = None

    @property
    @override
    def lease(self) -> EngineLease | None:
        return self._held.lease if self._held else None

    @override
    async def hold(self, needs: DraftNeeds) -> None:
        await self.release()
        self._held = await needs.take(
            self.pool, "drafter", needs.prompt_ids, is_beside=self._is_companion
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
    async def num_read(self) -> int:
        assert self._held is not None
        return await self._held.lease.num_read()

    @override
    async def release(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            await held.release()


class CompanionSource(PoolSource):
    """The target's own engine, which drafts on a second lease beside the verifier's."""

    _is_companion = True

    def __init__(self, pool: EnginePool, companion_tokens: int) -> None:
        super().__init__(pool)
        self.companion_tokens = companion_tokens


class WitnessedSource(PoolSource):
    """A drafter model in a pool of its own, with the target as a witness of the retrieved text.

    The witness is a lease of the target whose prompt is the retrieved text in the target's own
    template. It holds the same committed tokens, and drafts nothing.

    Attributes:
        witnesses: Pool for the witness's next lease.
    """

    def __init__(
        self, pool: EnginePool, witnesses: EnginePool, companion_tokens: int | None
    ) -> None:
        """Make the source.

        Args:
            pool: Pool of the drafter.
            witnesses: Pool of the witness: the target's, or another one of the same model.
            companion_tokens: Approximate length, in tokens, of the witness's prompt, for which the
                verifier's engine keeps room; None if the pool is another one.
        """
        super().__init__(pool)
        self.witnesses = witnesses
        self.companion_tokens = companion_tokens or 0
        self._is_beside = companion_tokens is not None
        self._witness: Holding | None = None

    @property
    @override
    def witness(self) -> EngineLease | None:
        return self._witness.lease if self._witness else None

    @override
    async def hold(self, needs: DraftNeeds) -> None:
        await super().hold(needs)
        try:
            self._witness = await needs.take(
                self.witnesses, "witness", needs.witness_ids, is_beside=self._is_beside
            )
        except RapidError:
            await self.release()
            raise

    @override
    async def read(self) -> None:
        assert self._witness is not None
        await super().read()
        await self._witness.prefill

    @override
    async def num_read(self) -> int:
        assert self._witness is not None
        return await super().num_read() + await self._witness.lease.num_read()

    @override
    async def release(self) -> None:
        witness, self._witness = self._witness, None
        if witness is not None:
            await witness.release()
        await super().release()


class LookupSource(DraftSource):
    """Prompt lookup in the target's prompt."""

    def __init__(self) -> None:
        self._index: PromptIndex | None = None

    @override
    async def hold(self, needs: DraftNeeds) -> None:
        if self._index is None:
            self._index = await asyncio.to_thread(PromptIndex, needs.verifier.prompt_ids)

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
    async def hold(self, needs: DraftNeeds) -> None:
        self._verifier = needs.verifier

    @override
    def drafter(self, choice: int, committed: Sequence[int] = ()) -> Drafter[Any]:
        assert self._verifier is not None
        return self._verifier.lease.window_drafter(choice, self._window)

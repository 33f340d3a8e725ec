"""Sources of drafts for a request, one class for each kind.

Each kind of `DraftSource` defines what must be held while it drafts (`hold`), and the drafter of
each choice (`drafter`). A request without a source is decoded plainly.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from typing_extensions import override

from rapid.answering.leases.session import DraftNeeds, DraftSource, Holding
from rapid.config import OwnDrafting, PromptLookup, WindowDrafting
from rapid.errors import DrafterUnavailable, RapidError
from rapid.ports import Drafter, EngineLease, EnginePool
from rapid.speculation.lookup import PromptIndex, PromptLookupDrafter
from rapid.speculation.statistics import RoundStatistics

Found = TypeVar("Found")
Drafts = EnginePool | OwnDrafting


class PoolSource(DraftSource):
    """A drafter model in a pool of its own, which reads the retrieved text.

    Attributes:
        pool: Pool for the next lease.
        held: The lease, if there is one.
    """

    _is_companion = False  # of the verifier's lease, on its engine

    def __init__(self, pool: EnginePool) -> None:
        self.pool = pool
        self.held: Holding | None = None

    @property
    @override
    def lease(self) -> EngineLease | None:
        return self.held.lease if self.held else None

    @override
    async def hold(self, needs: DraftNeeds) -> None:
        await self.release()
        self.held = await needs.take(
            self.pool, "drafter", needs.prompt_ids, is_beside=self._is_companion
        )

    @override
    def drafter(self, choice: int, committed: Sequence[int] = ()) -> Drafter[Any]:
        assert self.held is not None
        return self.held.lease.drafter(choice)

    @override
    async def read(self) -> None:
        assert self.held is not None
        await self.held.prefill

    @override
    async def num_read(self) -> int:
        assert self.held is not None
        return (await self.held.lease.read_so_far()).num_tokens

    @override
    async def release(self) -> None:
        held, self.held = self.held, None
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
        of_witness = await self._witness.lease.read_so_far()
        return await super().num_read() + of_witness.num_tokens

    @override
    async def release(self) -> None:
        witness, self._witness = self._witness, None
        if witness is not None:
            await witness.release()
        await super().release()


class LookupSource(DraftSource):
    """Prompt lookup in the target's prompt; it is indexed once, whatever leases are taken again."""

    def __init__(self) -> None:
        self._index: PromptIndex | None = None

    @override
    async def hold(self, needs: DraftNeeds) -> None:
        if self._index is None:
            self._index = await asyncio.to_thread(PromptIndex, needs.verifier.prompt_ids)

    @override
    def drafter(self, choice: int, committed: Sequence[int] = ()) -> PromptLookupDrafter:
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
        return self._verifier.lease.drafter(choice, self._window)


def choose(
    drafts: Drafts,
    target: EnginePool,
    *,
    short_tokens: int = 0,
    is_witnessed: bool = False,
    witnesses: EnginePool | None = None,
) -> DraftSource:
    """Return the source of a request's drafts.

    Args:
        drafts: Pool of the drafter model, or the settings of another drafter.
        target: Pool of the verifier.
        short_tokens: Approximate length, in tokens, of what a drafter model reads.
        is_witnessed: Whether the target reads it as well, beside a drafter model.
        witnesses: Pool of that reading; None takes the verifier's own engine.
    """
    if isinstance(drafts, PromptLookup):
        return LookupSource()
    if isinstance(drafts, WindowDrafting):
        return WindowSource(drafts)
    if drafts is target:  # the drafter's reading is the target's own
        return CompanionSource(target, short_tokens)
    if is_witnessed and witnesses is not None:
        return WitnessedSource(drafts, witnesses, None)
    return WitnessedSource(drafts, target, short_tokens) if is_witnessed else PoolSource(drafts)


@dataclass(frozen=True, slots=True)
class Rereading(Generic[Found]):
    """Retrieves again for one answer and makes its drafter read it: a `rapid.ports.Refresh`.

    Attributes:
        find: Finds what to read for the answer's tokens so far; None if there is nothing new.
        use: Holds the source's leases on what was found, after these tokens, and waits until it
            is read.
    """

    source: DraftSource
    statistics: RoundStatistics
    find: Callable[[tuple[int, ...]], Awaitable[Found | None]]
    use: Callable[[Found, tuple[int, ...]], Awaitable[None]]
    choice: int = 0

    async def __call__(self, _: tuple[int, ...]) -> Drafter[Any] | None:
        """Return a drafter that has read what was found; None leaves the drafter as it is.

        Raises:
            DrafterUnavailable: The drafter cannot go on.
            RapidError: The verifier's lease or engine is lost.
        """
        token_ids = tuple(self.statistics.token_ids)  # the rounds know those of their lease only
        found = await self.find(token_ids)
        if found is None:
            return None
        self.statistics.refreshes += 1  # a target that takes over goes on with what was found
        try:
            await self.use(found, token_ids)
        except DrafterUnavailable:
            self.statistics.refreshes -= 1
            raise
        return self.source.drafter(self.choice, token_ids)

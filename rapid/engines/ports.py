"""The loop's ports over engines in this process: one choice of a lease each."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from rapid.config import WindowDrafting
from rapid.engines.engine import Engine
from rapid.errors import DrafterUnavailable, EngineFailed, LeaseNotFound
from rapid.messages import DraftBlock, Verdict


class EngineDrafter:
    """Drafts one choice; a block is the task that computes it."""

    def __init__(self, engine: Engine, lease_id: str, choice: int = 0) -> None:
        self._engine = engine
        self._lease_id = lease_id
        self._choice = choice

    def draft(self, verdict: Verdict | None, num_tokens: int) -> asyncio.Task[DraftBlock]:
        """Start drafting; see `rapid.ports.Drafter`."""
        return asyncio.create_task(
            self._engine.draft(self._lease_id, self._choice, verdict, num_tokens)
        )


class WindowDrafter:
    """Drafts one choice on the verifier's own lease, which has committed the verdicts already."""

    def __init__(
        self,
        engine: Engine,
        lease_id: str,
        choice: int = 0,
        window: WindowDrafting = WindowDrafting(),  # noqa: B008 (frozen)
    ) -> None:
        self._engine = engine
        self._lease_id = lease_id
        self._choice = choice
        self._window = window

    def draft(self, verdict: Verdict | None, num_tokens: int) -> asyncio.Task[DraftBlock]:
        """Start drafting; see `rapid.ports.Drafter`."""
        return asyncio.create_task(
            self._engine.draft_in_window(self._lease_id, self._choice, self._window, num_tokens)
        )


class EngineVerifier:
    """Judges one choice's blocks and decodes on its own."""

    def __init__(self, engine: Engine, lease_id: str, choice: int = 0) -> None:
        self._engine = engine
        self._lease_id = lease_id
        self._choice = choice

    async def verify(self, block: DraftBlock | Awaitable[DraftBlock]) -> Verdict:
        """Judge a block; see `rapid.ports.Verifier`.

        Raises:
            DrafterUnavailable: the drafter's engine failed, or its lease is gone. Anything else
                that drafting raises is a mistake of the caller's, and is raised as it is.
        """
        try:
            drafted = block if isinstance(block, DraftBlock) else await block
        except (EngineFailed, LeaseNotFound) as error:
            raise DrafterUnavailable(f"the drafter gave no block: {error}") from error
        return await self._engine.verify(self._lease_id, self._choice, drafted)

    async def decode(self, num_tokens: int) -> Verdict:
        """Decode without a drafter; see `rapid.ports.Verifier`."""
        return await self._engine.decode(self._lease_id, self._choice, num_tokens)

"""Draft, verify, commit, until the answer ends."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from rapid.errors import DrafterUnavailable
from rapid.messages import Verdict
from rapid.ports import Drafter, Verifier
from rapid.speculation.refreshing import RefreshTrigger

Block = TypeVar("Block")


async def speculate(
    drafter: Drafter[Block] | None,
    verifier: Verifier[Block],
    *,
    max_tokens: int,
    max_draft: int,
    refresh: Callable[[tuple[int, ...]], Awaitable[Drafter[Block]]] | None = None,
) -> AsyncIterator[Verdict]:
    """One choice's rounds, each yielded as its verdict; the verdicts' tokens are the answer.

    Without a drafter, and from the round on in which it is lost, the verifier decodes alone, up to
    `max_draft` tokens a round (such verdicts have ``num_drafted == 0``).

    Args:
        max_tokens: tokens that may still be generated; no block is longer.
        max_draft: tokens asked of the drafter per block (gamma).
        refresh: given the tokens of these rounds, makes the drafter that goes on after them, with
            what was found for them; None never refreshes. `RefreshTrigger` says when. If it raises
            DrafterUnavailable, the drafter is lost.
    """
    verdict: Verdict | None = None
    trigger = RefreshTrigger()
    token_ids: list[int] = []
    while len(token_ids) < max_tokens and not (verdict and verdict.is_finished):
        num_tokens = min(max_draft, max_tokens - len(token_ids))
        if drafter is None:
            verdict = await verifier.decode(num_tokens)
        else:
            try:
                if refresh is not None and verdict is not None and trigger.observe(verdict):
                    drafter, verdict = await refresh(tuple(token_ids)), None
                verdict = await verifier.verify(drafter.draft(verdict, num_tokens))
            except DrafterUnavailable:
                drafter = None
                continue
        token_ids.extend(verdict.token_ids)
        yield verdict

"""Draft, verify, commit, until the answer ends."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import TypeVar

from rapid.errors import DrafterUnavailable
from rapid.messages import Verdict
from rapid.ports import Drafter, Pace, Refresh, Verifier
from rapid.speculation.refreshing import RefreshTrigger

Block = TypeVar("Block")


async def speculate(
    drafter: Drafter[Block] | None,
    verifier: Verifier[Block],
    *,
    max_tokens: int,
    max_draft: int,
    is_streamed: bool = False,
    pace: Pace | None = None,
    on_loss: Callable[[DrafterUnavailable], None] | None = None,
    refresh: Refresh | None = None,
    trigger: RefreshTrigger | None = None,
) -> AsyncIterator[Verdict]:
    """One choice's rounds, each yielded as its verdict; the verdicts' tokens are the answer.

    Without a drafter, from the round on in which it is lost, and whenever `pace` rests, the
    verifier decodes alone, up to `max_draft` tokens a round (such verdicts have
    ``num_drafted == 0``); how tokens are grouped in rounds changes none of them. An answer that
    goes on without its drafter follows another contract, so that happens only where `on_loss` is
    there to note it.

    Args:
        max_tokens: tokens that may still be generated; no block is longer.
        max_draft: tokens asked of the drafter per block (gamma), at most.
        is_streamed: somebody reads along, so an answer that nothing drafts begins with a round of
            one token. The others stay long: a round's calls cost the same for any number of tokens.
        pace: chooses how many are asked for; None always asks for as many as may be.
        on_loss: called with the reason when the drafter is lost; None raises the reason instead.
        refresh: gives the drafter something else to read where that is due; None never does. If it
            raises DrafterUnavailable, the drafter is lost.
        trigger: says when that is; the answer's own where these are not its first rounds.

    Raises:
        DrafterUnavailable: the drafter is lost and there is no `on_loss`.
    """
    verdict: Verdict | None = None
    untold: Verdict | None = None  # what the drafter has not been told of
    trigger = trigger or RefreshTrigger()
    token_ids: list[int] = []
    while len(token_ids) < max_tokens and not (verdict and verdict.is_finished):
        limit = min(max_draft, max_tokens - len(token_ids))
        num_tokens = pace.next_length(limit) if pace and drafter else limit
        if drafter is None or not num_tokens:
            is_awaited = is_streamed and drafter is None and verdict is None
            verdict = await verifier.decode(1 if is_awaited else limit)
        else:
            try:
                if refresh is not None and verdict is not None and trigger.observe(verdict):
                    drafter, untold = await refresh(tuple(token_ids)), None
                told, untold = untold, None
                verdict = await verifier.verify(drafter.draft(told, num_tokens))
            except DrafterUnavailable as error:
                if on_loss is None:
                    raise
                on_loss(error)
                drafter = None
                continue
        if drafter is not None:
            untold = _merged(untold, verdict)
            if pace is not None:
                pace.observe(verdict)
        token_ids.extend(verdict.token_ids)
        yield verdict


def _merged(untold: Verdict | None, verdict: Verdict) -> Verdict:
    """Both rounds as one verdict: what they committed after the position of the first."""
    if untold is None:
        return verdict
    return replace(untold, token_ids=untold.token_ids + verdict.token_ids)

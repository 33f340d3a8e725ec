"""The decoding loop: draft, verify and commit until the answer ends."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import TypeVar

from rapid.errors import DrafterUnavailable
from rapid.messages import Verdict
from rapid.ports import Drafter, Pace, Refresh, Verifier
from rapid.speculation.pace.refreshing import RefreshTrigger

Block = TypeVar("Block")


async def speculate(
    drafter: Drafter[Block] | None,
    verifier: Verifier[Block],
    *,
    max_tokens: int,
    max_draft: int,
    is_streamed: bool = False,
    pace: Pace | None = None,
    on_loss: Callable[[DrafterUnavailable], Drafter[Block] | None] | None = None,
    refresh: Refresh | None = None,
    trigger: RefreshTrigger | None = None,
) -> AsyncIterator[Verdict]:
    """Yield the verdict of each round of one choice; the verdicts' tokens are the answer.

    The verifier decodes alone, up to `max_draft` tokens a round, without a drafter, after the
    drafter was lost, and whenever `pace` rests. Such verdicts have ``num_drafted == 0``, and how
    tokens are grouped in rounds changes none of them. An answer that continues without its drafter
    follows another contract, so this happens only where `on_loss` can record it.

    Args:
        drafter: Source of draft blocks; None decodes plainly.
        max_tokens: Tokens that may still be generated; no block is longer.
        max_draft: Most tokens requested from the drafter per block (gamma).
        is_streamed: Whether an answer without a drafter begins with a round of one token.
        pace: Policy for the draft lengths; None always requests the longest possible block.
        on_loss: Called with the error when the drafter is lost; returns who drafts from there on,
            knowing the tokens so far, or None for nobody. None raises the error instead.
        refresh: Gives the drafter a new prompt when `trigger` says so; None never does. If it
            raises DrafterUnavailable, the drafter is lost.
        trigger: The answer's own, where these are not its first rounds; None starts a new one.

    Raises:
        DrafterUnavailable: The drafter was lost and there is no `on_loss`.
    """
    verdict: Verdict | None = None
    untold: Verdict | None = None  # committed rounds that the drafter does not know of yet
    trigger = trigger or RefreshTrigger()
    token_ids: list[int] = []
    while len(token_ids) < max_tokens and not (verdict and verdict.is_finished):
        limit = min(max_draft, max_tokens - len(token_ids))
        num_tokens = pace.next_length(limit) if pace and drafter else limit
        if drafter is None or not num_tokens:
            # Later rounds stay long: a round's calls cost the same for any number of tokens.
            is_awaited = is_streamed and drafter is None and verdict is None
            verdict = await verifier.decode(1 if is_awaited else limit)
        else:
            try:
                if refresh is not None and verdict is not None and trigger.observe(verdict):
                    renewed = await refresh(tuple(token_ids))
                    if renewed is not None:
                        drafter, untold = renewed, None
                told, untold = untold, None
                verdict = await verifier.verify(drafter.draft(told, num_tokens))
            except DrafterUnavailable as error:
                if on_loss is None:
                    raise
                drafter, untold = on_loss(error), None
                continue
        if drafter is not None:
            untold = merge_verdicts(untold, verdict)
            if pace is not None:
                pace.observe(verdict)
        token_ids.extend(verdict.token_ids)
        yield verdict


def merge_verdicts(untold: Verdict | None, verdict: Verdict) -> Verdict:
    """Return both rounds as one verdict with the tokens of both from the first one's position."""
    if untold is None:
        return verdict
    return replace(untold, token_ids=untold.token_ids + verdict.token_ids)

"""Draft, verify, commit, until the answer ends."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TypeVar

from rapid.errors import DrafterUnavailable
from rapid.messages import Verdict
from rapid.ports import Drafter, Verifier

Block = TypeVar("Block")


async def speculate(
    drafter: Drafter[Block] | None,
    verifier: Verifier[Block],
    *,
    max_tokens: int,
    max_draft: int,
) -> AsyncIterator[Verdict]:
    """One choice's rounds, each yielded as its verdict; the verdicts' tokens are the answer.

    Without a drafter, and from the round on in which it is lost, the verifier decodes alone, up to
    `max_draft` tokens a round (such verdicts have ``num_drafted == 0``).

    Args:
        max_tokens: tokens that may still be generated; no block is longer.
        max_draft: tokens asked of the drafter per block (gamma).
    """
    verdict: Verdict | None = None
    num_left = max_tokens
    while num_left > 0 and not (verdict and verdict.is_finished):
        num_tokens = min(max_draft, num_left)
        if drafter is None:
            verdict = await verifier.decode(num_tokens)
        else:
            block = drafter.draft(verdict, num_tokens)
            try:
                verdict = await verifier.verify(block)
            except DrafterUnavailable:
                drafter = None
                continue
        num_left -= len(verdict.token_ids)
        yield verdict

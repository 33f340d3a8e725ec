"""One choice's tokens, and how much of them the KV already holds."""

from __future__ import annotations

from collections.abc import Sequence as TokenIds
from dataclasses import dataclass, field

from rapid.engines.kv.cache import PageTable
from rapid.estimators import RunningMean
from rapid.messages import Float32Array, Int32Array

Proposal = tuple[Int32Array, Float32Array]
"""Tokens with non-zero probability, best first, and their probabilities."""


class Sequence:
    """The whole state of one choice on one engine.

    ::

        positions  0 ........ num_prompt ........ len(token_ids) ........ + len(draft_ids)
                   [ prompt  |  committed answer |  speculative: drafted, not judged here     ]
                   [ KV right: num_computed      )  <- may end anywhere, also in the speculation

    `commit` is the only way into the committed part. It keeps the KV of the speculation as far as
    what was committed agrees with it; the rest is overwritten in place by the next rows. At least
    the last token of all is always left to compute, for its row gives the next logits.

    A drafter's speculation is the block that it handed out (`num_offered` tokens) and, behind it,
    what was drafted ahead; `proposals` are what these tokens were drawn from. Only `commit` with
    `keeps_ahead` leaves any of it standing.
    """

    def __init__(
        self, prompt_ids: TokenIds[int], committed: TokenIds[int], table: PageTable, capacity: int
    ) -> None:
        self.table = table
        self.capacity = capacity  # tokens its pages may hold
        self.num_prompt = len(prompt_ids)
        self.token_ids = [*prompt_ids, *committed]
        self.draft_ids: list[int] = []
        self.proposals: list[Proposal] = []  # of `draft_ids`, where this engine drew them to send
        self.num_offered = 0
        self.num_computed = 0
        self.gap = Gap()

    @property
    def num_generated(self) -> int:
        """Committed answer tokens: the 0-based position of the next one."""
        return len(self.token_ids) - self.num_prompt

    @property
    def num_pending(self) -> int:
        """Tokens whose KV is missing, drafted ones among them."""
        return len(self.token_ids) + len(self.draft_ids) - self.num_computed

    @property
    def holds_prompt(self) -> bool:
        """The KV of the prompt is there, but for its last token."""
        return self.num_computed >= self.num_prompt - 1

    @property
    def is_prefilled(self) -> bool:
        """Only the last committed token, or the speculation, is left to compute."""
        return self.num_computed >= len(self.token_ids) - 1

    def pending(self, limit: int | None = None) -> list[int]:
        """Tokens whose KV is missing, at most `limit` of them."""
        start, num_committed = self.num_computed, len(self.token_ids)
        rest = self.token_ids[start : None if limit is None else start + limit]
        if limit is None or len(rest) < limit:
            rest += self.draft_ids[max(start - num_committed, 0) :][: _left(limit, rest)]
        return rest

    def commit(self, token_ids: TokenIds[int], *, keeps_ahead: bool = False) -> bool:
        """Append to the answer; keep the speculation's KV where it was right.

        Args:
            keeps_ahead: what was drafted after `token_ids` stays, if all of them were as drafted.

        Returns:
            Whether they were, and nothing was drafted otherwise than it came.
        """
        num_right = 0
        for committed, drafted in zip(token_ids, self.draft_ids, strict=False):
            if committed != drafted:
                break
            num_right += 1
        kept = len(self.token_ids) + num_right
        is_hit = keeps_ahead and self.num_offered <= num_right == len(token_ids)
        is_hit = is_hit and len(self.proposals) == len(self.draft_ids)  # else drawn to be committed
        self.draft_ids = self.draft_ids[num_right:] if is_hit else []
        self.proposals = self.proposals[num_right:] if is_hit else []
        self.num_offered = 0
        self.token_ids += token_ids
        num_tokens = len(self.token_ids) + len(self.draft_ids)
        self.num_computed = min(self.num_computed, kept + len(self.draft_ids), num_tokens - 1)
        return is_hit

    def drop_speculation(self) -> None:
        """Forget what was drafted and not committed."""
        self.commit(())


def _left(limit: int | None, taken: list[int]) -> int | None:
    return None if limit is None else limit - len(taken)


@dataclass
class Gap:
    """How long a drafter has between a block and the next call on the same choice."""

    seconds: RunningMean = field(default_factory=RunningMean)
    handed_out_at: float | None = None

    def hand_out(self, now: float) -> None:
        """A block leaves."""
        self.handed_out_at = now

    def call(self, now: float) -> None:
        """The next call on the choice arrived."""
        if self.handed_out_at is not None:
            self.seconds.add(now - self.handed_out_at)
        self.handed_out_at = None

    def num_steps(self, step_s: float | None, at_most: int) -> int:
        """Steps that fit into the gap; before anything is measured, `at_most`."""
        if self.seconds.value is None or not step_s:
            return at_most
        return min(int(self.seconds.value / step_s), at_most)

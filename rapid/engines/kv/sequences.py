"""The state of one choice: its tokens, and how many of them the KV holds."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence as TokenIds
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from rapid.constraints.shaping import Shaping
from rapid.engines.kv.cache import PageTable
from rapid.engines.kv.rings import Ring
from rapid.estimators import RunningMean
from rapid.messages import Float32Array, Int32Array

Proposal = tuple[Int32Array, Float32Array]
"""Tokens with non-zero probability, best first, and their probabilities."""


class Sequence:
    """Whole state of one choice on one engine.

    ::

        positions  0 ........ num_prompt ........ len(token_ids) ........ + len(draft_ids)
                   [ prompt  |  committed answer |  speculative: drafted, not judged here     ]
                   [ KV valid: num_computed      )  <- may end anywhere, also in the speculation

    Only `commit` appends to the committed part. It keeps the KV of the speculation as far as the
    committed tokens agree with it; the next rows overwrite the rest in place. At least the last
    token of all is always left to compute, because its row gives the next logits.

    A drafter's speculation is the draft block that it handed out and, behind it, the tokens drafted
    ahead. Only `commit` with `keeps_ahead` keeps any of it.
    """

    def __init__(
        self,
        prompt_ids: TokenIds[int] | Int32Array,
        committed: TokenIds[int],
        table: PageTable,
        capacity: int,
        log_odds: float = 0.0,
        ring: Ring | None = None,
        name: str = "",
        shaping: Shaping | None = None,
    ) -> None:
        self.table = table
        self.capacity = capacity  # tokens that the pages may hold
        self.num_prompt = len(prompt_ids)
        self._prompt_ids = prompt_ids
        self._committed = committed
        self.draft_ids: list[int] = []  # the speculation
        self.proposals: list[
            Proposal
        ] = []  # of `draft_ids`; empty if they were not drafted to send
        self.num_offered = 0  # leading `draft_ids` that were handed out as a block
        self.forced = set[int]()  # generated positions of those that were drafted without a forward
        self.num_computed = 0  # leading tokens whose KV is valid
        self.gap = Gap()
        self.log_odds = log_odds  # of judging so far (`rapid.speculation.fusion.update_log_odds`)
        self.ring = ring  # where the last tokens lie in layers that have rings
        # The same on every engine that holds this text of this choice.
        self.digest = digest_of(committed, zlib.crc32(name.encode()))
        self.shaping = shaping  # of the logits, behind the committed answer
        if shaping is not None:
            shaping.advance(committed)

    @cached_property
    def token_ids(self) -> list[int]:
        """The prompt and the committed answer."""
        # A long prompt takes a while to become a list: when computed, not where a lease opens.
        return [*np.asanyarray(self._prompt_ids).tolist(), *self._committed]

    @property
    def num_generated(self) -> int:
        """Number of committed answer tokens, which is the 0-based position of the next one."""
        return len(self.token_ids) - self.num_prompt

    @property
    def num_pending(self) -> int:
        """Number of tokens whose KV is missing, including drafted ones."""
        return len(self.token_ids) + len(self.draft_ids) - self.num_computed

    @property
    def holds_prompt(self) -> bool:
        """Whether the KV of the prompt is complete, except for its last token."""
        return self.num_computed >= self.num_prompt - 1

    @property
    def is_prefilled(self) -> bool:
        """Whether only the last committed token and the speculation may be left to compute."""
        return self.num_computed >= len(self.token_ids) - 1

    @property
    def room(self) -> int:
        """Number of tokens that may be drafted, judged or decoded at once."""
        room = self.capacity - len(self.token_ids) + 1
        return room if self.ring is None else min(room, self.ring.plan.room)

    def most_rows(self, limit: int) -> int:
        """Return `limit`, lowered to the committed tokens that one step may compute."""
        return limit if self.ring is None else min(limit, self.ring.plan.max_rows)

    def pending(self, limit: int | None = None) -> list[int]:
        """Return the tokens whose KV is missing, in order, at most `limit` of them."""
        start, num_committed = self.num_computed, len(self.token_ids)
        rest = self.token_ids[start : None if limit is None else start + limit]
        if limit is None or len(rest) < limit:
            left = None if limit is None else limit - len(rest)
            rest += self.draft_ids[max(start - num_committed, 0) :][:left]
        return rest

    def commit(self, token_ids: TokenIds[int], *, keeps_ahead: bool = False) -> bool:
        """Append tokens to the answer, and keep the speculation's KV where it agrees with them.

        With `keeps_ahead`, what was drafted after them is kept, and True is returned, if all of
        them, and the whole block that was handed out, are as drafted.
        """
        num_right = 0
        for committed, drafted in zip(token_ids, self.draft_ids, strict=False):
            if committed != drafted:
                break
            num_right += 1
        kept = len(self.token_ids) + num_right
        is_hit = keeps_ahead and self.num_offered <= num_right == len(token_ids)
        is_hit = is_hit and len(self.proposals) == len(self.draft_ids)  # else not drafted to send
        self.draft_ids = self.draft_ids[num_right:] if is_hit else []
        self.proposals = self.proposals[num_right:] if is_hit else []
        self.num_offered = 0
        self.token_ids += token_ids
        self.digest = digest_of(token_ids, self.digest)
        if self.shaping is not None:
            self.shaping.advance(token_ids)
        num_tokens = len(self.token_ids) + len(self.draft_ids)
        self.num_computed = min(self.num_computed, kept + len(self.draft_ids), num_tokens - 1)
        if self.forced:
            ahead = {each for each in self.forced if each >= self.num_generated}
            self.forced = ahead if is_hit else set()
        return is_hit

    def drop_speculation(self) -> None:
        """Discard the tokens that were drafted but not committed."""
        self.commit(())


def digest_of(token_ids: TokenIds[int], before: int) -> int:
    """Return the digest of a text that had the digest `before` and continues with `token_ids`."""
    return zlib.crc32(array("i", token_ids), before)


@dataclass
class Gap:
    """Time between handing out a block and the next call on the same choice."""

    seconds: RunningMean = field(default_factory=RunningMean)  # running mean of the measured times
    # When the last block was handed out, in seconds; None after the next call.
    handed_out_at: float | None = None

    def hand_out(self, now: float) -> None:
        """Record that a block is handed out."""
        self.handed_out_at = now

    def call(self, now: float) -> None:
        """Record that the next call on the choice arrived."""
        if self.handed_out_at is not None:
            self.seconds.add(now - self.handed_out_at)
        self.handed_out_at = None

    def num_steps(self, step_s: float | None, at_most: int) -> int:
        """Return how many steps of `step_s` fit into the gap, `at_most` where a time is unknown."""
        if self.seconds.value is None or not step_s:
            return at_most
        return min(int(self.seconds.value / step_s), at_most)

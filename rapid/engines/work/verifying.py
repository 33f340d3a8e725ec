"""Judging of draft blocks against the target's logits."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from typing_extensions import override

from rapid.engines.kv.lease import Lease
from rapid.engines.work.base import SequenceWork
from rapid.errors import BadRequest, OutOfStep
from rapid.messages import DraftBlock, TargetLogits
from rapid.speculation.acceptance import Judgement, num_rows
from rapid.speculation.draw import Draw
from rapid.speculation.questions import Answer, ToJudge


class Judging(SequenceWork):
    """Forward over ``[last committed, d_1 .. d_{K-1}]``, for the logits of a block's positions.

    For an empty block, the last committed token's row decodes the next one. Under the rule `paper`,
    ``d_K`` is among the inputs if the bonus token of its row fits.
    """

    def __init__(self, lease: Lease, choice: int, block: DraftBlock, num_ids: int) -> None:
        super().__init__(lease, choice)
        self._block = block
        self._num_ids = num_ids

    @override
    def begin(self) -> None:
        super().begin()
        block, sequence = self._block, self.sequence
        self._check_position("block", block.position, block.choice)
        if block.digest not in (None, sequence.digest):
            raise OutOfStep(
                f"a block of lease {block.lease_id!r} continues another text than that of lease "
                f"{self.lease.lease_id!r}"
            )
        if self._num_wanted() > sequence.room:
            raise OutOfStep(f"a block of {len(block)} tokens does not fit the lease's room")
        token_ids = block.token_ids.tolist()
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self._num_ids:
            raise BadRequest("the block holds a token id beyond the vocabulary")
        candidates = block.candidate_ids
        if candidates.size and not -1 <= candidates.min() <= candidates.max() < self._num_ids:
            raise BadRequest("the block proposes a token id beyond the vocabulary")
        sequence.drop_speculation()
        sequence.draft_ids = token_ids[: self._num_wanted() - 1]

    @override
    def _num_wanted(self) -> int:
        request = self.lease.request
        num_left = request.max_tokens - self.sequence.num_generated
        return num_rows(len(self._block), num_left, request.speculation)


class Score(Judging):
    """Call for the target's logits of a block; commits nothing, keeps its KV for `Commit`."""

    @override
    def _ask(self, logits: torch.Tensor) -> None:
        self.finish(
            TargetLogits(
                lease_id=self.lease.lease_id,
                choice=self.choice,
                position=self._block.position,
                logits=np.ascontiguousarray(logits.cpu().numpy()),
                verify_ms=self.elapsed_ms,
            )
        )


@dataclass(frozen=True, slots=True)
class Scored:
    """Result of `Weigh`: what judging a block on this engine needs of one lease."""

    logits: torch.Tensor  # one row for each position, on the engine's device [rows, vocab]
    draw: Draw  # sampling settings, and the position of the block's first token
    log_odds: float  # those of the tokens before
    num_logprobs: int | None  # number of alternatives beside each committed token; None for none
    verify_ms: float  # milliseconds that the forward took


class Weigh(Judging):
    """Call like `Score` for a block that is judged on this engine, with two readings at once."""

    @override
    def _ask(self, logits: torch.Tensor) -> None:
        # The copy outlives the forward, whose buffers the next one may use.
        self.finish(
            Scored(
                logits.clone(),
                self._draw_after(0),
                self.sequence.log_odds,
                self.lease.request.num_logprobs,
                self.elapsed_ms,
            )
        )


class Verify(Judging):
    """Call that judges a block on the target's own engine and commits the outcome."""

    def __init__(
        self, lease: Lease, choice: int, block: DraftBlock, num_ids: int, eos_ids: Set[int]
    ) -> None:
        super().__init__(lease, choice, block, num_ids)
        self._eos_ids = eos_ids

    @override
    def _ask(self, logits: torch.Tensor) -> ToJudge:
        draw, num_logprobs = self._draw_after(0), self.lease.request.num_logprobs
        log_odds = self.sequence.log_odds
        return ToJudge(self._block, logits, draw, self._eos_ids, num_logprobs, log_odds)

    @override
    def use(self, answer: Answer) -> None:
        judgement = cast(Judgement, answer)
        self.sequence.log_odds = judgement.log_odds
        self.sequence.commit(judgement.token_ids)
        self.finish(judgement.verdict(self._block, self.elapsed_ms))

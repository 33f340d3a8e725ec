"""Judging of draft blocks against the target's logits."""

from __future__ import annotations

from collections import deque
from collections.abc import Set
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch
from typing_extensions import override

from rapid.engines.attention.batch import Feed
from rapid.engines.kv.leases.lease import Lease
from rapid.engines.work.base import SequenceWork, Work
from rapid.errors import BadRequest, OutOfStep
from rapid.messages import DraftBlock, TargetLogits
from rapid.speculation.acceptance import Judgement, num_rows
from rapid.speculation.draw import Draw
from rapid.speculation.questions import Answer, Question, ToJudge


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
        is_whole = candidates.ndim == 2 and candidates.shape == block.candidate_probs.shape
        if len(block) and not (is_whole and len(candidates) == len(block) and candidates.size):
            raise BadRequest("the block has not a proposal for each of its tokens")
        if candidates.size and not -1 <= candidates.min() <= candidates.max() < self._num_ids:
            raise BadRequest("the block proposes a token id beyond the vocabulary")
        sequence.drop_speculation()
        self._fit_block()
        sequence.draft_ids = self._block.token_ids[: self._num_wanted() - 1].tolist()

    def _fit_block(self) -> None:
        """Change the block to what the answer's shaping allows, where its drafter could not."""

    @override
    def _num_wanted(self) -> int:
        terms = self.lease.request.terms
        num_left = terms.max_tokens - self.sequence.num_generated
        return num_rows(len(self._block), num_left, terms.speculation)

    def commit(self, judgement: Judgement) -> None:
        """Commit the tokens of the block's judgement."""
        self.sequence.log_odds = judgement.log_odds
        self.sequence.commit(judgement.token_ids)


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
    explains: bool  # whether it is told how likely the committed tokens were


class Weigh(Judging):
    """Call like `Score` for a block that is judged in this process, beside another engine's rows.

    Readings of one engine are judged by `WitnessedVerify`, in one step.
    """

    @override
    def _ask(self, logits: torch.Tensor) -> None:
        # The copy outlives the forward, whose buffers the next one may use.
        self.finish(
            Scored(
                logits.clone(),
                self._draw_after(0),
                self.sequence.log_odds,
                self.lease.request.terms.num_logprobs,
                self.elapsed_ms,
                self._explains(),
            )
        )


class Verify(Judging):
    """Call that judges a block on the target's own engine and commits the outcome."""

    def __init__(
        self, lease: Lease, choice: int, block: DraftBlock, num_ids: int, eos_ids: Set[int]
    ) -> None:
        super().__init__(lease, choice, block, num_ids)
        self._eos_ids = eos_ids
        self._is_cut = False  # before the block's last token, which stands for none

    @override
    def _fit_block(self) -> None:
        block, shaping, terms = self._block, self.sequence.shaping, self.lease.request.terms
        # Blocks of engines follow it already, and a witness has a block of its own.
        if shaping is None or block.digest is not None or terms.speculation.eta > 0:
            return
        drafted = block.token_ids.tolist()
        kept = drafted[: shaping.count_allowed(drafted)]
        num_kept, num_left = len(kept), terms.max_tokens - self.sequence.num_generated
        most = min(terms.speculation.max_draft, num_left, self.sequence.room - 1)
        shaping.advance(kept)
        while len(kept) < most and self._eos_ids.isdisjoint(kept[-1:]):
            token = shaping.find_forced()
            if token is None:
                break
            kept.append(token)
            shaping.advance([token])
        shaping.roll_back(len(kept))
        # The row of a token that may not come decodes the one that does.
        self._is_cut = num_kept == len(kept) < len(drafted)
        self._block = extend_block(block, num_kept + self._is_cut, kept[num_kept:])

    @override
    def _ask(self, logits: torch.Tensor) -> ToJudge:
        draw, num_logprobs = self._draw_after(0), self.lease.request.terms.num_logprobs
        log_odds, explains = self.sequence.log_odds, self._explains()
        return ToJudge(
            self._block, logits, draw, self._eos_ids, num_logprobs, log_odds, explains=explains
        )

    @override
    def use(self, answer: Answer) -> None:
        judgement = cast(Judgement, answer)
        self.commit(judgement)
        verdict = judgement.verdict(self._block, self.elapsed_ms)
        self.finish(replace(verdict, num_drafted=verdict.num_drafted - self._is_cut))


class Witness(Judging):
    """Part of a `WitnessedVerify`: the rows of the lease that reads the retrieved text."""

    rows: torch.Tensor  # logits of the block's positions, until the step is judged [rows, vocab]

    @override
    def _ask(self, logits: torch.Tensor) -> None:
        self.rows = logits


class WitnessedVerify(Work):
    """Call that judges a block with two readings of one engine, and commits it on both or neither.

    Both leases' rows go into one forward, once neither has tokens left to compute before them.
    """

    def __init__(self, target: Verify, witness: Witness) -> None:
        super().__init__(target.lease, target.choices, witness.lease)
        self._target = target
        self._witness = witness
        self._fed: deque[Verify | Witness] = deque()  # whose rows are in the forward, in order
        self._question: ToJudge | None = None  # of the target's rows alone

    @override
    def begin(self) -> None:
        super().begin()
        self._target.begin()
        self._witness.begin()

    @override
    def feeds(self, limit: int) -> list[Feed]:
        both, share = (self._target, self._witness), limit // 2
        self._fed = deque([part for part in both if part.is_behind(share)] or both)
        return [part.feed(share) for part in self._fed]

    @override
    def take(self, logits: torch.Tensor) -> Question | None:
        part = self._fed.popleft()
        question = part.take(logits)
        if part is self._target:
            self._question = cast("ToJudge | None", question)
            return None
        return self._question and replace(self._question, witness=self._witness.rows)

    @override
    def use(self, answer: Answer) -> None:
        self._target.use(answer)
        self._witness.commit(cast(Judgement, answer))
        self.finish(self._target.result)


def extend_block(block: DraftBlock, num_kept: int, forced: list[int]) -> DraftBlock:
    """Return the first tokens of a block, and behind them some that are sure to come."""
    width = max(block.candidate_ids.shape[1], 1)
    ids = np.full((num_kept + len(forced), width), -1, np.int32)
    probs = np.zeros(ids.shape, np.float32)
    if num_kept:
        ids[:num_kept], probs[:num_kept] = (
            block.candidate_ids[:num_kept],
            block.candidate_probs[:num_kept],
        )
    ids[num_kept:, 0], probs[num_kept:, 0] = forced, 1
    token_ids = np.concatenate([block.token_ids[:num_kept], np.asarray(forced, np.int32)])
    return replace(
        block,
        token_ids=token_ids,
        candidate_ids=ids,
        candidate_probs=probs,
        num_forced=block.num_forced + len(forced),
    )

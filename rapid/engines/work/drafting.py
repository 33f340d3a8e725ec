"""Token-by-token generation: draft blocks, drafting ahead, and plain decoding."""

from __future__ import annotations

import time
from collections.abc import Set
from dataclasses import replace
from typing import cast

import numpy as np
import torch
from typing_extensions import override

from rapid.engines.attention.batch import Feed
from rapid.engines.kv.leases.lease import Lease
from rapid.engines.kv.sequences import Proposal, Sequence
from rapid.engines.work.base import SequenceWork
from rapid.errors import OutOfStep
from rapid.messages import DraftBlock, TokenLogprobs, Verdict
from rapid.receipt import TokenProbs
from rapid.speculation.acceptance import ends_block
from rapid.speculation.questions import Answer, Decoded, Proposed, ToDecode, ToPropose


class Drafting(SequenceWork):
    """Work that samples token by token, each from exactly the proposal that is sent with it."""

    def __init__(self, lease: Lease, choice: int, num_tokens: int, eos_ids: Set[int]) -> None:
        """Draft until there are `num_tokens`."""
        super().__init__(lease, choice)
        self._num_tokens = num_tokens
        self._eos_ids = eos_ids

    @property
    def num_left(self) -> int:
        """Number of tokens yet to draft, if no token ends the block before."""
        return self._num_tokens - len(self._list_drafted())

    @property
    def is_fed_on_device(self) -> bool:
        """Whether its next forwards may run before their tokens are known here."""
        # Constraints follow the tokens on the host, and `paper` ends many blocks early.
        rule = self.lease.request.terms.speculation.rule
        return self.sequence.shaping is None and rule == "exact"

    def ends_with(self, token: int) -> bool:
        """Return whether nothing is drafted after a token."""
        return token in self._eos_ids

    def follow(self, feed: Feed, token: torch.Tensor) -> Feed:
        """Return the row after a feed, whose token [1] is on the device."""
        position = feed.position + len(feed.token_ids)
        return replace(feed, token_ids=(0,), position=position, drawn=token)

    def ask_after(self, num_more: int, logits: torch.Tensor) -> ToPropose:
        """Ask for the token after `num_more` that are drawn but not known here yet."""
        num_drafted = len(self._list_drafted()) + num_more
        return ToPropose(logits[0], self._draw_after(num_drafted))

    @override
    def _ask(self, logits: torch.Tensor) -> ToPropose:
        return self.ask_after(0, logits)

    @override
    def use(self, answer: Answer) -> None:
        drafted = cast(Proposed, answer)
        self._list_drafted().append(drafted.token)
        self._list_proposals().append((drafted.candidate_ids, drafted.candidate_probs))

    def _list_proposals(self) -> list[Proposal]:
        """Return the proposals of `_list_drafted`."""
        return self.sequence.proposals

    def add_forced(self) -> None:
        """Draft what follows if it is the only token that may, which needs no forward.

        Its proposal is the one that a forward would give. Its KV is computed with the next rows.
        """
        sequence, shaping, drafted = self.sequence, self.sequence.shaping, self._list_drafted()
        if shaping is None:
            return
        shaping.advance(drafted)
        while len(drafted) < self._num_tokens and not (drafted and self._is_block_over()):
            token = shaping.find_forced()
            if token is None:
                break
            sequence.forced.add(sequence.num_generated + len(drafted))
            drafted.append(token)
            self._list_proposals().append((np.array([token], np.int32), np.ones(1, np.float32)))
            shaping.advance([token])
        shaping.roll_back(len(drafted))

    def _hand_out(self, token_ids: list[int], proposals: list[Proposal]) -> None:
        """Finish with a block of drafted tokens."""
        lease_id, drafted = self.lease.lease_id, (token_ids, proposals)
        self.finish(draft_block(lease_id, self.choice, self.sequence, *drafted, self.elapsed_ms))

    def _within_room(self, num_tokens: int) -> int:
        """Return `num_tokens`, cut to what the lease has room to draft; raise OutOfStep if none."""
        room = self.sequence.room
        if min(num_tokens, room) < 1:
            raise OutOfStep(f"lease {self.lease.lease_id!r} has no room to draft in")
        return min(num_tokens, room)

    def _is_block_over(self) -> bool:
        """Return whether a block must end with the last drafted token."""
        # The answer ends after an end-of-sequence token that is accepted, and the block's judging
        # after one that is not, so no token after it could ever be judged.
        token, proposed = self._list_drafted()[-1], self._list_proposals()[-1]
        return token in self._eos_ids or ends_block(
            token, *proposed, self.lease.request.terms.speculation
        )


class Draft(Drafting):
    """Call for a draft block; on a hit, tokens drafted ahead are its beginning or all of it."""

    kind = "draft"

    def __init__(
        self,
        lease: Lease,
        choice: int,
        verdict: Verdict | None,
        num_tokens: int,
        eos_ids: Set[int],
    ) -> None:
        super().__init__(lease, choice, num_tokens, eos_ids)
        self._verdict = verdict
        self._num_asked = num_tokens
        self._arrived = time.perf_counter()
        self.is_hit: bool | None = None  # whether tokens drafted ahead were right; None without any

    @override
    def begin(self) -> None:
        super().begin()
        sequence = self.sequence
        sequence.gap.call(self._arrived)
        if self._verdict is None:
            sequence.drop_speculation()
        else:
            self._check_position("verdict", self._verdict.position, self._verdict.choice)
            had_more = len(sequence.proposals) > sequence.num_offered
            is_right = sequence.commit(self._verdict.token_ids, keeps_ahead=True)
            self.is_hit = is_right if had_more else None
        self._num_tokens = self._within_room(self._num_asked)
        self._go_on()

    @override
    def use(self, answer: Answer) -> None:
        super().use(answer)
        self._go_on()

    def _go_on(self) -> None:
        self.add_forced()
        if self.sequence.draft_ids:
            self._finish_if_long_enough()

    def _finish_if_long_enough(self) -> None:
        sequence = self.sequence
        if len(sequence.draft_ids) >= self._num_tokens or self._is_block_over():
            sequence.num_offered = min(len(sequence.draft_ids), self._num_tokens)
            sequence.gap.hand_out(time.perf_counter())
            offered = slice(sequence.num_offered)
            self._hand_out(sequence.draft_ids[offered], sequence.proposals[offered])

    def ahead(self, step_s: float | None) -> DraftAhead | None:
        """Return the work of drafting ahead, in steps of `step_s`, while the block is judged."""
        sequence, terms = self.sequence, self.lease.request.terms
        if sequence.draft_ids[-1] in self._eos_ids:
            return None
        num_more = sequence.gap.num_steps(step_s, at_most=self._num_asked)
        num_left = terms.max_tokens - sequence.num_generated
        num_tokens = min(sequence.num_offered + num_more, num_left, sequence.room)
        work = DraftAhead(self.lease, self.choice, num_tokens, self._eos_ids)
        work.add_forced()
        return None if work.is_far_enough() else work


class DraftAhead(Drafting):
    """Drafting of the tokens that come after the block that was handed out, if it is accepted.

    No call waits for this work. The next call would draw the same tokens, because noise is keyed by
    position and proposals are functions of the prefix.
    """

    kind = "ahead"

    def __init__(self, lease: Lease, choice: int, num_tokens: int, eos_ids: Set[int]) -> None:
        """Draft until there are `num_tokens`, including those of the block."""
        super().__init__(lease, choice, num_tokens, eos_ids)

    @override
    def use(self, answer: Answer) -> None:
        super().use(answer)
        self.add_forced()
        if self.is_far_enough():
            self.finish(None)

    def is_far_enough(self) -> bool:
        """Return whether there is nothing more to draft for now."""
        sequence = self.sequence
        num_drafted = len(sequence.draft_ids)
        return num_drafted >= self._num_tokens or (
            num_drafted > sequence.num_offered and self._is_block_over()
        )


def draft_block(
    lease_id: str,
    choice: int,
    sequence: Sequence,
    token_ids: list[int],
    proposals: list[Proposal],
    draft_ms: float,
) -> DraftBlock:
    """Return drafted tokens and their proposals, padded to one width, as a message."""
    shape = (len(proposals), max((len(ids) for ids, _ in proposals), default=0))
    first = sequence.num_generated
    num_forced = len(sequence.forced.intersection(range(first, first + len(token_ids))))
    candidate_ids = np.full(shape, -1, dtype=np.int32)
    candidate_probs = np.zeros(shape, dtype=np.float32)
    for row, (ids, probs) in enumerate(proposals):
        candidate_ids[row, : len(ids)] = ids
        candidate_probs[row, : len(ids)] = probs
    return DraftBlock(
        lease_id=lease_id,
        choice=choice,
        position=first,
        token_ids=np.asarray(token_ids, dtype=np.int32),
        candidate_ids=candidate_ids,
        candidate_probs=candidate_probs,
        draft_ms=draft_ms,
        digest=sequence.digest,
        num_forced=num_forced,
    )


class Decode(SequenceWork):
    """Call for plain tokens, sampled from the model's own distribution and committed together."""

    def __init__(self, lease: Lease, choice: int, num_tokens: int, eos_ids: Set[int]) -> None:
        super().__init__(lease, choice)
        self._num_tokens = num_tokens
        self._eos_ids = eos_ids
        self._logprobs: list[TokenLogprobs] = []
        self._probs: list[TokenProbs] = []

    @override
    def begin(self) -> None:
        super().begin()
        self.sequence.drop_speculation()
        left = self.lease.request.terms.max_tokens - self.sequence.num_generated
        self._num_tokens = min(self._num_tokens, left, self.sequence.room)
        if self._num_tokens < 1:
            raise OutOfStep(f"lease {self.lease.lease_id!r} has no token left to decode")

    @override
    def _ask(self, logits: torch.Tensor) -> ToDecode:
        draw = self._draw_after(len(self.sequence.draft_ids))
        num_logprobs = self.lease.request.terms.num_logprobs
        return ToDecode(logits[0], draw, num_logprobs, self._explains())

    @override
    def use(self, answer: Answer) -> None:
        decoded = cast(Decoded, answer)
        sequence = self.sequence
        start = sequence.num_generated
        sequence.draft_ids.append(decoded.token)
        if decoded.logprobs is not None:
            self._logprobs.append(decoded.logprobs)
        if decoded.probs is not None:
            self._probs.append(decoded.probs)
        is_finished = decoded.token in self._eos_ids
        if not is_finished and len(sequence.draft_ids) < self._num_tokens:
            return
        token_ids = tuple(sequence.draft_ids)
        sequence.commit(token_ids)
        self.finish(
            Verdict(
                lease_id=self.lease.lease_id,
                choice=self.choice,
                position=start,
                token_ids=token_ids,
                num_drafted=0,
                num_accepted=0,
                is_finished=is_finished,
                logprobs=tuple(self._logprobs),
                verify_ms=self.elapsed_ms,
                probs=tuple(self._probs),
            )
        )

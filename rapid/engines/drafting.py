"""Token by token: drafts to be judged, and plain decoding."""

from __future__ import annotations

from collections.abc import Set

import numpy as np
import torch
from typing_extensions import override

from rapid.engines.leases import Lease
from rapid.engines.work import SequenceWork
from rapid.errors import OutOfStep
from rapid.messages import DraftBlock, Float32Array, Int32Array, TokenLogprobs, Verdict
from rapid.speculation.acceptance import decode_token, ends_block, propose
from rapid.speculation.sampling import proposal


class Draft(SequenceWork):
    """Sample a block token by token, each from exactly the proposal that is sent with it.

    Drafting stops after an end-of-sequence token: if it is kept the answer ends there, if not the
    block does, so nothing after it could ever be judged.
    """

    def __init__(
        self,
        lease: Lease,
        choice: int,
        verdict: Verdict | None,
        num_tokens: int,
        eos_ids: Set[int],
    ) -> None:
        super().__init__(lease, choice)
        self._verdict = verdict
        self._num_tokens = num_tokens
        self._eos_ids = eos_ids
        self._proposals: list[tuple[Int32Array, Float32Array]] = []

    @override
    def begin(self) -> None:
        super().begin()
        sequence = self.sequence
        if self._verdict is None:
            sequence.drop_speculation()
        else:
            self._check_position("verdict", self._verdict.position, self._verdict.choice)
            sequence.commit(self._verdict.token_ids)
        room = sequence.capacity - len(sequence.token_ids) + 1
        self._num_tokens = min(self._num_tokens, room)
        if self._num_tokens < 1:
            raise OutOfStep(f"lease {self.lease.lease_id!r} has no room to draft in")

    @override
    def take(self, logits: torch.Tensor) -> None:
        super().take(logits)
        request, sequence = self.lease.request, self.sequence
        position = sequence.num_generated + len(sequence.draft_ids)
        ids, probs = proposal(logits[0], request.sampling, request.speculation)
        token = propose(ids, probs, request.sampling, request.speculation, self.choice, position)
        sequence.draft_ids.append(token)
        self._proposals.append((ids, probs))
        is_last = token in self._eos_ids or ends_block(token, ids, probs, request.speculation)
        if is_last or len(self._proposals) == self._num_tokens:
            self.finish(draft_block(self, sequence.draft_ids, self._proposals))


def draft_block(
    work: SequenceWork, token_ids: list[int], proposals: list[tuple[Int32Array, Float32Array]]
) -> DraftBlock:
    """Drafted tokens and their proposals, padded to one width, as a message."""
    shape = (len(proposals), max(len(ids) for ids, _ in proposals))
    candidate_ids = np.full(shape, -1, dtype=np.int32)
    candidate_probs = np.zeros(shape, dtype=np.float32)
    for row, (ids, probs) in enumerate(proposals):
        candidate_ids[row, : len(ids)] = ids
        candidate_probs[row, : len(ids)] = probs
    return DraftBlock(
        lease_id=work.lease.lease_id,
        choice=work.choice,
        position=work.sequence.num_generated,
        token_ids=np.asarray(token_ids, dtype=np.int32),
        candidate_ids=candidate_ids,
        candidate_probs=candidate_probs,
        draft_ms=work.elapsed_ms,
    )


class Decode(SequenceWork):
    """Tokens of the model's own distribution, committed together when the last is drawn."""

    def __init__(self, lease: Lease, choice: int, num_tokens: int, eos_ids: Set[int]) -> None:
        super().__init__(lease, choice)
        self._num_tokens = num_tokens
        self._eos_ids = eos_ids
        self._logprobs: list[TokenLogprobs] = []

    @override
    def begin(self) -> None:
        super().begin()
        self.sequence.drop_speculation()
        left = self.lease.request.max_tokens - self.sequence.num_generated
        self._num_tokens = min(self._num_tokens, left)
        if self._num_tokens < 1:
            raise OutOfStep(f"lease {self.lease.lease_id!r} has no token left to decode")

    @override
    def take(self, logits: torch.Tensor) -> None:
        super().take(logits)
        request, sequence = self.lease.request, self.sequence
        start = sequence.num_generated
        token, logprobs = decode_token(
            logits[0],
            request.sampling,
            request.speculation,
            self.choice,
            start + len(sequence.draft_ids),
            request.num_logprobs,
        )
        sequence.draft_ids.append(token)
        if logprobs is not None:
            self._logprobs.append(logprobs)
        is_finished = token in self._eos_ids
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
            )
        )

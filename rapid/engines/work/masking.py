"""What given tokens are worth to a model, with all of a prompt and with parts of it unseen."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
from typing_extensions import override

from rapid.engines.attention.batch import Feed
from rapid.engines.kv.lease import Lease
from rapid.engines.work.base import Work
from rapid.errors import BadRequest, OutOfStep
from rapid.speculation.questions import Question

_MOST_ROWS = 128  # of one step: their logits are 100 MB in float32 where 200,000 tokens are known


class MaskedScore(Work):
    """Call for the log-probabilities of given tokens, for each choice with one part unseen.

    The rows are the prompt's last token and the given ones except the last. They do not attend to
    the choice's mask, but the prompt's kept rows behind it had seen it. The keys and values that
    they write are not counted, so nothing is committed.
    """

    kind = "prefill"  # nobody waits for a token

    def __init__(
        self, lease: Lease, token_ids: Sequence[int], masks: Sequence[tuple[int, int]]
    ) -> None:
        """Score `token_ids` behind the prompt; `masks` are positions [start, stop) by choice."""
        super().__init__(lease, tuple(range(len(lease.sequences))))
        self._token_ids = list(token_ids)
        self._masks = masks
        self._scores: list[list[float]] = [[] for _ in masks]
        self._fed: deque[int] = deque()  # the choices whose rows are in the forward, in order

    @override
    def begin(self) -> None:
        super().begin()
        sequences, lease_id = self.lease.sequences, self.lease.lease_id
        if not all(each.holds_prompt and not each.num_generated for each in sequences):
            raise OutOfStep(f"lease {lease_id!r} is not at the end of its prompt")
        if not 0 < len(self._token_ids) <= self.lease.request.terms.max_tokens:
            raise BadRequest(f"lease {lease_id!r} has no room for these tokens")
        last = sequences[0].num_prompt - 1
        if len(self._masks) != len(sequences) or not all(
            0 <= a <= b <= last for a, b in self._masks
        ):
            raise BadRequest(
                "each choice needs a mask, of positions before the prompt's last token"
            )

    @override
    def feeds(self, limit: int) -> list[Feed]:
        limit, feeds = min(limit, _MOST_ROWS), list[Feed]()
        for choice, sequence in enumerate(self.lease.sequences):
            first, position = len(self._scores[choice]), sequence.num_prompt - 1
            inputs = [sequence.token_ids[position], *self._token_ids[:-1]]
            rows = inputs[first : first + sequence.most_rows(limit)]
            if rows:
                place = position + first, sequence.table, len(rows), self._masks[choice]
                feeds.append(Feed(rows, *place, sequence.ring))
                self._fed.append(choice)
                limit -= len(rows)
        return feeds

    @override
    def take(self, logits: torch.Tensor) -> Question | None:
        scores = self._scores[self._fed.popleft()]
        told = self._token_ids[len(scores) : len(scores) + len(logits)]
        wanted = torch.tensor(told, device=logits.device)[:, None]
        scores += logits.log_softmax(-1).gather(1, wanted)[:, 0].tolist()
        if all(len(each) == len(self._token_ids) for each in self._scores):
            self.finish(np.array(self._scores, dtype=np.float32))
        return None

    @property
    @override
    def depth(self) -> int:
        return self.lease.sequences[0].num_prompt + min(map(len, self._scores))

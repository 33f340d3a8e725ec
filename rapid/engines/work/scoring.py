"""Prefill that tells what the prompt's own tokens are worth."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from typing_extensions import override

from rapid.engines.attention.batch import Feed, slots_of
from rapid.engines.kv.sequences import Sequence
from rapid.engines.work.prefill import Prefill
from rapid.messages import PrefillReceipt, TokenLogprobs
from rapid.speculation.questions import Question

_MOST_SCORED = 128  # rows of a step, whose logits would else take more memory than the weights do


class ScoringPrefill(Prefill):
    """Prefill that scores the prompt's tokens from `LeaseRequest.scored_from` on.

    A token's log-probability is in the row of the token before. From the first such row on, pages
    that are computed already are computed again for their logits, but not written: their keys and
    values go to a slot of the lease that holds none yet.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        first, request = self.lease.sequences[0], self.lease.request
        assert request.scored_from is not None
        self._first_row = request.scored_from - 1
        self._num_top = request.terms.num_logprobs or 0
        self._told: list[TokenLogprobs] = []
        last = first.num_prompt - 1  # which the call after the prefill computes
        (self._unused,) = slots_of(first.table, last, last + 1)

    @override
    def advance(self) -> None:
        super().advance()
        if not self.is_done and self._end_of_gap()[1] is not None:
            self.next_page = None  # nobody has to wait for what is only computed again

    @override
    def feeds(self, limit: int) -> list[Feed]:
        row = self._current().num_computed
        if row >= self._num_prompt:
            return super().feeds(limit)
        if row < self._first_row:
            return super().feeds(min(limit, self._first_row - row))
        (feed,) = super().feeds(min(limit, _MOST_SCORED))
        return [replace(feed, num_wanted=len(feed.token_ids))]

    @override
    def take(self, logits: torch.Tensor) -> Question | None:
        sequence = self._current()
        start = sequence.num_computed + 1
        super().take(logits)
        if len(logits):
            told = sequence.token_ids[start : start + len(logits)]
            worth = logits.float().log_softmax(-1)
            chosen = worth.gather(1, torch.tensor(told, device=worth.device)[:, None])[:, 0]
            best = worth.topk(self._num_top, -1)
            tops = zip(best.indices.tolist(), best.values.tolist(), strict=True)
            for token_id, logprob, top in zip(told, chosen.tolist(), tops, strict=True):
                self._told.append(TokenLogprobs(token_id, logprob, tuple(zip(*top, strict=True))))
        return None

    @override
    def finish(self, result: object) -> None:
        assert isinstance(result, PrefillReceipt)
        super().finish(replace(result, prompt_scores=tuple(self._told)))

    @override
    def _end_of_gap(self) -> tuple[int, int | None]:
        if self._kept is not None:
            return super()._end_of_gap()
        cached = self._num_computed_pages()
        if cached:
            page = self.lease.sequences[0].num_computed // self._page_tokens
            return (page + cached) * self._page_tokens, self._unused
        return super()._end_of_gap()

    def _num_computed_pages(self) -> int:
        page = self.lease.sequences[0].num_computed // self._page_tokens
        return self._prefixes.num_in_a_row(self.lease.prompt_pages, page, computed=True)

    @override
    def _resume(self, first: Sequence, page: int, cached: int) -> int:
        most = max(page, self._first_row // self._page_tokens)
        return super()._resume(first, page, min(cached, most))

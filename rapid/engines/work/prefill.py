"""Prefill: computation of the KV of a lease's prompt, for every choice."""

from __future__ import annotations

import torch
from typing_extensions import override

from rapid.engines.attention.batch import Feed
from rapid.engines.kv.cache import KVCache
from rapid.engines.kv.leases import Lease
from rapid.engines.kv.prefix_cache import PrefixCache
from rapid.engines.kv.sequences import Sequence
from rapid.engines.work.base import Work
from rapid.messages import PrefillReceipt
from rapid.speculation.questions import Question


class Prefill(Work):
    """Computation of a prompt, except its last token, and of tokens committed elsewhere.

    The last token's row gives the first logits and is left to the next call. The first choice
    computes the prompt, except for pages whose KV is cached or that another prefill computes first;
    the other choices share its full pages and get a copy of the partly filled one. Then each choice
    computes the tokens it had committed elsewhere.
    """

    kind = "prefill"

    def __init__(
        self, lease: Lease, cache: KVCache, prefixes: PrefixCache, page_tokens: int
    ) -> None:
        super().__init__(lease, tuple(range(len(lease.sequences))))
        self._cache = cache
        self._prefixes = prefixes
        self._page_tokens = page_tokens
        self._num_prompt = lease.sequences[0].num_prompt - 1
        self._num_cached = 0

    @override
    def begin(self) -> None:
        super().begin()
        for runs in self.lease.runs:
            self._prefixes.will_write(runs)
        first = self.lease.sequences[0]
        if not first.holds_prompt:  # dropped amid a page, which others may have begun again since
            first.num_computed -= first.num_computed % self._page_tokens

    @override
    def share(self) -> None:
        num_pages = self.lease.sequences[0].num_computed // self._page_tokens
        pages = self.lease.prompt_pages[:num_pages]
        self._prefixes.note_computed(pages, self.lease.request.tenant)

    @override
    def advance(self) -> None:
        """Use the pages that other prefills have computed since; may finish the work."""
        first, pages = self.lease.sequences[0], self.lease.prompt_pages
        page = first.num_computed // self._page_tokens
        page += self._prefixes.num_in_a_row(pages, page, computed=True)
        num_known = page * self._page_tokens
        if num_known > first.num_computed:
            self._num_cached += num_known - first.num_computed
            first.num_computed = num_known
        self.lease.num_read = min(first.num_computed, self._num_prompt)
        self.next_page = int(pages[page]) if page < len(pages) else None
        self._fork_or_finish()

    @override
    def feed(self, limit: int) -> Feed:
        sequence = self._current()
        is_prompt = sequence.num_computed < self._num_prompt
        stop = self._end_of_gap() if is_prompt else len(sequence.token_ids) - 1
        token_ids = sequence.pending(min(limit, stop - sequence.num_computed))
        self._num_fed = len(token_ids)
        return Feed(token_ids, sequence.num_computed, sequence.table, num_wanted=0)

    @override
    def take(self, logits: torch.Tensor) -> Question | None:
        self._current().num_computed += self._num_fed
        return None

    def _end_of_gap(self) -> int:
        """Return the token at which the next computed page begins, or the end of the prompt."""
        pages = self.lease.prompt_pages
        page = self.lease.sequences[0].num_computed // self._page_tokens
        page += self._prefixes.num_in_a_row(pages, page, computed=False)
        return page * self._page_tokens if page < len(pages) else self._num_prompt

    @property
    @override
    def depth(self) -> int:
        return self._current().num_computed

    def _current(self) -> Sequence:
        return next(one for one in self.lease.sequences if not one.is_prefilled)

    def _fork_or_finish(self) -> None:
        first, *others = self.lease.sequences
        if first.num_computed >= self._num_prompt:
            for other in others:
                if other.num_computed < self._num_prompt:
                    self._fork(first, other)
        if all(sequence.is_prefilled for sequence in self.lease.sequences):
            request = self.lease.request
            self.finish(
                PrefillReceipt(
                    lease_id=request.lease_id,
                    num_tokens=len(request.prompt_ids),
                    num_cached_tokens=self._num_cached,
                    kv_cache_dtype="fp8" if self._cache.layout.is_fp8 else "auto",
                )
            )

    def _fork(self, first: Sequence, other: Sequence) -> None:
        start = self._num_prompt // self._page_tokens * self._page_tokens
        self._cache.copy(
            first.table.spans(start, self._num_prompt), other.table.spans(start, self._num_prompt)
        )
        other.num_computed = self._num_prompt

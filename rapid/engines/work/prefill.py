"""Prefill: computation of the KV of a lease's prompt, for every choice."""

from __future__ import annotations

from collections import deque

import torch
from typing_extensions import override

from rapid.engines.attention.batch import Feed
from rapid.engines.attention.segments import MAX_STEP_ROWS
from rapid.engines.kv.cache import KVCache
from rapid.engines.kv.leases.lease import Lease
from rapid.engines.kv.passages import PassageCache
from rapid.engines.kv.prefix_cache import PrefixCache
from rapid.engines.kv.rings import KeptWindows
from rapid.engines.kv.sequences import Sequence
from rapid.engines.work.apart import ApartReading
from rapid.engines.work.base import Work
from rapid.errors import OutOfStep
from rapid.messages import PrefillReceipt, ReadSoFar
from rapid.speculation.questions import Question


class Prefill(Work):
    """Computation of a prompt, except its last token, and of tokens committed elsewhere.

    The last token's row gives the first logits and is left to the next call. The first choice
    computes the prompt, except for cached pages and those that another prefill computes first; the
    others share its full pages and copy the partly filled one. With rings, cached pages are used as
    far as a kept window ends with one of them (`rapid.engines.kv.rings`).
    """

    kind = "prefill"

    def __init__(
        self,
        lease: Lease,
        cache: KVCache,
        prefixes: PrefixCache,
        page_tokens: int,
        kept: KeptWindows | None = None,
        passages: PassageCache | None = None,
    ) -> None:
        super().__init__(lease, tuple(range(len(lease.sequences))))
        self._apart: ApartReading | None = None
        if passages is not None and lease.request.passages:
            self._apart = ApartReading(lease, passages)
        self._cache = cache
        self._prefixes = prefixes
        self._page_tokens = page_tokens
        self._num_prompt = lease.sequences[0].num_prompt - 1
        self._num_cached = 0
        self._scores: list[list[float]] = []  # of committed tokens, by mask
        self._kept = kept
        self._indices: dict[bytes, int] = {}
        self._points: set[int] = set()  # numbers of pages after which the window is kept
        if kept is not None:
            self._indices = {name: index for index, name in enumerate(lease.page_names)}
            self._points = kept.points(len(lease.page_names))

    @override
    def begin(self) -> None:
        super().begin()
        self._check_fork()
        for runs in self.lease.runs:
            self._prefixes.will_write(runs)
        first = self.lease.sequences[0]
        if not first.holds_prompt:  # dropped amid a page, which others may have begun again since
            first.num_computed -= first.num_computed % self._page_tokens

    @override
    def share(self) -> None:
        num_pages = self.lease.sequences[0].num_computed // self._page_tokens
        pages = self.lease.prompt_pages[:num_pages]
        self._prefixes.note_computed(pages, self.lease.request.terms.tenant)

    @override
    def advance(self) -> None:
        """Use the pages that other prefills have computed since; may finish the work."""
        first, pages = self.lease.sequences[0], self.lease.prompt_pages
        page = first.num_computed // self._page_tokens
        cached = page + self._prefixes.num_in_a_row(pages, page, computed=True)
        num_known = self._resume(first, page, cached) * self._page_tokens
        if num_known > first.num_computed:
            self._num_cached += num_known - first.num_computed
            first.num_computed = num_known
        num_read = min(first.num_computed, self._num_prompt)
        self.lease.read_so_far = ReadSoFar(num_read, self._num_cached)
        self.next_page = int(pages[cached]) if cached < len(pages) else None
        self._fork_or_finish()

    @override
    def feeds(self, limit: int) -> list[Feed]:
        sequence = self._current()
        is_prompt, scratch = sequence.num_computed < self._num_prompt, None
        stop = len(sequence.token_ids) - 1
        if is_prompt:
            stop, scratch = self._end_of_gap()
            if self._apart is not None:
                feeds, stop = self._apart.plan(sequence, stop, limit)
                if feeds:
                    return feeds
        limit = sequence.most_rows(limit)
        token_ids = sequence.pending(min(limit, stop - sequence.num_computed))
        self._num_fed = len(token_ids)
        position, ring = sequence.num_computed, sequence.ring
        return [Feed(token_ids, position, sequence.table, 0, ring=ring, scratch=scratch)]

    @override
    def take(self, logits: torch.Tensor) -> Question | None:
        sequence = self._current()
        if self._apart is not None and self._apart.take(sequence):
            return None
        read = sequence.num_computed
        sequence.num_computed += self._num_fed
        if read < self._num_prompt:
            self._keep(sequence, read)
        return None

    @override
    def prepare(self) -> None:
        if self._apart is not None:
            self._apart.place()

    def _end_of_gap(self) -> tuple[int, int | None]:
        """Return the token at which the next computed page begins, or the end of the prompt."""
        pages = self.lease.prompt_pages
        page = self.lease.sequences[0].num_computed // self._page_tokens
        cached = page + self._prefixes.num_in_a_row(pages, page, computed=True)
        if cached > page:  # of computed pages only the ring's part is missing: use a scratch slot
            assert self._kept is not None
            self._points.add(cached)
            return cached * self._page_tokens, self._kept.scratch
        page += self._prefixes.num_in_a_row(pages, page, computed=False)
        return page * self._page_tokens if page < len(pages) else self._num_prompt, None

    def _resume(self, first: Sequence, page: int, cached: int) -> int:
        """Return the page from which on the prompt is to be computed."""
        if self._kept is None or first.ring is None:
            return cached
        found = self._kept.last(self._indices, page, cached)
        if found > page:
            name = self.lease.page_names[found - 1]
            documents = self.lease.request.terms.documents
            self._kept.restore(name, first.ring, found * self._page_tokens, documents)
        return found

    def _keep(self, first: Sequence, read: int) -> None:
        """Keep the windows at the points that the last rows have passed, after `read` tokens."""
        if self._kept is None or first.ring is None:
            return
        for point in sorted(self._points):
            position = point * self._page_tokens
            if read < position <= first.num_computed:
                name = self.lease.page_names[point - 1]
                documents = self.lease.request.terms.documents
                self._kept.keep(name, first.ring, position, documents)

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
                    num_placed_tokens=self._apart.num_placed if self._apart else 0,
                    reads_apart=self._apart is not None,
                    kv_cache_dtype="fp8" if self._cache.layout.is_fp8 else "auto",
                    scores=tuple(map(tuple, self._scores)),
                )
            )

    def _check_fork(self) -> None:
        """Check that choices which lack the prompt can have the first one's window of it."""
        first, *others = self.lease.sequences
        if self._kept is None or first.ring is None or first.num_computed <= self._num_prompt:
            return
        is_missing = any(other.num_computed < self._num_prompt for other in others)
        if is_missing and not first.ring.holds(self._kept.first_kept(self._num_prompt)):
            raise OutOfStep(
                f"the first choice of lease {self.lease.lease_id!r} went on before the others had "
                "the prompt: take a new lease"
            )

    def _fork(self, first: Sequence, other: Sequence) -> None:
        start = self._num_prompt // self._page_tokens * self._page_tokens
        self._cache.copy(
            first.table.spans(start, self._num_prompt), other.table.spans(start, self._num_prompt)
        )
        if self._kept is not None and first.ring is not None and other.ring is not None:
            self._kept.fork(first.ring, other.ring, self._num_prompt)
        other.num_computed = self._num_prompt


class MaskedPrefill(Prefill):
    """Prefill that scores the committed tokens of each choice with a part of the prompt unseen.

    The rows of the prompt behind that part did see it. All choices' rows go into one forward.
    """

    @override
    def begin(self) -> None:
        super().begin()
        self._scores = [[] for _ in self.lease.sequences]
        self._fed: deque[tuple[Sequence, list[float]]] = deque()  # in the forward, in order

    @override
    def feeds(self, limit: int) -> list[Feed]:
        masks, feeds = self.lease.request.masks, list[Feed]()
        if self.lease.sequences[0].num_computed < self._num_prompt:
            return super().feeds(limit)
        for choice, one in enumerate(self.lease.sequences):
            # Kernels are checked with unseen keys for so many rows.
            most = min(limit, MAX_STEP_ROWS, one.num_pending - 1)
            if token_ids := one.pending(most):
                place = one.num_computed, one.table, most, masks[choice], one.ring
                feeds.append(Feed(token_ids, *place))
                self._fed.append((one, self._scores[choice]))
                limit -= most
        return feeds

    @override
    def take(self, logits: torch.Tensor) -> Question | None:
        if not self._fed:
            return super().take(logits)
        sequence, scores = self._fed.popleft()
        start = sequence.num_computed + 1
        sequence.num_computed += len(logits)
        told = torch.tensor(sequence.token_ids[start : start + len(logits)], device=logits.device)
        scores += logits.log_softmax(-1).gather(1, told[:, None])[:, 0].tolist()
        return None

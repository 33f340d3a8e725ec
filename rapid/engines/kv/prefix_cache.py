"""Read once: the pages of a prompt are found again by their content.

A full page of a prompt has a **name**: the hash of its tokens, of all tokens before them and of the
tenant, so that one tenant never meets another's pages. The cache holds every named page beside the
leases that use it, and shares it with the next prompt that begins in the same way, also while its
KV is still being computed: the scheduler lets one prefill compute a page, the others wait for it.

A page that no lease holds any more stays until room is needed; the one used longest ago goes first,
of one prompt the tail before the head. What is pushed out may go on in a second tier, in host
memory (`HostTier`), and is copied back for the next prompt that has it, unless that was measured to
take longer than computing it anew.

Names are given and copies ordered whenever a lease opens or ends; pages are written later, by the
compute thread. So beside its name, which says what a page is for, every page carries a **tag**,
which says what it holds: the name of the KV that was last computed there, or copied there together
with its tag. A page counts as computed only while the two agree.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

import numpy as np

from rapid.engines.kv.cache import PagePool, Run
from rapid.engines.kv.host_tier import HostTier, Move, Tags
from rapid.messages import Int32Array

Pages = np.ndarray[tuple[int], np.dtype[np.intp]]
_NAME_BYTES = 16
_MOST_EVICTED = 2  # times the pages asked for


def page_names(prompt_ids: Int32Array, page_tokens: int, tenant: str) -> list[bytes]:
    """Names of the full pages of a prompt.

    The last token is left out: its row gives the first logits, so it is computed for every request.
    """
    num_pages = (len(prompt_ids) - 1) // page_tokens
    content = np.ascontiguousarray(prompt_ids, dtype=np.int32).tobytes()
    width = np.dtype(np.int32).itemsize * page_tokens
    name = blake2b(tenant.encode(), digest_size=_NAME_BYTES).digest()
    names = []
    for start in range(0, num_pages * width, width):
        name = blake2b(content[start : start + width], digest_size=_NAME_BYTES, key=name).digest()
        names.append(name)
    return names


class PrefixCache:
    """Named pages over a pool; not safe for threads by itself: the engine guards it."""

    def __init__(self, pool: PagePool, host: HostTier | None = None) -> None:
        self._pool = pool
        self._host = host
        self._page_of: OrderedDict[bytes, int] = OrderedDict()  # used longest ago first
        self._name_of: dict[int, bytes] = {}
        self._is_named = np.zeros(pool.num_pages, dtype=bool)
        self._is_computed = np.zeros(pool.num_pages, dtype=bool)
        self.tags: Tags = [None] * pool.num_pages  # the compute thread's, as the KV is

    @property
    def num_idle(self) -> int:
        """Pages that are kept though no lease holds them; they give way when room is needed."""
        return int((self._is_named & (self._pool.num_holders == 1)).sum())

    def fits(self, names: Sequence[bytes], num_pages: int, num_kept: int = 0) -> bool:
        """Whether a prompt of these pages could take `num_pages`, and `num_kept` stay free."""
        here = [page for name in names if (page := self._page_of.get(name)) is not None]
        num_idle_here = int((self._pool.num_holders[here] == 1).sum())
        room = self._pool.num_free + self.num_idle - num_idle_here
        return num_pages - len(here) + num_kept <= room

    def take(self, names: Sequence[bytes], num_pages: int) -> tuple[Run, ...]:
        """Hold `num_pages` pages, in a sequence's order, of which the first have these names.

        Those that are here are shared; the others are new, to be computed or restored.
        """
        pages = [self._page_of.get(name) for name in names]
        here = [page for page in pages if page is not None]
        self._pool.share(as_runs(here))  # from now on nothing pushes them out
        if self._host is not None:
            self._host.want(names)
        num_missing = num_pages - len(here)
        self._make_room(num_missing)
        fresh = [page for run in self._pool.allocate(num_missing) for page in run.pages]
        new = iter(fresh)
        for index, name in enumerate(names):
            if pages[index] is None:
                pages[index] = page = next(new)
                self._add(name, page)
        for name in reversed(names):
            self._page_of.move_to_end(name)
        return as_runs([*pages, *new])  # type: ignore[list-item]

    def free(self, runs: Iterable[Run]) -> None:
        """Drop a lease's hold; named pages stay, unless nobody is left who would compute them."""
        runs = tuple(runs)
        self._pool.free(runs)
        for run in runs:
            pages = slice(run.start, run.stop)
            is_alone = self._is_named[pages] & (self._pool.num_holders[pages] == 1)
            for page in run.start + np.flatnonzero(is_alone & ~self._is_computed[pages]):
                self._drop(self._name_of[int(page)])

    def will_write(self, runs: Iterable[Run]) -> None:
        """Forget what these pages of a lease held: it overwrites those that are not computed."""
        for run in runs:
            for page in run.start + np.flatnonzero(~self._is_computed[run.start : run.stop]):
                self.tags[page] = None

    def note_computed(self, pages: Pages) -> None:
        """These named pages hold their KV from now on."""
        for page in pages[~self._is_computed[pages]].tolist():
            self.tags[page] = self._name_of[page]
        self._is_computed[pages] = True

    def num_in_a_row(self, pages: Pages, start: int, *, computed: bool) -> int:
        """How many pages, from index `start` on, hold their KV; or how many have none yet.

        Raises:
            AssertionError: a page counts as computed and holds something else.
        """
        others = np.flatnonzero(self._is_computed[pages[start:]] != computed)
        number = int(others[0]) if len(others) else max(len(pages) - start, 0)
        if computed:
            self._check_tags(pages[start : start + number].tolist())
        return number

    @property
    def has_moves(self) -> bool:
        """Whether copies between the tiers are due."""
        return self._host is not None and self._host.has_moves

    def take_moves(self) -> list[Move]:
        """Copies between the tiers that are due, in order; the caller makes them, then `settle`.

        A page may have changed hands since its copy was ordered: only what it is for now, and does
        not hold yet, may be copied into it.
        """
        moves = self._host.take_moves() if self._host else []
        return [
            move
            for move in moves
            if not move.is_restore
            or (self._page_of.get(move.name) == move.page and not self._is_computed[move.page])
        ]

    def settle(self, moves: Iterable[Move]) -> None:
        """Pages into which was copied what they are for, still, hold their KV."""
        for move in moves:
            if move.is_restore and self._name_of.get(move.page) == self.tags[move.page]:
                self._is_computed[move.page] = True

    def check_integrity(self, held: Iterable[Iterable[Run]]) -> None:
        """Raise unless counts are those of leases and cache, and computed pages hold their own."""
        named = [Run(page, page + 1) for page in self._name_of]
        self._pool.check_integrity([*held, named])
        if {name: page for page, name in self._name_of.items()} != self._page_of:
            raise AssertionError("prefix cache: names and pages differ")
        self._check_tags(np.flatnonzero(self._is_computed).tolist())

    def _check_tags(self, computed: Iterable[int]) -> None:
        for page in computed:
            if self.tags[page] != self._name_of[page]:
                raise AssertionError(f"prefix cache: page {page} holds another prompt's KV")

    def _add(self, name: bytes, page: int) -> None:
        self._pool.share([Run(page, page + 1)])
        self._page_of[name] = page
        self._name_of[page] = name
        self._is_named[page] = True
        self._is_computed[page] = False
        if self._host is not None:
            self._host.restore(name, page)

    def _drop(self, name: bytes) -> None:
        page = self._page_of.pop(name)
        del self._name_of[page]
        self._is_named[page] = False
        if self._host is not None and self._is_computed[page]:
            self._host.keep(name, page)
        self._is_computed[page] = False
        self._pool.free([Run(page, page + 1)])

    def _make_room(self, num_pages: int) -> None:
        """Free pages, the ones used longest ago first, and some more for them to lie together.

        A sequence in one run is attended to fastest; for it at most twice of what is asked goes.
        """
        if self._pool.num_free_together >= num_pages:
            return
        is_idle = self._pool.num_holders == 1
        idle = [name for name, page in self._page_of.items() if is_idle[page]]
        evicted = max(num_pages - self._pool.num_free, 0)
        for name in idle[:evicted]:
            self._drop(name)
        at_once = 1 + num_pages // 16
        while evicted < _MOST_EVICTED * num_pages and self._pool.num_free_together < num_pages:
            if evicted >= len(idle):
                return
            for name in idle[evicted : evicted + at_once]:
                self._drop(name)
            evicted += at_once


def as_runs(pages: Iterable[int]) -> tuple[Run, ...]:
    """Pages in their order, neighbours joined."""
    runs: list[Run] = []
    for page in pages:
        if runs and runs[-1].stop == page:
            runs[-1] = Run(runs[-1].start, page + 1)
        else:
            runs.append(Run(page, page + 1))
    return tuple(runs)


def pages_of(runs: Iterable[Run], num_pages: int) -> Pages:
    """The first pages of some runs."""
    pages = [np.asarray(run.pages) for run in runs]
    return np.concatenate([*pages, np.empty(0, dtype=np.intp)])[:num_pages].astype(np.intp)

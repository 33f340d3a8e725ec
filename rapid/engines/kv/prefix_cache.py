"""Prefix cache: the pages of a prompt, found again by their content.

A full page of a prompt has a **name**: the hash of its tokens, of all tokens before them and of the
tenant. Names are given when a lease opens, but pages are written later. So every page also carries
a **tag**: the name of the KV that it holds, and is computed only while the two agree.

Each tenant has a **floor**: its part of the pool, if all who used it of late had equal ones. Where
room is needed, pages of the tenant go first that is farthest above its floor, and of these the
least recently used. So what a quiet tenant has read stays while another reads ever new documents.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heapreplace
from itertools import islice

import numpy as np

from rapid.engines.kv.cache import PagePool, PageRun, Pages, as_runs
from rapid.engines.kv.tiers.disk_tier import DiskTier
from rapid.engines.kv.tiers.host_tier import HostTier, Move, Tags
from rapid.messages import Int32Array
from rapid.ports import Clock

_FLOOR_S = 3600.0  # after which a tenant that reads nothing has no floor; others may need the room
_MOST_EVICTED = 2  # most pages evicted at once, as a multiple of those requested
_ZEROED_BYTES = 64 * 2**20  # of host memory between two steps, which takes it about 10 ms
_LEAST_STALE = 1024  # names of pages that are nowhere any more, before they are looked for


class PrefixCache:
    """Cache of named pages over a pool; the engine guards it."""

    def __init__(
        self,
        pool: PagePool,
        host: HostTier | None = None,
        disk: DiskTier | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._pool = pool
        self._clock = clock
        self._owner_of: dict[bytes, str] = {}  # the tenant of each named page
        self._num_owned = Counter[str]()
        self._seen: dict[str, float] = {}  # when each tenant took pages last
        self._host = host
        self._disk = disk
        self._page_of: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._name_of: dict[int, bytes] = {}
        self._is_named = np.zeros(pool.num_pages, dtype=bool)
        self._is_computed = np.zeros(pool.num_pages, dtype=bool)
        self.tags: Tags = [None] * pool.num_pages  # like the KV, of the compute thread
        # Names of documents that stand in the prompt up to the page of a name, in pool or host.
        self._documents: dict[bytes, frozenset[str]] = {}
        # Names of pages of documents to be forgotten, while leases hold them.
        self._doomed: dict[bytes, None] = {}
        self._is_freed = False  # whether a doomed page was freed and not overwritten since

    @property
    def num_idle(self) -> int:
        """Number of pages kept without a lease; they are evicted when room is needed."""
        return int((self._is_named & (self._pool.num_holders == 1)).sum())

    @property
    def num_unread(self) -> int:
        """Number of named pages that open leases still have to compute, each counted once."""
        return int((self._is_named & ~self._is_computed).sum())

    def fits(self, names: Sequence[bytes], num_pages: int, num_kept: int = 0) -> bool:
        """Return whether a lease of `num_pages` fits, beside `num_kept` pages that must stay free.

        `names` are those of its prompt's full pages; the ones that are here take no new room.
        """
        here = [page for name in names if (page := self._page_of.get(name)) is not None]
        num_idle_here = int((self._pool.num_holders[here] == 1).sum())
        room = self._pool.num_free + self.num_idle - num_idle_here
        return num_pages - len(here) + num_kept <= room

    def take(
        self,
        names: Sequence[bytes],
        num_pages: int,
        tenant: str = "",
        documents: Collection[str] = (),
    ) -> tuple[PageRun, ...]:
        """Take `num_pages` pages for a tenant's sequence, in its order; the first have these names.

        Named pages that are here are shared; the others are new, to be computed or restored.
        `documents` are the names of those that stand in the prompt, for `forget`.
        """
        self._seen[tenant] = self._clock()
        pages = [self._page_of.get(name) for name in names]
        here = [page for page in pages if page is not None]
        self._pool.share(as_runs(here))  # from now on they cannot be evicted
        if self._host is not None:
            self._host.want(names)
        num_missing = num_pages - len(here)
        try:
            self._make_room(num_missing, tenant)
            fresh = [page for run in self._pool.allocate(num_missing) for page in run.pages]
        except Exception:
            self._pool.free(as_runs(here))
            raise
        missing = [name for name, page in zip(names, pages, strict=True) if page is None]
        self._add(missing, fresh[: len(missing)])
        self._owner_of.update(dict.fromkeys(missing, tenant))
        self._num_owned[tenant] += len(missing)
        for name in reversed(names):
            self._page_of.move_to_end(name)
        if self._host is not None:
            self._host.want(())
        if self._disk is not None and names:
            self._disk.use(names, documents)
        self._note(names, frozenset(documents))
        return as_runs([*map(self._page_of.__getitem__, names), *fresh[len(missing) :]])

    def free(self, runs: Iterable[PageRun]) -> None:
        """Drop a lease's hold on its pages; computed ones with names stay in the cache."""
        runs = tuple(runs)
        self._pool.free(runs)
        for run in runs:
            pages = slice(run.start, run.stop)
            is_alone = self._is_named[pages] & (self._pool.num_holders[pages] == 1)
            # Nobody is left to compute these.
            for page in run.start + np.flatnonzero(is_alone & ~self._is_computed[pages]):
                self._drop(self._name_of[int(page)])
        if self._doomed:
            self._drop_doomed()

    def forget(self, documents: Collection[str]) -> dict[str, int]:
        """Drop the pages of prompts that hold any of some documents; return their number by tier.

        Pages that leases hold are dropped when these end.
        """
        held = self._documents.items()
        # In their order, so that what follows does not depend on the seed of hashes.
        names = {name: None for name, each in held if not each.isdisjoint(documents)}.keys()
        found = {"memory": sum(name in self._page_of for name in names), "host memory": 0}
        if self._disk is not None:
            self._disk.forget(names)
        if self._host is not None:
            found["host memory"] = sum(map(self._host.drop, names))
        self._doomed |= {name: None for name in names if name in self._page_of}
        self._drop_doomed()
        for name in [each for each in names if each not in self._page_of]:
            self._documents.pop(name, None)
        return found

    def is_in_use(self, documents: Collection[str]) -> bool:
        """Return whether pages of some documents are held, or were freed and not overwritten."""
        held = map(self._documents.__getitem__, self._doomed)
        return self._is_freed or any(not each.isdisjoint(documents) for each in held)

    @property
    def is_dirty(self) -> bool:
        """Whether pages with a part of a document that was forgotten are to be overwritten."""
        return self._is_freed

    def take_dirty(self) -> tuple[list[int], list[int]]:
        """Return pages of the pool, and of host memory, to be overwritten now by this thread.

        They are free, and no copy reads or writes them. Those of host memory may be a part.
        """
        self._is_freed = False
        pages, host_pages = self._pool.take_dirty(), list[int]()
        self._pool.is_stale[pages] = False
        if self._host is not None:
            copied = [page for page in pages if self._host.is_copied(page)]
            self._pool.is_dirty[copied] = True
            pages = [page for page in pages if self._pool.is_dirty[page] == 0]
            host_pages = self._host.take_dirty(_ZEROED_BYTES)
            self._is_freed = bool(copied or host_pages)
        for page in pages:
            self.tags[page] = None
        return pages, host_pages

    def will_write(self, runs: Iterable[PageRun]) -> None:
        """Clear the tags of a lease's pages that are not computed: the lease overwrites them."""
        for run in runs:
            for page in run.start + np.flatnonzero(~self._is_computed[run.start : run.stop]):
                self.tags[page] = None

    def note_computed(self, pages: Pages, tenant: str = "") -> None:
        """Mark pages of a prompt as computed, so that prompts of the tenant share them by name."""
        for page in pages[~self._is_computed[pages]].tolist():
            self.tags[page] = name = self._name_of[page]
            if self._disk is not None and name not in self._doomed:
                self._disk.save(name, tenant, self._documents.get(name, frozenset()))
        self._is_computed[pages] = True

    def num_in_a_row(self, pages: Pages, start: int, *, computed: bool) -> int:
        """Return how many of a prompt's pages from index `start` on are computed, or are not.

        Raises:
            AssertionError: A page counts as computed but holds other KV.
        """
        others = np.flatnonzero(self._is_computed[pages[start:]] != computed)
        number = int(others[0]) if len(others) else max(len(pages) - start, 0)
        if computed:
            self._check_tags(pages[start : start + number].tolist())
        return number

    @property
    def is_due(self) -> bool:
        """Whether the compute thread has copies between the tiers to launch, or results to take."""
        if self._host is None:
            return False
        return self._host.has_moves or (self._disk is not None and self._disk.is_due)

    @property
    def is_reading(self) -> bool:
        """Whether the disk tier has pages to read that some prompt waits for."""
        return self._disk is not None and self._disk.is_reading

    @property
    def is_copying(self) -> bool:
        """Whether copies between the tiers are queued or on their way."""
        return self._host is not None and self._host.is_copying

    def awaits_copies(self, runs: Iterable[PageRun]) -> bool:
        """Return whether a lease with these pages must wait for copies before it writes to them."""
        host, disk = self._host, self._disk
        if host is None or not (host.is_copying or (disk is not None and disk.is_reading)):
            return False
        for run in runs:  # computed pages are only read, which copies do not disturb
            for page in (
                run.start + np.flatnonzero(~self._is_computed[run.start : run.stop])
            ).tolist():
                if host.is_copied(page):
                    return True
                if disk is not None and disk.is_read(self._name_of.get(page)):
                    return True
        return False

    def take_moves(self) -> list[Move]:
        """Return the copies between the tiers to launch, in order; each goes to `settle` later."""
        if self._host is None:
            return []
        if self._disk is not None:
            self._disk.go_on(self.find_uncomputed, self.find_computed)
        moves = self._host.take_moves()
        # A page may have changed hands since its copy was ordered, or be computed by now.
        stale = {m for m in moves if m.is_restore and self.find_uncomputed(m.name) != m.page}
        self._host.settle(move for move in moves if move in stale)
        return [move for move in moves if move not in stale]

    def find_uncomputed(self, name: bytes) -> int | None:
        """Return the page that has this name and is not computed yet, if any."""
        page = self._page_of.get(name)
        return None if page is None or self._is_computed[page] else page

    def find_computed(self, name: bytes) -> int | None:
        """Return the computed page of this name, if any."""
        page = self._page_of.get(name)
        return page if page is not None and self._is_computed[page] else None

    def settle(self, moves: Iterable[Move]) -> None:
        """Mark the pages of landed copies as computed where the name equals the tag."""
        moves = tuple(moves)
        if self._host is None or not moves:
            return
        self._host.settle(moves)
        for move in moves:
            if not move.is_restore or self._host.is_copied(move.page):
                continue  # behind another copy on its way, the tag runs ahead of the content
            name = self._name_of.get(move.page)
            if name is not None and name == self.tags[move.page]:
                self._is_computed[move.page] = True

    def check_integrity(self, held: Iterable[Iterable[PageRun]]) -> None:
        """Raise AssertionError unless names, tags and holders, with those of leases, are right."""
        named = [PageRun(page, page + 1) for page in self._name_of]
        self._pool.check_integrity([*held, named])
        if {name: page for page, name in self._name_of.items()} != self._page_of:
            raise AssertionError("prefix cache: names and pages differ")
        self._check_tags(np.flatnonzero(self._is_computed).tolist())

    def _check_tags(self, computed: Iterable[int]) -> None:
        for page in computed:
            if self.tags[page] != self._name_of[page]:
                raise AssertionError(f"prefix cache: page {page} holds another prompt's KV")

    def _add(self, names: Sequence[bytes], pages: Sequence[int]) -> None:
        self._pool.share(as_runs(pages))
        self._page_of.update(zip(names, pages, strict=True))
        self._name_of.update(zip(pages, names, strict=True))
        self._is_named[pages] = True
        self._is_computed[pages] = False
        if self._host is None:
            return
        for name, page in zip(names, pages, strict=True):
            if not self._host.restore(name, page) and self._disk is not None:
                self._disk.restore(name)

    def _drop(self, name: bytes) -> None:
        page = self._page_of.pop(name)
        del self._name_of[page]
        self._num_owned[self._owner_of.pop(name)] -= 1
        self._is_named[page] = False
        if self._host is not None and self._is_computed[page] and name not in self._doomed:
            self._host.keep(name, page)
        self._is_computed[page] = False
        self._pool.free([PageRun(page, page + 1)])

    def count_valid(self, page_tokens: int) -> Int32Array:
        """Return how many tokens of each page are computed, or may be needed for a copy."""
        valid = np.where(self._is_computed, page_tokens, 0).astype(np.int32)
        if self._host is not None:
            valid[[*self._host.pages_copied]] = page_tokens
        return valid

    def _drop_doomed(self) -> None:
        for name in [*self._doomed]:
            page = self._page_of.get(name)
            if page is not None and self._pool.num_holders[page] > 1:
                continue
            if page is not None:
                self._drop(name)
            self._doomed.pop(name, None)
            self._documents.pop(name, None)
            if self._host is not None:  # a copy that was read meanwhile
                self._host.drop(name)
            self._is_freed = True

    def _note(self, names: Sequence[bytes], documents: frozenset[str]) -> None:
        """Remember which documents stand before the pages of some names."""
        if not documents:
            return
        for name in names:
            known = self._documents.get(name, documents)
            self._documents[name] = known if documents <= known else known | documents
        num_kept = len(self._page_of) + (len(self._host) if self._host is not None else 0)
        if len(self._documents) > 2 * num_kept + _LEAST_STALE:
            kept = self._page_of.keys() | set(self._host or ())
            if self._disk is not None:
                kept |= self._disk.names_in_transit
            self._documents = {name: held for name, held in self._documents.items() if name in kept}

    def _in_order_of_eviction(self, num_pages: int, tenant: str) -> Iterator[tuple[bytes, bool]]:
        """Yield the names of idle pages for a tenant that asks for some.

        Those come first of who is farthest above its floor, and the least recently used of these.
        With each name is told whether it is above a floor, or of the tenant itself.
        """
        since = self._clock() - _FLOOR_S
        self._seen = {name: at for name, at in self._seen.items() if at >= since}
        self._num_owned += Counter()  # forgets tenants without pages
        floor = self._pool.num_pages / len(self._seen)
        is_idle = self._pool.num_holders == 1
        above = self._num_owned + Counter({tenant: num_pages})
        idle: dict[str, deque[bytes]] = {}
        for name, page in self._page_of.items():
            if is_idle[page]:
                idle.setdefault(self._owner_of[name], deque()).append(name)
        heap = [(floor * (each in self._seen) - above[each], each) for each in idle]
        heapify(heap)
        while heap:
            missing, owner = heap[0]
            yield idle[owner].popleft(), missing < 0 or owner == tenant
            if idle[owner]:
                heapreplace(heap, (missing + 1, owner))
            else:
                heappop(heap)

    def _make_room(self, num_pages: int, tenant: str) -> None:
        """Evict idle pages, preferably until one free run suffices."""
        if self._pool.num_free_together >= num_pages:
            return  # attention is fastest over a sequence in one run
        order = self._in_order_of_eviction(num_pages, tenant)
        evicted = max(num_pages - self._pool.num_free, 0)
        for name, _ in islice(order, evicted):
            self._drop(name)
        # A run is no reason to take what is below a floor.
        idle = (name for name, is_above in order if is_above)
        at_once = 1 + num_pages // 16
        while evicted < _MOST_EVICTED * num_pages and self._pool.num_free_together < num_pages:
            names = [*islice(idle, at_once)]
            if not names:
                return
            for name in names:
                self._drop(name)
            evicted += at_once

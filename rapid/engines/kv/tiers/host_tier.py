"""Second cache tier: KV pages in host memory, and the copies to and from the engine's pool.

A copy is queued when a lease opens or ends, launched by the compute thread between two forwards,
and landed when its bytes are there (`rapid.engines.kv.tiers.lanes`).
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from rapid.engines.kv.cache import KVCache, KVLayout
from rapid.engines.kv.tiers.lanes import Mark, lane_for, pin
from rapid.estimators import RunningMean

Tags = list[bytes | None]

_WEIGHT = 0.25  # weight of the latest measurement in a running mean
_FADE = 0.999  # factor on the restoring estimate with every page not restored because of it


@dataclass(frozen=True, slots=True)
class Move:
    """Copy of one page between the engine's pool and host memory."""

    name: bytes  # name of the page's content (see `rapid.engines.kv.prefix_cache`)
    page: int  # page in the engine's pool
    host_page: int
    is_restore: bool  # whether the page is copied back into the pool instead of out of it


class HostTier:
    """Least-recently-used cache, in host memory, of pages of the engine's pool.

    It has those that left the pool and, above a disk tier, all that pass through it to the disk.
    Its methods are called with the engine's lock held, except for `launch` and `take_landed`, which
    run on the compute thread between two forwards.
    """

    def __init__(self, layout: KVLayout, num_pages: int, page_tokens: int) -> None:
        shape = (len(layout.devices), 2, layout.num_kv_heads, page_tokens, layout.head_dim)
        # The KV of a page lies together, so that neighbours are one transfer.
        self.blocks = torch.empty((num_pages, *shape), dtype=layout.kept_dtype)
        if layout.devices[0].type == "cuda":
            pin(self.blocks, self)
        self._lane = lane_for(set(layout.devices), self.blocks[:1])
        self.tags: Tags = [None] * num_pages  # as they will be when all launched copies have landed
        self.page_bytes = self.blocks[:1].nbytes
        self.pace = RestorePace()
        self.num_restored = 0  # pages
        self._num_pages = num_pages
        self._page_of: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._name_of: dict[int, bytes] = {}
        self._free = deque(range(num_pages))
        self._held: set[int] = set()
        self._dirty: set[int] = set()  # pages whose content was dropped and is to be overwritten
        self._wanted: set[bytes] = set()
        self._moves: list[Move] = []
        self._launched: deque[tuple[Mark, list[Move]]] = deque()
        self._copies = _Counts()
        self._host_copies = _Counts()

    # --- what is here -----------------------------------------------------------------------------

    def want(self, names: Sequence[bytes]) -> None:
        """Protect pages about to be restored from evictions, until the next call."""
        self._wanted = set(names)
        for name in reversed(names):
            if name in self._page_of:
                self._page_of.move_to_end(name)

    def forget(self) -> None:
        """Drop all pages and queued copies, after a failed copy left the content unknown."""
        self._dirty.update(self._name_of)
        self._page_of.clear()
        self._name_of.clear()
        self._moves.clear()
        self._free = deque(page for page in range(self._num_pages) if page not in self._held)
        moves = [move for _, launched in self._launched for move in launched]
        self._copies = _Counts(move.page for move in moves)
        self._host_copies = _Counts(move.host_page for move in moves)

    def drop(self, name: bytes) -> bool:
        """Drop a page, to be overwritten as soon as nothing uses it; return whether it was here."""
        host_page = self._page_of.pop(name, None)
        if host_page is None:
            return False
        del self._name_of[host_page]
        self._dirty.add(host_page)
        if host_page not in self._held:
            self._free.append(host_page)
        return True

    @property
    def is_dirty(self) -> bool:
        """Whether a dropped page is not overwritten yet."""
        return bool(self._dirty)

    def take_dirty(self, most_bytes: int) -> list[int]:
        """Return dropped pages that nothing uses, which are to be overwritten now."""
        in_use = self._held | self._name_of.keys() | self._host_copies.keys()
        pages = sorted(self._dirty - in_use)[: max(most_bytes // self.page_bytes, 1)]
        self._dirty -= self._name_of.keys()  # those are overwritten by what is copied there
        self._dirty.difference_update(pages)
        for page in pages:
            self.tags[page] = None
        return pages

    def zero(self, pages: Sequence[int]) -> None:
        """Overwrite pages with zeros, on the compute thread."""
        for page in pages:
            self.blocks[page].zero_()

    def __len__(self) -> int:
        return len(self._page_of)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._page_of)

    def page_of(self, name: bytes) -> int | None:
        """Return the page in host memory that has this name, if any."""
        return self._page_of.get(name)

    def is_here(self, name: bytes) -> bool:
        """Return whether a page of this name has landed in host memory."""
        page = self._page_of.get(name)
        return page is not None and page not in self._host_copies and self.tags[page] == name

    # --- copies, as they are ordered --------------------------------------------------------------

    def keep(self, name: bytes, page: int) -> None:
        """Queue the copy of a page that leaves the engine's pool, if there is room for it."""
        if name in self._page_of:
            self._page_of.move_to_end(name)
        elif (host_page := self._room(self._wanted)) is not None:
            self._queue(Move(name, page, self._add(name, host_page), is_restore=False))

    def restore(self, name: bytes, page: int) -> bool:
        """Queue the copy of a page into the pool, if that is faster; return whether it is here."""
        host_page = self._page_of.get(name)
        if host_page is None:
            return False
        if self.pace.is_restoring_faster:
            self._page_of.move_to_end(name)
            self._queue(Move(name, page, host_page, is_restore=True))
        else:
            self.pace.fade()
        return True

    @property
    def has_moves(self) -> bool:
        """Whether copies are to be launched."""
        return bool(self._moves)

    @property
    def is_copying(self) -> bool:
        """Whether copies are to be launched, or have not landed."""
        return bool(self._copies)

    def is_copied(self, page: int) -> bool:
        """Return whether a page of the pool has a copy queued or on its way."""
        return page in self._copies

    @property
    def pages_copied(self) -> set[int]:
        """Pages of the pool that have copies queued or on their way."""
        return set(self._copies)

    def take_moves(self) -> list[Move]:
        """Return the copies to launch, in order, and clear them."""
        moves, self._moves = self._moves, []
        return moves

    def settle(self, moves: Iterable[Move]) -> None:
        """Count copies that have landed, or that were taken and will not be launched."""
        for move in moves:
            self._copies.drop(move.page)
            self._host_copies.drop(move.host_page)

    # --- copies, as they are made -----------------------------------------------------------------

    def launch(self, moves: Sequence[Move], cache: KVCache, tags: Tags) -> None:
        """Begin copies, in order, one run of neighbouring pages at a time, and copy `cache`'s tags.

        Raises:
            AssertionError: A restored page does not hold the KV that its move names.
        """
        try:
            self._launch(moves, cache, tags)
        except BaseException:
            self._lane.wait()  # what was launched in part is counted nowhere
            raise

    def _launch(self, moves: Sequence[Move], cache: KVCache, tags: Tags) -> None:
        for run in _join(moves):
            first = run[0]
            ours = slice(first.page, first.page + len(run))
            theirs = slice(first.host_page, first.host_page + len(run))
            read, write = (self.tags[theirs], tags) if first.is_restore else (tags[ours], self.tags)
            places = ours if first.is_restore else theirs
            write[places] = [None] * len(run)  # until the copy is launched
            mark = self.copy(cache, ours, theirs, is_restore=first.is_restore)
            write[places] = read
            self._launched.append((mark, run))
            if first.is_restore and read != [move.name for move in run]:
                raise AssertionError("host tier: another prompt's KV came back")

    def take_landed(self) -> list[Move]:
        """Return the copies that have landed since the last time, and time the restoring ones."""
        landed: list[Move] = []
        while self._launched and self._launched[0][0].is_reached():
            mark, moves = self._launched.popleft()
            if moves[0].is_restore:
                self.pace.observe_restored(len(moves), mark.seconds)
                self.num_restored += len(moves)
            landed += moves
        return landed

    def copy(self, cache: KVCache, pages: slice, host_pages: slice, *, is_restore: bool) -> Mark:
        """Launch the copy of pages of all layers between the engine's pool and host memory."""
        host, layer = self.blocks[host_pages], 0
        pairs = []
        for block in cache.blocks(pages):
            stop = layer + block.shape[1]
            pair = (block, host[:, layer:stop])
            pairs.append(pair[::-1] if is_restore else pair)
            layer = stop
        return self._lane.launch(pairs)

    def wait(self) -> None:
        """Wait until everything launched has landed, before the pool's memory is given back."""
        self._lane.wait()

    def follow(self, cache: KVCache, pages: slice, host_pages: slice, *, is_restore: bool) -> None:
        """Launch a copy on a rank that does as told; `await_copies` is told as well."""
        mark = self.copy(cache, pages, host_pages, is_restore=is_restore)
        self._launched.append((mark, []))

    def await_copies(self, number: int) -> None:
        """Let this rank's next forwards begin after copies that have landed on the first rank."""
        for _ in range(number):
            self._launched.popleft()[0].hold_back()

    # --- pages that pass through, from and to a third tier ----------------------------------------

    def memory_of(self, host_page: int) -> memoryview:
        """Return the bytes of a page."""
        return self.blocks[host_page].flatten().view(torch.uint8).numpy().data

    def hold(self, host_page: int) -> None:
        """Keep a page where it is until `let_go`."""
        self._held.add(host_page)

    def let_go(self, host_page: int) -> None:
        """End `hold` or `borrow`; a page without a name is free."""
        self._held.discard(host_page)
        if host_page not in self._name_of:
            self._dirty.add(host_page)
            self._free.append(host_page)

    def borrow(self) -> int | None:
        """Return a page, held and unnamed, that no copy reads or writes; None if there is none."""
        host_page = self._room(frozenset(), is_quiet=True)
        if host_page is not None:
            self._held.add(host_page)
            self.tags[host_page] = None
        return host_page

    def adopt(self, name: bytes, host_page: int) -> None:
        """Name a borrowed page after what was written into it, and let it go."""
        if name not in self._page_of:
            self.tags[host_page] = name
            self._add(name, host_page)
        self.let_go(host_page)

    # --- inside -----------------------------------------------------------------------------------

    def _queue(self, move: Move) -> None:
        self._moves.append(move)
        self._copies[move.page] += 1
        self._host_copies[move.host_page] += 1

    def _add(self, name: bytes, host_page: int) -> int:
        self._page_of[name] = host_page
        self._name_of[host_page] = name
        return host_page

    def _room(self, wanted: frozenset[bytes] | set[bytes], *, is_quiet: bool = False) -> int | None:
        """Take a free page, or else that of the least recently used name, unless it is wanted."""
        # What leaves the pool comes tail first and takes free pages from the end, what is borrowed
        # comes head first and takes them from the beginning: neighbours stay neighbours.
        take, put_back = self._free.pop, self._free.appendleft
        if is_quiet:
            take, put_back = self._free.popleft, self._free.append
        for _ in range(len(self._free)):
            host_page = take()
            if not (is_quiet and host_page in self._host_copies):
                return host_page
            put_back(host_page)
        for name, host_page in self._page_of.items():
            if name in wanted:
                return None
            if host_page in self._held or (is_quiet and host_page in self._host_copies):
                continue
            del self._page_of[name], self._name_of[host_page]
            return host_page
        return None


class _Counts(Counter[int]):
    """How often each number was added and not dropped."""

    def drop(self, number: int) -> None:
        if left := self.pop(number) - 1:
            self[number] = left


class RestorePace:
    """Running means of the measured seconds per page: of copying it back, and of computing it."""

    def __init__(self, computing: RunningMean | None = None) -> None:
        self.computing = computing or RunningMean(_WEIGHT)  # shared by host memory and disk
        self._restoring = RunningMean(_WEIGHT)

    def observe_restored(self, num_pages: float, seconds: float) -> None:
        """Record the seconds in which pages were copied back."""
        self._restoring.add(seconds / num_pages)

    def observe_computed(self, num_pages: float, seconds: float) -> None:
        """Record the seconds of a forward of prefill rows alone, and the pages it computed."""
        self.computing.add(seconds / num_pages)

    def fade(self) -> None:
        """Lower the restoring estimate after a page was computed, so that it is tried again."""
        if self._restoring.value is not None:
            self._restoring.value *= _FADE

    @property
    def is_restoring_faster(self) -> bool:
        """Whether restoring was measured to be faster, or one of the two is not measured yet."""
        restoring, computing = self._restoring.value, self.computing.value
        return restoring is None or computing is None or restoring < computing


def _join(moves: Sequence[Move]) -> Iterator[list[Move]]:
    """Join moves whose pages are neighbours in both tiers; yield them, the lowest page first."""
    # Prompts come back head first and leave tail first: neighbours follow in either direction.
    run: list[Move] = []
    step = 0
    for move in moves:
        if run and move.is_restore == run[0].is_restore:
            apart = (move.page - run[-1].page, move.host_page - run[-1].host_page)
            if apart in ((1, 1), (-1, -1)) and step in (0, apart[0]):
                run.append(move)
                step = apart[0]
                continue
        if run:
            yield run[::-1] if step < 0 else run
        run, step = [move], 0
    if run:
        yield run[::-1] if step < 0 else run

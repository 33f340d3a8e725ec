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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

import numpy as np
import torch

from rapid.engines.kv_cache import KVCache, KVLayout, PagePool, Run
from rapid.messages import Int32Array
from rapid.ports import Clock

Pages = np.ndarray[tuple[int], np.dtype[np.intp]]
Tags = list[bytes | None]
_NAME_BYTES = 16
_WEIGHT = 0.25  # of the latest measurement in a running mean
_FADE = 0.999  # of an estimate, with every page that is not restored because of it
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


@dataclass(frozen=True, slots=True)
class Move:
    """A page to copy between the engine's pool and the host's: out, or back if it `is_restore`."""

    name: bytes
    page: int
    host_page: int
    is_restore: bool


class HostTier:
    """Pages that had to leave the engine's pool, in host memory; used longest ago goes first.

    Guarded like `PrefixCache`, but for `make`, which runs where forwards run: between two of them,
    so that a page is copied out before whoever got it writes into it.
    """

    def __init__(self, layout: KVLayout, num_pages: int, page_tokens: int) -> None:
        host = replace(layout, devices=(torch.device("cpu"),) * len(layout.devices))
        self._tensors = KVCache(host, num_pages, page_tokens)
        self._tags: Tags = [None] * num_pages
        self._page_tokens = page_tokens
        self._num_pages = num_pages
        self._page_of: OrderedDict[bytes, int] = OrderedDict()
        self._free = list(range(num_pages))
        self._moves: list[Move] = []
        self._wanted: set[bytes] = set()
        self.pace = RestorePace()

    def want(self, names: Sequence[bytes]) -> None:
        """These are about to be restored: what makes room for them does not push them out."""
        self._wanted = set(names)
        for name in reversed(names):
            if name in self._page_of:
                self._page_of.move_to_end(name)

    def forget(self) -> None:
        """Copies failed: nobody knows what is here."""
        self._page_of.clear()
        self._moves.clear()
        self._free = list(range(self._num_pages))

    def keep(self, name: bytes, page: int) -> None:
        """Copy a page out that leaves the engine's pool, if there is room for it."""
        if name in self._page_of:
            self._page_of.move_to_end(name)
            return
        if not self._free and next(iter(self._page_of)) in self._wanted:
            return
        host_page = self._free.pop() if self._free else self._page_of.popitem(last=False)[1]
        self._page_of[name] = host_page
        self._moves.append(Move(name, page, host_page, is_restore=False))

    def restore(self, name: bytes, page: int) -> None:
        """Copy a page back into the engine's pool if it is here and that is worth it."""
        host_page = self._page_of.get(name)
        if host_page is None:
            return
        if self.pace.is_restoring_faster:
            self._page_of.move_to_end(name)
            self._moves.append(Move(name, page, host_page, is_restore=True))
        else:
            self.pace.fade()

    @property
    def has_moves(self) -> bool:
        """Whether anything is due."""
        return bool(self._moves)

    def take_moves(self) -> list[Move]:
        """What is due, in order."""
        moves, self._moves = self._moves, []
        return moves

    def make(self, moves: Sequence[Move], cache: KVCache, tags: Tags, now: Clock) -> None:
        """Copy, a run of neighbouring pages at a time; restoring is timed by `now`, in seconds.

        Args:
            tags: of the pages of `cache`; they are copied as well.

        Raises:
            AssertionError: what came back is not what was asked for.
        """
        for move, length in _joined(moves):
            began = now() if move.is_restore else 0.0
            ours = slice(move.page, move.page + length)
            theirs = slice(move.host_page, move.host_page + length)
            if move.is_restore:
                tags[ours] = [None] * length  # until all layers are there
                self._copy(self._tensors, theirs, cache, ours)
                tags[ours] = self._tags[theirs]
                self.pace.observe_restored(length, now() - began)
            else:
                self._tags[theirs] = [None] * length
                self._copy(cache, ours, self._tensors, theirs)
                self._tags[theirs] = tags[ours]
        if any(move.is_restore and tags[move.page] != move.name for move in moves):
            raise AssertionError("host tier: another prompt's KV came back")

    def _copy(self, source: KVCache, pages: slice, destination: KVCache, places: slice) -> None:
        read, write = self._slots(pages), self._slots(places)
        for source_layer, destination_layer in zip(source.layers, destination.layers, strict=True):
            for old, new in zip(source_layer, destination_layer, strict=True):
                new[:, write].copy_(old[:, read])

    def _slots(self, pages: slice) -> slice:
        return slice(pages.start * self._page_tokens, pages.stop * self._page_tokens)


class RestorePace:
    """Seconds per page of restoring and of computing, as running means of what was measured."""

    def __init__(self) -> None:
        self._restoring: float | None = None
        self._computing: float | None = None

    def observe_restored(self, num_pages: float, seconds: float) -> None:
        """Pages were copied back."""
        self._restoring = _running_mean(self._restoring, seconds / num_pages)

    def observe_computed(self, num_pages: float, seconds: float) -> None:
        """A forward computed nothing but rows of prompts."""
        self._computing = _running_mean(self._computing, seconds / num_pages)

    def fade(self) -> None:
        """A page was computed because restoring is slow: in the end it is tried again."""
        if self._restoring is not None:
            self._restoring *= _FADE

    @property
    def is_restoring_faster(self) -> bool:
        """Or not known to be slower."""
        known = self._restoring is not None and self._computing is not None
        return not known or self._restoring < self._computing  # type: ignore[operator]


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


def _joined(moves: Sequence[Move]) -> Iterator[tuple[Move, int]]:
    """Moves in order, neighbours on both sides as one: the lowest of them and how many they are.

    Prompts come back head first and leave tail first, so neighbours may follow either way.
    """
    first, length = None, 0
    for move in moves:
        if first is not None and move.is_restore == first.is_restore:
            apart = (move.page - first.page, move.host_page - first.host_page)
            if apart in ((length, length), (-1, -1)):
                first = move if apart == (-1, -1) else first
                length += 1
                continue
        if first is not None:
            yield first, length
        first, length = move, 1
    if first is not None:
        yield first, length


def _running_mean(mean: float | None, value: float) -> float:
    return value if mean is None else mean + _WEIGHT * (value - mean)

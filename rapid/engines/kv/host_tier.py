"""Second cache tier: KV pages in host memory, and the copies to and from the engine's pool."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from rapid.engines.kv.cache import KVCache, KVLayout
from rapid.estimators import RunningMean
from rapid.ports import Clock

Tags = list[bytes | None]

_WEIGHT = 0.25  # weight of the latest measurement in a running mean
_FADE = 0.999  # factor on the restoring estimate with every page not restored because of it


@dataclass(frozen=True, slots=True)
class Move:
    """Copy of one page between the engine's pool and host memory.

    Attributes:
        name: Name of the page's content (see `rapid.engines.kv.prefix_cache`).
        page: Page in the engine's pool.
        host_page: Page in host memory.
        is_restore: Whether the page is copied back into the pool instead of out of it.
    """

    name: bytes
    page: int
    host_page: int
    is_restore: bool


class HostTier:
    """Least-recently-used cache, in host memory, of pages evicted from the engine's pool.

    Like those of `PrefixCache`, its methods are called with the engine's lock held, except for
    `make`, which runs on the compute thread between two forwards, so that a page is copied out
    before its next holder writes into it.

    Attributes:
        pace: Measured pace of restoring and of computing pages.
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
        """Protect pages about to be restored from the evictions that make room for them."""
        self._wanted = set(names)
        for name in reversed(names):
            if name in self._page_of:
                self._page_of.move_to_end(name)

    def forget(self) -> None:
        """Drop all pages and queued copies, after a failed copy left the content unknown."""
        self._page_of.clear()
        self._moves.clear()
        self._free = list(range(self._num_pages))

    def keep(self, name: bytes, page: int) -> None:
        """Queue the copy of a page that leaves the engine's pool, if there is room for it.

        Pages named in the last `want` are not evicted for it.
        """
        if name in self._page_of:
            self._page_of.move_to_end(name)
            return
        if not self._free and next(iter(self._page_of)) in self._wanted:
            return
        host_page = self._free.pop() if self._free else self._page_of.popitem(last=False)[1]
        self._page_of[name] = host_page
        self._moves.append(Move(name, page, host_page, is_restore=False))

    def restore(self, name: bytes, page: int) -> None:
        """Queue the copy of a page into the engine's pool, if it is held and copying is faster.

        See `RestorePace.is_restoring_faster`.
        """
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
        """Whether copies are due."""
        return bool(self._moves)

    def take_moves(self) -> list[Move]:
        """Return the copies that are due, in order, and clear them."""
        moves, self._moves = self._moves, []
        return moves

    def make(self, moves: Sequence[Move], cache: KVCache, tags: Tags, now: Clock) -> None:
        """Make copies, one run of neighbouring pages at a time, and time the restoring ones.

        Args:
            moves: The copies, in order.
            cache: The engine's KV tensors.
            tags: Tags of the pages of `cache`; they are copied along with the pages.
            now: Clock in seconds.

        Raises:
            AssertionError: A restored page does not hold the KV that its move names.
        """
        for move, length in _joined(moves):
            began = now() if move.is_restore else 0.0
            ours = slice(move.page, move.page + length)
            theirs = slice(move.host_page, move.host_page + length)
            if move.is_restore:
                tags[ours] = [None] * length  # until all layers are copied
                self.copy(cache, ours, theirs, is_restore=True)
                tags[ours] = self._tags[theirs]
                self.pace.observe_restored(length, now() - began)
            else:
                self._tags[theirs] = [None] * length
                self.copy(cache, ours, theirs, is_restore=False)
                self._tags[theirs] = tags[ours]
        if any(move.is_restore and tags[move.page] != move.name for move in moves):
            raise AssertionError("host tier: another prompt's KV came back")

    def copy(self, cache: KVCache, pages: slice, host_pages: slice, *, is_restore: bool) -> None:
        """Copy pages of all layers between the engine's pool and host memory."""
        if is_restore:
            self._copy(self._tensors, host_pages, cache, pages)
        else:
            self._copy(cache, pages, self._tensors, host_pages)

    def _copy(self, source: KVCache, pages: slice, destination: KVCache, places: slice) -> None:
        read, write = self._slots(pages), self._slots(places)
        for source_layer, destination_layer in zip(source.layers, destination.layers, strict=True):
            for old, new in zip(source_layer, destination_layer, strict=True):
                new[:, write].copy_(old[:, read])

    def _slots(self, pages: slice) -> slice:
        return slice(pages.start * self._page_tokens, pages.stop * self._page_tokens)


class RestorePace:
    """Running means of the measured seconds per page of restoring and of computing."""

    def __init__(self) -> None:
        self._restoring = RunningMean(_WEIGHT)
        self._computing = RunningMean(_WEIGHT)

    def observe_restored(self, num_pages: float, seconds: float) -> None:
        """Record the seconds in which pages were copied back."""
        self._restoring.add(seconds / num_pages)

    def observe_computed(self, num_pages: float, seconds: float) -> None:
        """Record the seconds of a forward of prefill rows alone, and the pages it computed."""
        self._computing.add(seconds / num_pages)

    def fade(self) -> None:
        """Lower the restoring estimate after a page was computed, so that it is tried again."""
        if self._restoring.value is not None:
            self._restoring.value *= _FADE

    @property
    def is_restoring_faster(self) -> bool:
        """Whether restoring was measured to be faster, or one of the two is not measured yet."""
        restoring, computing = self._restoring.value, self._computing.value
        return restoring is None or computing is None or restoring < computing


def _joined(moves: Sequence[Move]) -> Iterator[tuple[Move, int]]:
    """Join moves whose pages are neighbours in both tiers; yield the lowest one and the number.

    Prompts come back head first and leave tail first, so neighbours may follow in either direction.
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

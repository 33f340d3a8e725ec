"""Pages in host memory, and the copies between it and the engine's pool."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from rapid.engines.kv.cache import KVCache, KVLayout
from rapid.ports import Clock

Tags = list[bytes | None]


_WEIGHT = 0.25  # of the latest measurement in a running mean


_FADE = 0.999  # of an estimate, with every page that is not restored because of it


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

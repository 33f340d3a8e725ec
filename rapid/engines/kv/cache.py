"""Pages of KV: who holds which, and the tensors they lie in.

A page is `page_tokens` consecutive slots. A sequence's pages come in **runs** of consecutive pages,
so that its keys are a few strided views of one tensor and attention reads them where they are: no
gather, no copy. Pages of a common prompt are held by several sequences and counted. Taking tokens
back never touches a page: a sequence simply does not count them as computed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from rapid.errors import RapidError


class OutOfPages(RapidError):
    """Internal: the pool holds fewer free pages than asked; callers ask `num_free` first."""


@dataclass(frozen=True, slots=True, order=True)
class Run:
    """Consecutive pages [start, stop)."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def pages(self) -> range:
        """One by one."""
        return range(self.start, self.stop)


class PagePool:
    """The ledger of pages: every page is free or has a number of holders.

    `allocate` makes the caller the only holder, `share` adds a holder, `free` drops one; a page
    whose last holder has dropped it is free again.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = [Run(0, num_pages)]  # by start, never adjacent to each other
        self._num_holders = np.zeros(num_pages, dtype=np.int32)
        self._num_free = num_pages

    @property
    def num_free(self) -> int:
        """Pages nobody holds."""
        return self._num_free

    @property
    def num_free_together(self) -> int:
        """Pages of the longest free run."""
        return max(map(len, self._free), default=0)

    @property
    def num_holders(self) -> npt.NDArray[np.int32]:
        """Of every page; not to be written to."""
        return self._num_holders

    @property
    def num_in_use(self) -> int:
        """Pages with at least one holder."""
        return self.num_pages - self._num_free

    def allocate(self, num_pages: int) -> tuple[Run, ...]:
        """Take pages, as the tightest single run that holds them, else as few runs as possible."""
        if num_pages > self._num_free:
            raise OutOfPages(f"{num_pages} pages asked, {self._num_free} free")
        by_length = sorted(self._free, key=len)
        taken: list[Run] = []
        rests: dict[Run, Run] = {}
        missing = num_pages
        while missing:
            index = min(bisect_left(by_length, missing, key=len), len(by_length) - 1)
            source = by_length.pop(index)
            run = Run(source.start, min(source.stop, source.start + missing))
            rests[source] = Run(run.stop, source.stop)
            taken.append(run)
            missing -= len(run)
        self._free = [rest for run in self._free if (rest := rests.get(run, run))]
        for run in taken:
            self._num_holders[run.start : run.stop] = 1
        self._num_free -= num_pages
        return tuple(sorted(taken))

    def share(self, runs: Iterable[Run]) -> None:
        """Add a holder to pages in use."""
        for run in runs:
            self._num_holders[run.start : run.stop] += 1

    def free(self, runs: Iterable[Run]) -> None:
        """Drop a holder."""
        for run in runs:
            holders = self._num_holders[run.start : run.stop]
            holders -= 1
            for start, stop in _ranges(holders == 0):
                self._return(Run(run.start + start, run.start + stop))

    def check_integrity(self, held: Iterable[Iterable[Run]] | None = None) -> None:
        """Raise unless free plus in use is the total and counts are those of `held`, if given."""
        free = np.zeros(self.num_pages, dtype=bool)
        for run in self._free:
            _require(len(run) > 0 and not free[run.start : run.stop].any(), "free runs overlap")
            free[run.start : run.stop] = True
        _require(int(free.sum()) == self._num_free, "the count of free pages is wrong")
        _require(bool((free == (self._num_holders == 0)).all()), "a page is neither free nor held")
        _require(all(a.stop < b.start for a, b in zip(self._free, self._free[1:], strict=False)),
                 "adjacent free runs")  # fmt: skip
        if held is not None:
            counted = np.zeros(self.num_pages, dtype=np.int32)
            for runs in held:
                for run in runs:
                    counted[run.start : run.stop] += 1
            _require(bool((counted == self._num_holders).all()), "holders and counts differ")

    def _return(self, run: Run) -> None:
        index = bisect_left(self._free, run)
        start, stop, first, last = run.start, run.stop, index, index
        if index and self._free[index - 1].stop == start:
            start, first = self._free[index - 1].start, index - 1
        if index < len(self._free) and self._free[index].start == stop:
            stop, last = self._free[index].stop, index + 1
        self._free[first:last] = [Run(start, stop)]
        self._num_free += len(run)


def _ranges(mask: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate(([0], mask.astype(np.int8), [0]))))
    return [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise AssertionError(f"KV ledger: {what}")


class PageTable:
    """Where the tokens of one sequence lie, in its own order of pages."""

    def __init__(self, runs: Iterable[Run], page_tokens: int) -> None:
        joined: list[Run] = []
        for run in runs:
            if joined and joined[-1].stop == run.start:
                joined[-1] = Run(joined[-1].start, run.stop)
            else:
                joined.append(run)
        self.runs = tuple(joined)
        self.num_tokens = sum(map(len, joined)) * page_tokens
        self._page_tokens = page_tokens

    def spans(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Slot ranges of the tokens at positions [start, stop), in order."""
        spans = []
        offset = 0
        for run in self.runs:
            first, length = run.start * self._page_tokens, len(run) * self._page_tokens
            low, high = max(start - offset, 0), min(stop - offset, length)
            if low < high:
                spans.append((first + low, first + high))
            offset += length
        return spans


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of a model's keys and values, with the device each layer's attention runs on."""

    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    devices: tuple[torch.device, ...]

    @property
    def bytes_per_token(self) -> int:
        """Keys and values of one token over all layers."""
        return 2 * len(self.devices) * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class KVCache:
    """Keys and values of all slots; per layer [kv_heads, num_slots, head_dim].

    With the slots in the middle a run of pages is a plain slice of every head.
    """

    def __init__(self, layout: KVLayout, num_pages: int, page_tokens: int) -> None:
        shape = (layout.num_kv_heads, num_pages * page_tokens, layout.head_dim)
        self.layers = [
            (
                torch.empty(shape, dtype=layout.dtype, device=device),
                torch.empty(shape, dtype=layout.dtype, device=device),
            )
            for device in layout.devices
        ]

    def copy(
        self, sources: Sequence[tuple[int, int]], destinations: Sequence[tuple[int, int]]
    ) -> None:
        """Copy slots, as many as `sources` covers, into the leading slots of `destinations`."""
        read = [slot for span in sources for slot in range(*span)]
        write = [slot for span in destinations for slot in range(*span)][: len(read)]
        for layer in self.layers:
            for tensor in layer:
                tensor[:, write] = tensor[:, read]

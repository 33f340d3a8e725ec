"""The KV cache: tensors of slots, and the pool of pages.

A page is `page_tokens` consecutive slots. A sequence's pages come in **runs** of consecutive pages,
so that attention reads its keys in place, as few strided views of one tensor. Discarding tokens
touches no page: the sequence stops counting them as computed.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

import numpy as np
import torch

from rapid.engines.kv.fp8 import FP8, from_fp8, to_fp8
from rapid.errors import RapidError

BlockArray = np.ndarray[tuple[int, ...], np.dtype[np.int32]]
Pages = np.ndarray[tuple[int], np.dtype[np.intp]]


class OutOfPages(RapidError):
    """Internal error: fewer pages are free than requested; callers check `num_free` first."""


@dataclass(frozen=True, slots=True, order=True)
class PageRun:
    """Consecutive pages [start, stop)."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def pages(self) -> range:
        """The page numbers, in order."""
        return range(self.start, self.stop)


class PagePool:
    """Reference-counted ledger of pages: every page is free or has a number of holders."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = [PageRun(0, num_pages)]  # by start, never adjacent to each other
        self.num_holders = np.zeros(num_pages, dtype=np.int32)  # of every page; for reading only
        self.is_dirty = np.zeros(num_pages, dtype=bool)  # whether it had a holder since it was zero
        self.is_stale = np.zeros(num_pages, dtype=bool)  # whether it had one before those of now
        self.num_free = num_pages  # pages without a holder

    @property
    def num_free_together(self) -> int:
        """Number of pages in the longest free run."""
        return max(map(len, self._free), default=0)

    @property
    def num_in_use(self) -> int:
        """Number of pages with at least one holder."""
        return self.num_pages - self.num_free

    def allocate(self, num_pages: int) -> tuple[PageRun, ...]:
        """Take pages from the tightest free run that fits, else few runs, or raise OutOfPages."""
        if num_pages > self.num_free:
            raise OutOfPages(f"{num_pages} pages asked, {self.num_free} free")
        by_length = sorted(self._free, key=len)
        taken: list[PageRun] = []
        rests: dict[PageRun, PageRun] = {}
        missing = num_pages
        while missing:
            index = min(bisect_left(by_length, missing, key=len), len(by_length) - 1)
            source = by_length.pop(index)
            run = PageRun(source.start, min(source.stop, source.start + missing))
            rests[source] = PageRun(run.stop, source.stop)
            taken.append(run)
            missing -= len(run)
        self._free = [rest for run in self._free if (rest := rests.get(run, run))]
        for run in taken:
            self.num_holders[run.start : run.stop] = 1
            self.is_stale[run.start : run.stop] = self.is_dirty[run.start : run.stop]
            self.is_dirty[run.start : run.stop] = True
        self.num_free -= num_pages
        return tuple(sorted(taken))

    def share(self, runs: Iterable[PageRun]) -> None:
        """Add a holder to each page of runs that are in use."""
        for run in runs:
            self.num_holders[run.start : run.stop] += 1

    def free(self, runs: Iterable[PageRun]) -> None:
        """Drop a holder of each page; pages without a holder become free."""
        for run in runs:
            holders = self.num_holders[run.start : run.stop]
            holders -= 1
            for start, stop in _ranges(holders == 0):
                self._return(PageRun(run.start + start, run.start + stop))

    def take_dirty(self) -> list[int]:
        """Return the free pages that may hold numbers; they count as zero from now on."""
        pages: list[int] = np.flatnonzero(self.is_dirty & (self.num_holders == 0)).tolist()
        self.is_dirty[pages] = False
        return pages

    def check_integrity(self, held: Iterable[Iterable[PageRun]] | None = None) -> None:
        """Raise AssertionError unless every page is free or held, as often as `held` says."""
        free = np.zeros(self.num_pages, dtype=bool)
        for run in self._free:
            _require(len(run) > 0 and not free[run.start : run.stop].any(), "free runs overlap")
            free[run.start : run.stop] = True
        _require(int(free.sum()) == self.num_free, "the count of free pages is wrong")
        _require(bool((free == (self.num_holders == 0)).all()), "a page is neither free nor held")
        _require(all(a.stop < b.start for a, b in zip(self._free, self._free[1:], strict=False)),
                 "adjacent free runs")  # fmt: skip
        if held is not None:
            counted = np.zeros(self.num_pages, dtype=np.int32)
            for runs in held:
                for run in runs:
                    counted[run.start : run.stop] += 1
            _require(bool((counted == self.num_holders).all()), "holders and counts differ")

    def _return(self, run: PageRun) -> None:
        index = bisect_left(self._free, run)
        start, stop, first, last = run.start, run.stop, index, index
        if index and self._free[index - 1].stop == start:
            start, first = self._free[index - 1].start, index - 1
        if index < len(self._free) and self._free[index].start == stop:
            stop, last = self._free[index].stop, index + 1
        self._free[first:last] = [PageRun(start, stop)]
        self.num_free += len(run)


def _ranges(mask: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate(([0], mask.astype(np.int8), [0]))))
    return [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise AssertionError(f"KV ledger: {what}")


def blocks_of(spans: Iterable[tuple[int, int]], position: int, size: int) -> BlockArray:
    """Return the blocks of at most `size` tokens of spans whose first is at a position.

    They are [blocks, 3], int32: first slot, position of the first token, and tokens.
    """
    parts = [np.zeros((0, 3), dtype=np.int32)]
    for start, stop in spans:
        slots = np.arange(start, stop, size, dtype=np.int32)
        tokens = np.minimum(stop - slots, size)
        parts.append(np.stack([slots, slots + (position - start), tokens], axis=1))
        position += stop - start
    return np.concatenate(parts)


class PageTable:
    """Map from the token positions of one sequence to slots of the KV tensors, which stays."""

    def __init__(self, runs: Iterable[PageRun], page_tokens: int) -> None:
        joined: list[PageRun] = []
        for run in runs:
            if joined and joined[-1].stop == run.start:
                joined[-1] = PageRun(joined[-1].start, run.stop)
            else:
                joined.append(run)
        self.runs = tuple(joined)  # in the sequence's order, adjacent ones joined
        self.num_tokens = sum(map(len, joined)) * page_tokens
        self._spans = [(run.start * page_tokens, run.stop * page_tokens) for run in joined]
        self._ends = [*accumulate(stop - start for start, stop in self._spans)]
        self._blocks: dict[int, BlockArray] = {}  # all of them, by their size

    def spans(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the slot ranges [a, b) of the tokens at positions [start, stop), in order."""
        stop = min(stop, self.num_tokens)
        if start >= stop:
            return []
        first, last = bisect_right(self._ends, start), bisect_left(self._ends, stop)
        spans = self._spans[first : last + 1]
        spans[-1] = spans[-1][0], spans[-1][1] - self._ends[last] + stop
        spans[0] = self._spans[first][1] - self._ends[first] + start, spans[0][1]
        return spans

    def blocks(self, start: int, stop: int, size: int) -> BlockArray:
        """Return the `blocks_of` the tokens at positions [start, stop).

        Those of all tokens are made at the first call; later calls cut from them what they need.
        """
        if size not in self._blocks:
            self._blocks[size] = blocks_of(self._spans, 0, size)
        whole = self._blocks[size]
        begun: BlockArray | None = None
        if start and (run := bisect_right(self._ends, start)) < len(self._ends):
            # In the run where they start, blocks begin elsewhere than those of the whole run.
            end = min(stop, self._ends[run])
            begun = blocks_of(self.spans(start, end), start, size)
            start = end
        first, last = whole[:, 1].searchsorted((start, stop))
        rest = whole[first:last].copy()
        if len(rest):
            rest[-1, 2] = min(rest[-1, 2], stop - rest[-1, 1])
        return rest if begun is None else np.concatenate([begun, rest])


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape and dtype of a model's keys and values, and the device of each layer's attention."""

    num_kv_heads: int  # heads of keys and values
    head_dim: int
    dtype: torch.dtype
    devices: tuple[torch.device, ...]  # device of each layer
    # Whether they are kept in fp8 (see `rapid.engines.kv.fp8`) instead of in `dtype`.
    is_fp8: bool = False
    # Last tokens that rows of sliding layers attend to; None without such layers.
    window: int | None = None
    sliding: tuple[bool, ...] = ()  # whether each layer slides; empty where none does

    @property
    def kept_dtype(self) -> torch.dtype:
        """Dtype that keys and values are kept in."""
        return FP8 if self.is_fp8 else self.dtype

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values over all layers."""
        return 2 * len(self.devices) * self.num_kv_heads * self.head_dim * self.kept_dtype.itemsize

    def num_bytes(self, num_slots: int, num_ring_slots: int = 0) -> int:
        """Return the bytes of a cache of so many slots of pages and, if any, of rings."""
        per_layer = self.bytes_per_token // max(len(self.devices), 1)
        in_rings = sum(self.sliding) if num_ring_slots else 0
        in_pages = len(self.devices) - in_rings
        return per_layer * (in_pages * num_slots + in_rings * num_ring_slots)


class KVCache:
    """Key and value tensors of all slots.

    With the slots in the middle dimension, a run of pages is a plain slice of every head. Sliding
    layers have slots of pages like the others, or slots of rings (`rapid.engines.kv.rings`).
    """

    def __init__(
        self,
        layout: KVLayout,
        num_pages: int,
        page_tokens: int,
        centres: Sequence[torch.Tensor | None] = (),
        num_ring_slots: int = 0,
    ) -> None:
        self.layout = layout
        self.page_tokens = page_tokens
        # What is subtracted from keys in fp8, [kv_heads, head_dim] or None, by layer.
        self.centres = list(centres) or [None] * len(layout.devices)
        self.num_slots = num_pages * page_tokens
        self.num_ring_slots = (
            num_ring_slots  # of rings and kept windows; 0 if all layers have pages
        )
        all_pages = (False,) * len(layout.devices)
        self.in_rings = layout.sliding if num_ring_slots else all_pages
        # Neighbouring layers on one device with the same slots, each
        # [layers, 2, kv_heads, slots, head_dim]; and keys and values by layer.
        self.stacks = []
        for (device, in_rings), group in groupby(zip(layout.devices, self.in_rings, strict=True)):
            num_slots = num_ring_slots if in_rings else self.num_slots
            shape = (len(list(group)), 2, layout.num_kv_heads, num_slots, layout.head_dim)
            self.stacks.append(torch.empty(shape, dtype=layout.kept_dtype, device=device))
        self.layers = [(layer[0], layer[1]) for stack in self.stacks for layer in stack]

    @property
    def longest(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the first layer of those with the most slots."""
        return max(self.layers, key=lambda layer: layer[0].shape[1])

    def store(
        self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys and values of rows, and return them as they will be read.

        Both are [1, kv_heads, rows, head_dim]; `slots` are int64 [rows].
        """
        keys, values = self.layers[layer]
        if not self.layout.is_fp8:
            keys.index_copy_(1, slots, key[0])
            values.index_copy_(1, slots, value[0])
            return key, value
        centre = self.centres[layer]
        if centre is not None:
            key = key - centre[:, None]
        for tensor, rows in ((keys, key), (values, value)):
            # Torch copies the rows of bytes, but not of fp8.
            tensor.view(torch.uint8).index_copy_(1, slots, to_fp8(rows)[0].view(torch.uint8))
        return self.as_read(key), self.as_read(value)

    def as_read(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return what numbers become when they are kept and read again."""
        return from_fp8(to_fp8(numbers), numbers.dtype) if self.layout.is_fp8 else numbers

    def blocks(self, pages: slice) -> list[torch.Tensor]:
        """Return pages as views of stacks [pages, layers, 2, kv_heads, page_tokens, head_dim]."""
        slots = slice(pages.start * self.page_tokens, pages.stop * self.page_tokens)
        size = (pages.stop - pages.start, self.page_tokens)
        return [
            torch.unflatten(stack[:, :, :, slots], 3, size).permute(3, 0, 1, 2, 4, 5)
            for stack in self.stacks
        ]

    def zero(self, spans: Sequence[tuple[int, int]], *, of_rings: bool = False) -> None:
        """Overwrite slots [a, b) with zeros, of layers with rings if `of_rings`, else of others."""
        for layer, in_rings in zip(self.layers, self.in_rings, strict=True):
            for tensor in layer if in_rings == of_rings else ():
                numbers = tensor.view(torch.uint8) if self.layout.is_fp8 else tensor
                for start, stop in spans:
                    numbers[:, start:stop].zero_()

    def copy(
        self,
        sources: Sequence[tuple[int, int]],
        destinations: Sequence[tuple[int, int]],
        *,
        of_rings: bool = False,
    ) -> None:
        """Copy the slots of `sources` into the leading slots of `destinations`.

        It copies in all layers that have rings if `of_rings`, else in all others.
        """
        read = [slot for span in sources for slot in range(*span)]
        write = [slot for span in destinations for slot in range(*span)][: len(read)]
        places: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}
        for layer, in_rings in zip(self.layers, self.in_rings, strict=True):
            for tensor in layer if in_rings == of_rings else ():
                if tensor.device not in places:
                    places[tensor.device] = (
                        torch.tensor(read, device=tensor.device, dtype=torch.int64),
                        torch.tensor(write, device=tensor.device, dtype=torch.int64),
                    )
                source, destination = places[tensor.device]
                numbers = tensor.view(torch.uint8) if self.layout.is_fp8 else tensor
                numbers.index_copy_(1, destination, numbers.index_select(1, source))


def as_runs(pages: Iterable[int]) -> tuple[PageRun, ...]:
    """Return pages as runs in the same order, with consecutive ones joined."""
    each = np.fromiter(pages, dtype=np.intp)
    if not len(each):
        return ()
    first = np.flatnonzero(np.diff(each, prepend=each[0] - 2) != 1)  # of every run
    last = np.append(first[1:], len(each)) - 1
    return tuple(map(PageRun, each[first].tolist(), (each[last] + 1).tolist()))


def pages_of(runs: Iterable[PageRun], num_pages: int) -> Pages:
    """Return the first `num_pages` pages of some runs, one by one."""
    pages = [np.asarray(run.pages) for run in runs]
    return np.concatenate([*pages, np.empty(0, dtype=np.intp)])[:num_pages].astype(np.intp)

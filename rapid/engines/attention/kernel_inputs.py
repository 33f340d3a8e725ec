"""Inputs of the attention kernels: the rows of a forward, and the tensors of one layer."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Protocol, TypeVar, cast

import torch

from rapid.engines.attention.segments import Partial, Segment, Spans
from rapid.engines.attention.shared_prefixes import SharedPrefix, find_shared_prefixes
from rapid.engines.attention.windows import within
from rapid.engines.kv.cache import KVCache
from rapid.engines.kv.fp8 import FP8, from_fp8, numbers_at_once

Made = TypeVar("Made")

_COPIED_BYTES = 2**18  # KV of a span below which a call for it alone takes longer than a copy
_MOST_COPIED_BYTES = 2**25  # KV that is copied at a time


class PartialKernel(Protocol):
    """Attention over some of the keys, as `rapid.engines.attention.ragged.partial` defines it."""

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        *,
        is_causal: bool,
    ) -> Partial:
        """See `rapid.engines.attention.ragged.partial`."""


class Attend(Protocol):
    """Attention kernel for ragged rows whose keys and values are already in the cache."""

    def __call__(self, inputs: AttentionInputs) -> torch.Tensor:
        """Attend for all rows and return [1, rows, heads, head_dim]."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """The attention kernels of an engine."""

    steps: Attend  # kernel for sequences of at most `MAX_STEP_ROWS` rows
    chunks: Attend  # kernel for sequences with more rows
    # Kernel for steps inside a captured graph, which may read nothing from the host; None where
    # there is none.
    captured: Attend | None = None


@dataclass(slots=True)
class RaggedRows:
    """Rows of the sequences in a batch, with the cache slots that they read and write."""

    cache: KVCache
    segments: list[Segment]  # one per sequence, together covering all rows
    slots: torch.Tensor  # slot of the cache that each row's key and value go to, int64 [rows]
    # Attention kernels; None computes each run of keys with `partial`.
    kernels: Kernels | None = None
    # The same rows over the slots of the layers that have rings; None without such layers.
    rings: RaggedRows | None = None
    # Values computed once per batch and shared by its layers (see `once`).
    memo: dict[Hashable, object] = field(default_factory=dict)

    def of_layer(self, layer: int) -> RaggedRows:
        """Return the rows over the slots that a layer has."""
        if self.rings is not None and self.cache.in_rings[layer]:
            return self.rings
        return self

    def once(self, name: Hashable, make: Callable[[], Made]) -> Made:
        """Return the result of `make`, which is called once per name and shared by all layers."""
        if name not in self.memo:
            self.memo[name] = make()
        return cast(Made, self.memo[name])

    def slots_on(self, device: torch.device) -> torch.Tensor:
        """Return `slots` on the device of a layer."""
        if device == self.slots.device:
            return self.slots
        return self.once(("slots", device), lambda: self.slots.to(device))

    def single_spans(self) -> list[tuple[int, int]]:
        """Return each row's span if every sequence has one row and one run of keys, else `[]`."""
        return self.once("single spans", self._single_spans)

    def _single_spans(self) -> list[tuple[int, int]]:
        is_plain = all(one.stop - one.start == len(one.all_spans) == 1 for one in self.segments)
        return [one.all_spans[0] for one in self.segments] if is_plain else []

    def long_and_short(self, spans: Spans, most: int) -> tuple[Spans, torch.Tensor]:
        """Return the spans of more than `most` slots, and the slots of all others."""
        return self.once(("spans", tuple(spans), most), lambda: _long_and_short(spans, most))

    def prefixes(self) -> list[SharedPrefix]:
        """Return the prefixes that two or more of the sequences share."""
        return self.once("prefixes", lambda: find_shared_prefixes(self.segments))

    def within(self, window: int) -> RaggedRows:
        """Return the same rows, each with the last `window` keys up to itself."""
        return self.once(
            ("within", window),
            lambda: RaggedRows(self.cache, within(self.segments, window), self.slots, self.kernels),
        )

    def stretches(self) -> list[tuple[slice, RaggedRows]]:
        """Split the batch into neighbouring sequences that are all steps or all prefill chunks.

        Return for each part its rows in this batch and a `RaggedRows` of its own.
        """
        if len({segment.is_step for segment in self.segments}) == 1:
            return [(slice(None), self)]
        return self.once("stretches", self._split)

    def _split(self) -> list[tuple[slice, RaggedRows]]:
        found = []
        for _, group in groupby(self.segments, key=lambda segment: segment.is_step):
            alike = list(group)
            first, stop = alike[0].start, alike[-1].stop
            moved = [replace(one, start=one.start - first, stop=one.stop - first) for one in alike]
            part = RaggedRows(self.cache, moved, self.slots[first:stop], self.kernels)
            found.append((slice(first, stop), part))
        return found


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """Inputs of one layer's attention: the rows of a batch and the KV of all slots."""

    query: torch.Tensor  # queries of the rows, [1, heads, rows, head_dim]
    key: torch.Tensor  # keys of the rows, which `keys` holds as well, [1, kv_heads, rows, head_dim]
    value: torch.Tensor  # values of the rows, shaped as `key`
    keys: torch.Tensor  # keys of all slots, [kv_heads, slots, head_dim]
    values: torch.Tensor  # values of all slots, shaped as `keys`
    rows: RaggedRows  # the sequences of the rows and the slots that each attends to
    scale: float
    # Number of last keys, up to itself, that each row attends to; None for all.
    window: int | None = None
    # A logit of each head that its softmax counts beside the keys' scores, float32 [heads]; None
    # where there are none.
    sinks: torch.Tensor | None = None

    def read(self, spans: Sequence[tuple[int, int]]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the keys and values of spans of slots, [1, kv_heads, keys, head_dim].

        They are views of the cache, or, if that is in fp8, copies of a part of a span at a time.
        """
        num_kv_heads, _, head_dim = self.keys.shape
        for start, stop in spans:
            step = stop - start
            if self.keys.dtype == FP8:
                step = max(1, numbers_at_once(self.keys.device) // (num_kv_heads * head_dim))
            for first in range(start, stop, step):
                own = slice(first, min(first + step, stop))
                yield (
                    self._numbers(self.keys[None, :, own]),
                    self._numbers(self.values[None, :, own]),
                )

    def read_in_any_order(self, spans: Spans) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the keys and values of spans as `read` does, on a CPU short ones as one copy.

        So a sequence whose pages are strewn over a pool, as they are in one that has been full for
        long, needs a few calls of a kernel, not one for each page.
        """
        if len(spans) > 1 and self.keys.device.type == "cpu":
            num_kv_heads, _, head_dim = self.keys.shape
            slot_bytes = 2 * num_kv_heads * head_dim * self.query.element_size()
            spans, slots = self.rows.long_and_short(spans, _COPIED_BYTES // slot_bytes)
            most = max(1, _MOST_COPIED_BYTES // slot_bytes)
            for some in torch.split(slots, most) if len(slots) else ():
                yield self.gather(some)
        yield from self.read(spans)

    def gather(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of the keys and values of slots, [1, kv_heads, len(slots), head_dim]."""
        keys, values = (kept.index_select(1, slots)[None] for kept in (self.keys, self.values))
        return self._numbers(keys), self._numbers(values)

    def _numbers(self, kept: torch.Tensor) -> torch.Tensor:
        return from_fp8(kept, self.query.dtype) if kept.dtype == FP8 else kept

    def stretches(self) -> list[AttentionInputs]:
        """Split the inputs into steps and prefill chunks, as `RaggedRows.stretches` does."""
        stretches = self.rows.stretches()
        if len(stretches) == 1:
            return [self]
        return [
            replace(
                self,
                query=self.query[:, :, own],
                key=self.key[:, :, own],
                value=self.value[:, :, own],
                rows=rows,
            )
            for own, rows in stretches
        ]

    def share_with_sinks(self, part: Partial) -> torch.Tensor:
        """Return attention over all keys of some rows, less what the sinks take of the softmax."""
        output, lse = part
        if self.sinks is None:
            return output
        share = torch.sigmoid(lse.reshape(len(self.sinks), -1) - self.sinks[:, None])
        return output * share.reshape(*lse.shape, 1)

    def within_window(self) -> AttentionInputs:
        """Return the inputs with the keys outside of `window` taken out of `rows`."""
        if self.window is None:
            return self
        return replace(self, rows=self.rows.within(self.window), window=None)


def _long_and_short(spans: Spans, most: int) -> tuple[Spans, torch.Tensor]:
    short = [(start, stop) for start, stop in spans if stop - start <= most]
    if len(short) < 2:
        return spans, torch.empty(0, dtype=torch.int64)
    long = [(start, stop) for start, stop in spans if stop - start > most]
    return long, torch.cat([torch.arange(start, stop) for start, stop in short])

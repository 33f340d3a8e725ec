"""The rows of a forward, as every attention kernel receives them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from itertools import groupby
from typing import Protocol, TypeVar, cast

import torch

from rapid.engines.attention.segments import Partial, Segment
from rapid.engines.attention.shared_prefixes import SharedPrefix, shared_prefixes
from rapid.engines.kv.cache import KVCache

Made = TypeVar("Made")


class PartialKernel(Protocol):
    """Attention over some of the keys; the contract is that of `partial`."""

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        *,
        is_causal: bool,
    ) -> Partial:
        """See `partial`."""


class Attend(Protocol):
    """Attention of ragged rows whose keys and values are stored already."""

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        rows: RaggedRows,
        scale: float,
    ) -> torch.Tensor:
        """Attend.

        Args:
            query: [1, heads, rows, head_dim].
            key: the rows' own, also in `keys` [1, kv_heads, rows, head_dim].
            value: as `key`.
            keys: of all slots [kv_heads, slots, head_dim].
            values: as `keys`.
            rows: which of them each row sees.
            scale: of the scores.

        Returns:
            [1, rows, heads, head_dim].
        """


@dataclass(frozen=True, slots=True)
class Kernels:
    """What an engine attends with.

    Attributes:
        steps: for sequences of at most `MAX_STEP_ROWS` rows.
        chunks: for longer ones.
        captured: for steps inside a captured graph, which may read nothing from the host.
    """

    steps: Attend
    chunks: Attend
    captured: Attend | None = None


@dataclass(slots=True)
class RaggedRows:
    """What attention must know of a batch.

    Attributes:
        segments: one per sequence, together covering all rows.
        slots: where each row's key and value go, int64 [rows].
        kernels: None attends run by run with `partial`.
        memo: what layers derive from it once (`once`).
    """

    cache: KVCache
    segments: list[Segment]
    slots: torch.Tensor
    kernels: Kernels | None = None
    memo: dict[Hashable, object] = field(default_factory=dict)

    def once(self, name: Hashable, make: Callable[[], Made]) -> Made:
        """What `make` returned the first time; layers share it."""
        if name not in self.memo:
            self.memo[name] = make()
        return cast(Made, self.memo[name])

    def slots_on(self, device: torch.device) -> torch.Tensor:
        """`slots` on the device of a layer."""
        if device == self.slots.device:
            return self.slots
        return self.once(("slots", device), lambda: self.slots.to(device))

    def single_spans(self) -> list[tuple[int, int]]:
        """What each row sees, if every sequence has one row and one run of keys; else empty."""
        return self.once("single spans", self._single_spans)

    def _single_spans(self) -> list[tuple[int, int]]:
        is_plain = all(one.stop - one.start == len(one.all_spans) == 1 for one in self.segments)
        return [one.all_spans[0] for one in self.segments] if is_plain else []

    def prefixes(self) -> list[SharedPrefix]:
        """What several of the sequences begin with."""
        return self.once("prefixes", lambda: shared_prefixes(self.segments))

    def stretches(self) -> list[tuple[slice, RaggedRows]]:
        """Neighbours of one kind, steps or chunks: their rows, and themselves counted from 0."""
        if len({segment.is_step for segment in self.segments}) == 1:
            return [(slice(None), self)]
        return self.once("stretches", self._split)

    def _split(self) -> list[tuple[slice, RaggedRows]]:
        found = []
        for _, group in groupby(self.segments, key=lambda segment: segment.is_step):
            alike = list(group)
            first, stop = alike[0].start, alike[-1].stop
            moved = [
                Segment(one.start - first, one.stop - first, one.past, one.all_spans)
                for one in alike
            ]
            part = RaggedRows(self.cache, moved, self.slots[first:stop], self.kernels)
            found.append((slice(first, stop), part))
        return found

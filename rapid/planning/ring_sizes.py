"""Sizes of rings, the slots of layers with a sliding window.

A ring is as long as the window of the row that is computed next, the rows that may be computed
beside it or discarded again, and a page by which a dropped prefill goes back, together.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rapid.config import EngineConfig

_CHUNK_ROWS = 512  # most rows of a sequence in a step: a longer chunk would need a longer ring
_SPECULATED = 128  # tokens that may be discarded: the longest block, and as many drafted ahead
_TILE = 16  # rows of a deterministic engine's tile, which reads the window of its first row
_KEPT_PER_LEASE = 4  # windows of one prompt of about a hundred thousand tokens
_TOKENS_PER_KEPT = 8  # least tokens of the pool for each token of a kept window


@dataclass(frozen=True, slots=True)
class RingPlan:
    """Sizes of the rings and kept windows of an engine, in tokens."""

    window: int  # last tokens that a row attends to, itself among them
    page_tokens: int  # tokens of a page; reading begins at a multiple of it
    max_rows: int  # most rows of a sequence in one step, unless they are speculation
    num_rings: int
    num_kept: int

    @property
    def room(self) -> int:
        """Number of tokens behind the committed ones that may be discarded again."""
        return _SPECULATED

    @property
    def kept_tokens(self) -> int:
        """Slots of a kept window: all that a row, or its tile, reads before it."""
        return self._pages(self.window + _TILE + self.page_tokens)

    @property
    def ring_tokens(self) -> int:
        """Slots of a ring."""
        return self.kept_tokens + self._pages(max(self.max_rows, self.room) + self.page_tokens)

    @property
    def num_tokens(self) -> int:
        """Slots of all rings and kept windows."""
        return self.num_rings * self.ring_tokens + self.num_kept * self.kept_tokens

    def first_seen(self, position: int) -> int:
        """Return the position from which on a row reads: its window, and the rest of a page."""
        first = max(0, position + 1 - self.window)
        return first - first % self.page_tokens

    def _pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_tokens) * self.page_tokens


def ring_plan(config: EngineConfig, window: int | None) -> RingPlan | None:
    """Return the rings of an engine; None where its pages hold the KV of all layers.

    That is so without sliding layers (`window` is None), where rings would take as much as pages,
    and with a cache in host memory, which is of pages.
    """
    if window is None or config.host_cache_tokens:
        return None
    rings = _ring(window, config.page_tokens, config.step_tokens, config.max_leases)
    most_kept = config.kv_cache_tokens // (_TOKENS_PER_KEPT * rings.kept_tokens)
    num_kept = min(_KEPT_PER_LEASE * config.max_leases, max(most_kept, 1))
    plan = replace(rings, num_kept=num_kept)
    return plan if plan.num_tokens < config.kv_cache_tokens else None


def tokens_in_rings(window: int, context: int, page_tokens: int, step_tokens: int) -> float | None:
    """Return the slots of a sequence's ring and its share of the kept windows; None if pages do."""
    ring = _ring(window, page_tokens, step_tokens, 1)
    num_kept = min(_KEPT_PER_LEASE, context / (_TOKENS_PER_KEPT * ring.kept_tokens))
    in_rings = ring.ring_tokens + num_kept * ring.kept_tokens
    return in_rings if in_rings < context else None


def _ring(window: int, page_tokens: int, step_tokens: int, num_rings: int) -> RingPlan:
    return RingPlan(window, page_tokens, min(step_tokens, _CHUNK_ROWS), num_rings, num_kept=0)

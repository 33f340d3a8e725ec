"""Sliding windows: layers in which a row attends to the last `window` keys up to itself.

The keys of a piece of rows are three parts: the edge, which only its first rows see and which needs
a mask; the past that all see; and the rows themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from rapid.engines.attention.segments import Partial, Segment, between, num_keys

MAX_PIECE_ROWS = 128  # rows of a prefill chunk that are one piece: longer ones have longer edges


def within(segments: Sequence[Segment], window: int) -> list[Segment]:
    """Return the pieces of all sequences, in order, with the keys that each attends to."""
    return [piece for segment in segments for piece in _pieces(segment, window)]


def _pieces(segment: Segment, window: int) -> Iterator[Segment]:
    num_rows = segment.stop - segment.start
    num_past = num_keys(segment.past)
    if num_past + num_rows <= window:
        yield segment
        return
    size = min(window, MAX_PIECE_ROWS)
    for first in range(0, num_rows, size):
        rows = min(size, num_rows - first)
        stop = num_past + first + rows
        left_by_first = max(0, num_past + first + 1 - window)
        left_by_last = max(0, stop - window)
        past = between(segment.all_spans, left_by_last, num_past + first)
        yield Segment(
            segment.start + first,
            segment.start + first + rows,
            past,
            past + between(segment.all_spans, num_past + first, stop),
            between(segment.all_spans, left_by_first, left_by_last),
        )


def edge_partial(
    packed: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, num_rows: int
) -> Partial:
    """Attend to an edge; row i sees its keys from the one on that leaves its window last.

    A row that sees none of them gets zeros, and a log-sum-exp of minus infinity.

    Args:
        packed: rows of a piece by KV head, [1, kv_heads, group * num_rows, head_dim].
        key: keys of the edge, fewer than rows, [1, kv_heads, keys, head_dim].
    """
    num_keys = key.shape[2]
    hidden = torch.ones(num_rows, num_keys, dtype=torch.bool, device=key.device)
    hidden = hidden.tril(num_keys - num_rows).repeat(packed.shape[2] // num_rows, 1)
    scores = torch.matmul(packed, key.transpose(-1, -2)).float() * scale
    scores = scores.masked_fill(hidden, float("-inf"))
    lse = scores.logsumexp(-1)
    least = torch.finfo(lse.dtype).min
    weights = (scores - lse.clamp_min(least)[..., None]).exp().to(value.dtype)
    return torch.matmul(weights, value), lse

"""Prefixes that several sequences of a batch share, so that attention reads them once.

Their rows are one product (Juravsky et al., "Hydragen", arXiv 2402.05099).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce

from rapid.engines.attention.segments import Segment, Spans, between, num_keys

MIN_SHARED_KEYS = 1024  # fewer are read faster by each sequence on its own


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """A prefix that several sequences share."""

    spans: Spans  # slots [start, stop) of the prefix, in order
    # Segments of the sequences without the prefix, by their index in the batch.
    rests: dict[int, Segment]


def find_shared_prefixes(segments: Sequence[Segment]) -> list[SharedPrefix]:
    """Return the longest prefixes that at least two decoding or verifying sequences share.

    A sequence belongs to one prefix at most: sequences that share a document are grouped by it, not
    by the opening of the prompt that other sequences have as well.
    """
    alike: dict[int, list[int]] = {}
    for index, segment in enumerate(segments):
        if segment.past and segment.is_step:
            alike.setdefault(segment.past[0][0], []).append(index)
    found = []
    for indices in alike.values():
        for members in _by_longest(segments, indices) if len(indices) > 1 else ():
            spans = reduce(_common, (segments[index].past for index in members))
            rests = {index: _rest(segments[index], num_keys(spans)) for index in members}
            found.append(SharedPrefix(spans, rests))
    return found


def _by_longest(segments: Sequence[Segment], indices: list[int]) -> Iterator[list[int]]:
    """Yield groups of sequences with the same slot at a position, the farthest position first."""
    left = {index: num_keys(segments[index].past) for index in indices}
    position = MIN_SHARED_KEYS  # lengths are compared at powers of two only
    while len(left) > 1 and 2 * position <= max(left.values()):
        position *= 2
    while len(left) > 1 and position >= MIN_SHARED_KEYS:
        by_slot: dict[int, list[int]] = {}
        for index, length in left.items():
            if length >= position:
                by_slot.setdefault(_slot(segments[index].past, position - 1), []).append(index)
        for members in by_slot.values():
            if len(members) > 1:
                yield members
                for index in members:
                    del left[index]
        position //= 2


def _slot(spans: Spans, position: int) -> int:
    for start, stop in spans:
        if position < stop - start:
            return start + position
        position -= stop - start
    raise IndexError(position)


def _common(some: Spans, others: Spans) -> Spans:
    """Return the spans that both begin with."""
    common = []
    for (start, stop), (other_start, other_stop) in zip(some, others, strict=False):
        if start != other_start:
            break
        common.append((start, min(stop, other_stop)))
        if stop != other_stop:
            break
    return common


def _rest(segment: Segment, shared: int) -> Segment:
    """Return a segment without its first `shared` keys."""
    past, all_spans = between(segment.past, shared), between(segment.all_spans, shared)
    return replace(segment, past=past, all_spans=all_spans, paged=None)

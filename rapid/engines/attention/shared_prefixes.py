"""Which sequences of a batch begin in the same slots, so that attention reads these once for all.

Questions about one document do, and choices of one request. Rows of several sequences over keys
that all of them see are one product, merged with the rest by log-sum-exp (Juravsky et al.,
"Hydragen", arXiv 2402.05099).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rapid.engines.attention.segments import Segment

MIN_SHARED_KEYS = 1024  # fewer are read faster by each sequence for itself

Spans = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """The beginning of several sequences.

    Attributes:
        spans: its slots.
        rests: by index, the sequences' segments without it.
    """

    spans: Spans
    rests: dict[int, Segment]


def shared_prefixes(segments: Sequence[Segment]) -> list[SharedPrefix]:
    """The longest prefixes that at least two decoding or verifying sequences share.

    A sequence is in one of them at most: with a document in common, a prompt's opening that others
    have as well does not count. Lengths are told apart by factors of two.
    """
    alike: dict[int, list[int]] = {}
    for index, segment in enumerate(segments):
        if segment.past and segment.is_step:
            alike.setdefault(segment.past[0][0], []).append(index)
    found = []
    for indices in alike.values():
        for members in _by_longest(segments, indices) if len(indices) > 1 else ():
            spans = reduce(_common, (segments[index].past for index in members))
            num_keys = _length(spans)
            rests = {index: _without(segments[index], num_keys) for index in members}
            found.append(SharedPrefix(spans, rests))
    return found


def _by_longest(segments: Sequence[Segment], indices: list[int]) -> Iterator[list[int]]:
    """Those that see the same slot at a position, the farthest position first."""
    left = {index: _length(segments[index].past) for index in indices}
    position = MIN_SHARED_KEYS
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


def _length(spans: Spans) -> int:
    return sum(stop - start for start, stop in spans)


def _slot(spans: Spans, position: int) -> int:
    for start, stop in spans:
        if position < stop - start:
            return start + position
        position -= stop - start
    raise IndexError(position)


def _common(some: Spans, others: Spans) -> Spans:
    """What both begin with."""
    common = []
    for (start, stop), (other_start, other_stop) in zip(some, others, strict=False):
        if start != other_start:
            break
        common.append((start, min(stop, other_stop)))
        if stop != other_stop:
            break
    return common


def _without(segment: Segment, num_keys: int) -> Segment:
    """What a segment sees behind its first keys."""

    def rest(spans: Spans) -> Spans:
        left, kept = num_keys, []
        for start, stop in spans:
            first = min(start + left, stop)
            left -= first - start
            if first < stop:
                kept.append((first, stop))
        return kept

    return replace(segment, past=rest(segment.past), all_spans=rest(segment.all_spans))

"""Buckets of steps: few shapes that most steps fit into, once they are padded.

The padding is rows behind a sequence's own, or further sequences. The bucket depends on numbers of
rows alone, so that all ranks of a model choose the same one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rapid.engines.attention.batch import RowLists
from rapid.engines.attention.segments import MAX_STEP_ROWS, Segment

MOST_ROWS = (1, 4, 16)  # of a bucket's longest sequence; the last is MAX_STEP_ROWS
CHUNK_ROWS = 64  # of a short prefill chunk, as a question on a document that was read before
_COMMON_SEQUENCES = 8  # of the largest steps whose graphs are captured before any are asked for


@dataclass(frozen=True, slots=True)
class Bucket:
    """A shape that steps are padded to."""

    sequences: int
    rows: int  # number of rows of all of them
    most_rows: int  # rows of the longest sequence

    def __str__(self) -> str:
        return f"({self.sequences} sequences, {self.rows} rows, at most {self.most_rows} each)"


def padding_pages(page_tokens: int) -> int:
    """Return the pages behind those of the ledger whose slots hold the keys of padding."""
    return -(-CHUNK_ROWS // page_tokens)


def common_buckets(max_sequences: int) -> list[Bucket]:
    """Return the buckets of steps that decode plainly or judge a block of each sequence."""
    numbers = range(1, min(max_sequences, _COMMON_SEQUENCES) + 1)
    found = [_bucket_of([rows] * count) for count in numbers for rows in (1, MAX_STEP_ROWS)]
    return list(dict.fromkeys(found))


def bucket_of(segments: Sequence[Segment]) -> Bucket | None:
    """Return the bucket of a step; None where it has prefill chunks, except a short one.

    Numbers of sequences are powers of two and halfway between them. A bucket has room for one, two,
    four, ... or all sequences of the most rows, beside others of one row: fewer products than in a
    rectangle, where each sequence is padded to the longest. Beside a chunk all others have one row,
    or room for the most rows of a step.
    """
    lengths = [segment.stop - segment.start for segment in segments]
    longest = max(lengths)
    if longest <= MAX_STEP_ROWS:
        return _bucket_of(lengths)
    num_chunks = sum(length > MAX_STEP_ROWS for length in lengths)
    if longest > CHUNK_ROWS or num_chunks > 1 or len(lengths) == 1:
        return None
    sequences = _power_or_halfway(len(lengths))
    others = 1 if sum(lengths) - longest < len(lengths) else MAX_STEP_ROWS
    return Bucket(sequences, CHUNK_ROWS + (sequences - 1) * others, CHUNK_ROWS)


def _bucket_of(lengths: Sequence[int]) -> Bucket:
    """Return the bucket of a step without a prefill chunk, of sequences of so many rows."""
    most_rows = next(most for most in MOST_ROWS if most >= max(lengths))
    sequences = _power_or_halfway(len(lengths))
    needed = sum(lengths) + sequences - len(lengths)
    long = 1
    while sequences + long * (most_rows - 1) < needed:
        long *= 2
    return Bucket(sequences, sequences + min(long, sequences) * (most_rows - 1), most_rows)


def pad_rows(
    rows: RowLists, bucket: Bucket, first_slot: int, first_ring_slot: int | None = None
) -> tuple[RowLists, list[int]]:
    """Pad a step to its bucket; return it, all of its rows wanted, and its own wanted rows in it.

    Args:
        first_slot: first of `CHUNK_ROWS` slots of the cache that belong to no page.
        first_ring_slot: first of as many that belong to no ring; None without rings.
    """
    missing = bucket.rows - len(rows.input_ids)
    num_empty = bucket.sequences - len(rows.segments)
    made = RowLists([], [], [], list(range(bucket.rows)), [])
    moved = [0] * len(rows.input_ids)
    empty = Segment(0, 0, [], [])
    in_rings = rows.ring_segments or [empty] * len(rows.segments)
    of_sequences = [*zip(rows.segments, in_rings, strict=True), *[(empty, empty)] * num_empty]
    for segment, in_ring in of_sequences:
        first, own = len(made.input_ids), range(segment.start, segment.stop)
        num_empty -= not own
        num_padding = min(missing - num_empty, bucket.most_rows - len(own))
        missing -= num_padding
        for offset, row in enumerate(own):
            moved[row] = first + offset
        made.input_ids.extend([*rows.input_ids[segment.start : segment.stop], *[0] * num_padding])
        made.positions.extend([*rows.positions[segment.start : segment.stop], *[0] * num_padding])
        for slots, segments, source, own_slots, padding in (
            (made.slots, made.segments, segment, rows.slots, first_slot),
            (made.ring_slots, made.ring_segments, in_ring, rows.ring_slots, first_ring_slot),
        ):
            if padding is not None:
                more = range(padding, padding + num_padding)
                slots.extend([*own_slots[segment.start : segment.stop], *more])
                spans = [*source.all_spans, *([(more.start, more.stop)] if more else [])]
                paged = source.paged and source.paged._replace(num_padding=num_padding)
                stop = len(made.input_ids)
                segments.append(Segment(first, stop, source.past, spans, paged=paged))
    return made, [moved[row] for row in rows.wanted]


def example(bucket: Bucket, first_slot: int, first_ring_slot: int | None = None) -> RowLists:
    """Return a step of padding alone that fills a bucket, with a sequence of the most rows."""
    return pad_rows(RowLists([], [], [], [], []), bucket, first_slot, first_ring_slot)[0]


def _power_or_halfway(number: int) -> int:
    """Round up to 1, 2, 3, 4, 6, 8, 12, 16, ..."""
    power = 1 << (number - 1).bit_length()
    return power * 3 // 4 if power >= 4 and number <= power * 3 // 4 else power

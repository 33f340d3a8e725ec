"""The part of a prefill that reads passages apart, or puts them into the prompt from memory.

::

    positions  0 .. sinks .. head | passage | passage | passage | question
                                    kept: placed, its keys turned to here
                                    not kept: read behind the sinks, kept, turned to here

A passage of which a part is in the prefix cache and that is not kept is read like any other text.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from dataclasses import dataclass

from rapid.engines.attention.batch import Feed
from rapid.engines.kv.leases.lease import Lease
from rapid.engines.kv.passages import NUM_SINKS, KeptPassage, PassageCache, splice
from rapid.engines.kv.sequences import Sequence


@dataclass(frozen=True, slots=True)
class _Placing:
    """A part of a kept passage to be written at positions [start, stop); it begins at `first`."""

    kept: KeptPassage
    first: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of a passage in the next forward."""

    first: int
    stop: int
    num_rows: int


class ApartReading:
    """What one prefill does with the passages of its prompt.

    `feeds` plans under the engine's lock; `place` and `take` copy and turn without it.
    """

    def __init__(self, lease: Lease, passages: PassageCache) -> None:
        self._lease = lease
        self._passages = passages
        request = lease.request
        self._spans = request.passages
        self._starts = [start for start, _ in self._spans]
        self._num_sinks = min(NUM_SINKS, self._starts[0])
        self._owner = f"{request.terms.tenant}\0{request.terms.cache_salt}"
        self._placings: list[_Placing] = []
        self._rows: deque[_Rows | _Placing] = deque()
        # Rows that are computed of a passage, by its start and by what was overwritten until then.
        self._done: tuple[tuple[int, int], int] = (0, 0), 0
        self.num_placed = 0

    def plan(self, sequence: Sequence, stop: int, limit: int) -> tuple[list[Feed], int]:
        """Plan what comes next of the positions before `stop`, which none has computed.

        Kept passages that come next count as computed; `place` is called before the next forward.

        Returns:
            Rows to read apart, at most `limit`; and if there are none, the position before which
            the next rows are read as usual. At least one row is left to them before `stop`.
        """
        while (span := self._span_at(sequence.num_computed)) is not None:
            placing = self._find(span, sequence.num_computed, stop)
            if placing is None or self._num_done(span[0]):
                break
            self._plan_placing(placing)
            sequence.num_computed = placing.stop
        return self._plan_rows(sequence, stop, limit), self._end_of_text(sequence, stop)

    def place(self) -> None:
        """Write the kept passages that were planned."""
        table = self._lease.sequences[0].table
        for each in self._placings:
            by = each.first - self._num_sinks
            self._passages.place(each.kept, table, each.first, each.start, each.stop, by)
        self._placings.clear()

    def take(self, sequence: Sequence) -> bool:
        """Count the rows of one of the feeds; return False if there was none to read apart."""
        if not self._rows:
            return False
        rows = self._rows.popleft()
        assert isinstance(rows, _Rows)
        num_done = self._num_done(rows.first) + rows.num_rows
        self._done = self._key(rows.first), num_done
        if num_done == rows.stop - rows.first:
            self._finish(sequence, rows)
            sequence.num_computed = rows.stop
            while self._rows and isinstance(placed := self._rows[0], _Placing):
                self._rows.popleft()
                sequence.num_computed = placed.stop
        return True

    def _plan_rows(self, sequence: Sequence, stop: int, limit: int) -> list[Feed]:
        feeds = list[Feed]()
        position = sequence.num_computed
        while (span := self._span_at(position)) is not None and limit > 0:
            first, end = span
            placing = self._find(span, position, stop)
            done = self._num_done(first)
            if placing is not None and not done:
                self._plan_placing(placing)
                self._rows.append(placing)
                position = placing.stop
                continue
            if position > first or end > stop:
                break
            num_rows = min(limit, end - first - done)
            table = splice(sequence.table, self._num_sinks, first, end)
            token_ids = sequence.token_ids[first + done : first + done + num_rows]
            feeds.append(Feed(token_ids, self._num_sinks + done, table, 0))
            self._rows.append(_Rows(first, end, num_rows))
            limit -= num_rows
            if done + num_rows < end - first:
                break
            position = end
        return feeds

    def _num_done(self, first: int) -> int:
        key, num_rows = self._done
        return num_rows if key == self._key(first) else 0

    def _key(self, first: int) -> tuple[int, int]:
        # To delete documents is also to overwrite pages behind the computed tokens.
        return first, self._passages.num_overwritten

    def _finish(self, sequence: Sequence, rows: _Rows) -> None:
        """Keep a passage that was read, and turn it to where it stands."""
        terms, table = self._lease.request.terms, sequence.table
        fresh = KeptPassage([], terms.tenant, terms.documents, rows.stop - rows.first)
        name = self._name((rows.first, rows.stop))
        self._passages.keep(name, table, rows.first, rows.stop, fresh)
        self._passages.move(table, rows.first, rows.stop, rows.first - self._num_sinks)

    def _plan_placing(self, placing: _Placing) -> None:
        self._placings.append(placing)
        self.num_placed += placing.stop - placing.start

    def _find(self, span: tuple[int, int], position: int, stop: int) -> _Placing | None:
        """Return what can be placed of a passage from a position on, if it is kept."""
        end = min(span[1], stop - 1)  # a row is left for the forward
        if end <= position:
            return None
        kept = self._passages.find(self._name(span), self._lease.request.terms.documents)
        return None if kept is None else _Placing(kept, span[0], position, end)

    def _name(self, span: tuple[int, int]) -> bytes:
        prompt_ids = self._lease.request.prompt_ids
        own = prompt_ids[span[0] : span[1]]
        return self._passages.name(self._owner, prompt_ids[: self._num_sinks], own)

    def _span_at(self, position: int) -> tuple[int, int] | None:
        """Return the passage that has a position, if one has."""
        index = bisect_right(self._starts, position) - 1
        is_within = index >= 0 and position < self._spans[index][1]
        return self._spans[index] if is_within else None

    def _end_of_text(self, sequence: Sequence, stop: int) -> int:
        """Return where the next rows that are not read apart end."""
        position = sequence.num_computed
        span = self._span_at(position)
        if span is not None:
            return min(span[1], stop)
        index = bisect_right(self._starts, position)
        return min(self._starts[index], stop) if index < len(self._starts) else stop

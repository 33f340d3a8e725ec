"""Rings of slots for layers with a sliding window, and the windows kept for later prompts.

A ring belongs to one sequence (`rapid.planning.ring_sizes`). The window at some points of a prompt
is **kept** under the name of the page that ends there, for prompts that begin the same way.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from rapid.engines.kv.cache import KVCache, PagePool, PageRun
from rapid.planning.ring_sizes import RingPlan

_GROWTH = 8  # of the distances from a prompt's end at which its windows are kept


@dataclass(eq=False, slots=True)
class Ring:
    """The slots of one sequence: position p lies in slot ``first + p % num_tokens``."""

    first: int
    num_tokens: int
    plan: RingPlan
    start: int = 0  # first position that was written or copied here
    stop: int = 0  # position after the last one; it stays where it is when tokens are discarded

    def spans(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the slot ranges [a, b) of the tokens at positions [start, stop), in order."""
        if start >= stop:
            return []
        low = self.first + start % self.num_tokens
        high, end = low + stop - start, self.first + self.num_tokens
        return [(low, high)] if high <= end else [(low, end), (self.first, high - self.num_tokens)]

    def write(self, start: int, stop: int) -> None:
        """Count rows [start, stop) as written; raise AssertionError if what they read is gone."""
        self.stop = max(self.stop, stop)
        if not self.holds(self.plan.first_seen(start)):
            raise AssertionError(f"a ring was left behind: rows {start} to {stop}, {self}")

    def holds(self, position: int) -> bool:
        """Return whether the tokens from a position on are here."""
        return position >= max(self.start, self.stop - self.num_tokens)


class RingPool:
    """Ledger of the rings of an engine: each is free or has one holder."""

    def __init__(self, plan: RingPlan) -> None:
        self.plan = plan
        self._rings = PagePool(plan.num_rings)

    @property
    def num_free(self) -> int:
        """Number of rings without a holder."""
        return self._rings.num_free

    def take(self) -> Ring:
        """Take a free ring, whose content is of no use, or raise OutOfPages."""
        (run,) = self._rings.allocate(1)
        return Ring(run.start * self.plan.ring_tokens, self.plan.ring_tokens, self.plan)

    def free(self, ring: Ring) -> None:
        """Give back a ring."""
        self._rings.free([self._run(ring)])

    def take_dirty(self) -> list[tuple[int, int]]:
        """Return the slots of free rings that may hold numbers; they count as zero from now on."""
        size = self.plan.ring_tokens
        return [(ring * size, (ring + 1) * size) for ring in self._rings.take_dirty()]

    def take_stale(self, held: Iterable[Ring]) -> list[tuple[int, int]]:
        """Return the slots of rings in use that only earlier holders have written."""
        spans: list[tuple[int, int]] = []
        for ring in held:
            index = self._run(ring).start
            if self._rings.is_stale[index]:
                spans += ring.spans(ring.stop, ring.start + ring.num_tokens)
                self._rings.is_stale[index] = False
        return spans

    def check_integrity(self, held: Iterable[Ring]) -> None:
        """Raise AssertionError unless exactly the rings of `held` have a holder, one each."""
        self._rings.check_integrity([self._run(ring)] for ring in held)

    def _run(self, ring: Ring) -> PageRun:
        index = ring.first // self.plan.ring_tokens
        return PageRun(index, index + 1)


class KeptWindows:
    """Windows of prompts by the name of the page that each ends with, on the compute thread."""

    def __init__(self, plan: RingPlan, cache: KVCache) -> None:
        self.plan = plan
        self._cache = cache
        first, size = plan.num_rings * plan.ring_tokens, plan.kept_tokens
        self._free = [Ring(first + i * size, size, plan) for i in range(plan.num_kept)]
        self._places: OrderedDict[bytes, Ring] = OrderedDict()  # least recently used first
        self._documents: dict[bytes, frozenset[str]] = {}  # in the prompt up to there

    @property
    def scratch(self) -> int:
        """Slot of the pages' tensors for the keys of rows that are computed for a ring alone."""
        return self._cache.num_slots - 1

    def points(self, num_pages: int) -> set[int]:
        """Return after how many of a prompt's pages its window is kept."""
        # A later prompt has all of them, as the next turn of a conversation, or parts from this one
        # near its end, as another question on the same document.
        points, distance = {num_pages}, -(-self.plan.window // self.plan.page_tokens)
        while distance < num_pages:
            points.add(num_pages - distance)
            distance *= _GROWTH
        return points - {0}

    def last(self, indices: Mapping[bytes, int], start: int, stop: int) -> int:
        """Return after how many pages a prompt can go on: `start`, or up to `stop` where one is.

        The pages before `start` were read, those before `stop` are cached; `indices` are by name.
        """
        ends = (indices[name] + 1 for name in self._places if name in indices)
        return max((end for end in ends if start < end <= stop), default=start)

    def keep(self, name: bytes, ring: Ring, position: int, documents: Collection[str] = ()) -> None:
        """Copy the window of a ring before a position, the end of the page of this name."""
        if name not in self._places:
            if not self._free:
                gone, place = self._places.popitem(last=False)
                self._documents.pop(gone, None)
                self._free.append(place)
                if position < self.plan.kept_tokens:  # it leaves some of what was there
                    self._zero(place)
            self._copy(ring, self._free[-1], position)
            self._places[name] = self._free.pop()
        self._use(name, documents)

    def restore(
        self, name: bytes, ring: Ring, position: int, documents: Collection[str] = ()
    ) -> None:
        """Copy a kept window into a ring, as if the rows up to a position were computed."""
        self._copy(self._places[name], ring, position)
        self._use(name, documents)

    def forget(self, documents: Collection[str]) -> int:
        """Drop the windows of prompts that hold any of some documents, and overwrite them.

        Returns their number.
        """
        names = [name for name, held in self._documents.items() if not held.isdisjoint(documents)]
        for name in names:
            del self._documents[name]
            place = self._places.pop(name)
            self._zero(place)
            self._free.append(place)
        return len(names)

    def fork(self, source: Ring, ring: Ring, position: int) -> None:
        """Copy the window before a position from one ring to another."""
        self._copy(source, ring, position)

    def first_kept(self, position: int) -> int:
        """Return the first position of the window that is kept before a position."""
        return max(0, position - self.plan.kept_tokens)

    def _zero(self, place: Ring) -> None:
        self._cache.zero([(place.first, place.first + place.num_tokens)], of_rings=True)

    def _use(self, name: bytes, documents: Collection[str]) -> None:
        self._places.move_to_end(name)
        if documents:
            self._documents[name] = self._documents.get(name, frozenset()).union(documents)

    def _copy(self, source: Ring, destination: Ring, stop: int) -> None:
        start = self.first_kept(stop)
        if not source.holds(start):
            raise AssertionError(f"the window before {stop} is not in {source}")
        self._cache.copy(source.spans(start, stop), destination.spans(start, stop), of_rings=True)
        destination.start, destination.stop = start, stop

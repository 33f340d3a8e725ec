"""Those who wait for a lease: a line for each tenant, and one for all companions."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from rapid.constraints.shaping import Shaping
from rapid.engines.kv.leases.lease import Lease
from rapid.messages import LeaseRequest
from rapid.work_shares import WorkShares

MOST_OVERTAKEN = 8  # later leases that may open before an earlier one of another tenant


@dataclass(eq=False)
class Waiter:
    """Request for a lease, as it stands in the queue."""

    request: LeaseRequest
    # Callback, called at most once: with the lease when it opens, or with the error why it never
    # will.
    on_open: Callable[[Lease | Exception], None]
    page_names: list[bytes]  # names of the full pages of the prompt
    shapings: Sequence[Shaping | None] = ()  # of each choice's logits; empty for none
    number: int = 0  # position in the order of submission
    # Number of later leases of other tenants that opened while this one stood at the head of its
    # tenant's line.
    num_overtaken: int = 0

    @property
    def is_due(self) -> bool:
        """Whether it has been overtaken often enough to come first."""
        return self.num_overtaken >= MOST_OVERTAKEN


@dataclass
class Lines:
    """The lines, in the order of turns; within one its waiters stand in the order of submission."""

    shares: WorkShares  # in which who waits is present
    _lines: dict[str | None, deque[Waiter]] = field(default_factory=dict)
    _num_submitted: int = 0

    def __iter__(self) -> Iterator[Waiter]:
        return itertools.chain.from_iterable(self._lines.values())

    def join(self, waiter: Waiter) -> None:
        """Stand at the end of the waiter's line."""
        waiter.number = self._num_submitted = self._num_submitted + 1
        self._lines.setdefault(_line_of(waiter), deque()).append(waiter)
        self.shares.enter(waiter.request.terms.tenant, waiter.request.terms.weight)

    def leave(self, waiter: Waiter) -> None:
        """Remove a waiter from its line, which keeps its turn."""
        line = self._lines[_line_of(waiter)]
        line.remove(waiter)
        self.shares.leave(waiter.request.terms.tenant)
        if not line:
            del self._lines[_line_of(waiter)]

    def serve(self, waiter: Waiter) -> None:
        """Remove a waiter that opens; its line now waits for every other line's turn."""
        self.leave(waiter)
        if waiter.request.beside is None:
            for head in self.heads():
                head.num_overtaken += head.number < waiter.number
        line = _line_of(waiter)
        if line in self._lines:
            self._lines[line] = self._lines.pop(line)

    def companion(self) -> Waiter | None:
        """Return the first companion that waits, if any."""
        return self._lines[None][0] if None in self._lines else None

    def heads(self) -> list[Waiter]:
        """Return the first waiter of every tenant, in the order of turns."""
        return [line[0] for tenant, line in self._lines.items() if tenant is not None]

    def check_integrity(self) -> None:
        """Raise AssertionError if a line without waiters has a turn."""
        if not all(self._lines.values()):
            raise AssertionError("lease ledger: nobody stands in a line that has a turn")


def _line_of(waiter: Waiter) -> str | None:
    """Return the key of a waiter's line: its tenant, or None for the line of all companions."""
    return waiter.request.terms.tenant if waiter.request.beside is None else None

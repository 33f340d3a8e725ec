"""When a step waits for blocks that are due, so that more sequences are computed together.

A step reads all weights once, for one sequence as for many.
"""

from __future__ import annotations

from collections.abc import Sequence

from rapid.engines.kv.leases.lease import Lease
from rapid.engines.kv.sequences import Gap
from rapid.engines.work.base import Work
from rapid.ports import Clock
from rapid.speculation.pace.round_costs import Line

_LATER = 1.1  # factor on the measured time until a sequence returns, whose times vary
_LEAST_STEPS = 8  # measured steps without which nothing is known of their seconds


def wait_s(num_ready: int, due_s: Sequence[float], start_s: float, sequence_s: float) -> float:
    """Return for how long a step waits, so that the sum of all times until tokens is least.

    Args:
        num_ready: Sequences whose rows are ready; there is at least one.
        due_s: Seconds until others return, in ascending order.
        start_s: Seconds of a step without any sequence.
        sequence_s: Seconds that each sequence adds.
    """

    # A step of n sequences takes ``start_s + n * sequence_s``. Those that it does not wait for are
    # computed together once it has ended.
    def waiting(num_joined: int) -> float:
        """Return the sum of the seconds until tokens if the step waits for so many."""
        joined_s = due_s[num_joined - 1] if num_joined else 0.0
        num_computed, later = num_ready + num_joined, due_s[num_joined:]
        end_s = joined_s + start_s + num_computed * sequence_s
        later_step_s = start_s + len(later) * sequence_s
        return num_computed * end_s + sum(max(due, end_s) + later_step_s for due in later)

    num_joined = min(range(len(due_s) + 1), key=waiting)
    return due_s[num_joined - 1] if num_joined else 0.0


class Joining:
    """Measures when the sequences of an engine return to it, and what a step costs."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._steps = Line()  # seconds of a step, by its sequences
        self._gaps: dict[tuple[Lease, tuple[int, ...]], Gap] = {}

    def arrive(self, work: Work) -> None:
        """Record that a call has begun."""
        gap = self._gaps.get((work.lease, work.choices))
        if gap is not None:
            gap.call(self._clock())

    def leave(self, work: Work) -> None:
        """Record that a call is answered, so that the next on its sequence is due."""
        self._gaps.setdefault((work.lease, work.choices), Gap()).hand_out(self._clock())

    def forget(self, lease: Lease) -> None:
        """Record that a lease has ended: no call on it is due."""
        for choices in [choices for one, choices in self._gaps if one is lease]:
            del self._gaps[lease, choices]

    def observe(self, seconds: float, num_sequences: int) -> None:
        """Record the duration of a step without prefill, in seconds."""
        self._steps.add(num_sequences, seconds, 0.0)

    def wait_s(self, num_ready: int) -> float:
        """Return for how long a step of so many sequences waits for others; 0 if none is due."""
        if self._steps.weight < _LEAST_STEPS:
            return 0.0
        start_s, now = self._steps.at(0), self._clock()
        due_s = sorted(
            due_s
            for gap in self._gaps.values()
            if gap.handed_out_at is not None and gap.seconds.value is not None
            if 0 < (due_s := gap.handed_out_at + _LATER * gap.seconds.value - now) < start_s
        )
        return wait_s(num_ready, due_s, start_s, self._steps.slope) if due_s else 0.0

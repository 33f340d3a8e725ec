"""A thread that closes an engine whose compute thread is stuck."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

_TICK_S = 0.5  # between two looks at the step in progress


class TakesTurns(Protocol):
    """Work in turns, whose progress a `Watchdog` checks."""

    num_turns: int  # grows with every turn that the work takes, or in which there is none to do
    limit_s: float  # seconds that the turn in progress may take


class Watchdog:
    """A thread that calls a function, once, when a turn takes longer than it may.

    A kernel that never ends blocks the compute thread, while the process answers that it is well.
    """

    def __init__(self, watched: TakesTurns, on_stuck: Callable[[], None]) -> None:
        """Make the thread, which does not run before `start`; it ends after `on_stuck`."""
        self._watched = watched
        self._on_stuck = on_stuck
        self._num_turns = watched.num_turns
        self._waited_s = 0.0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="rapid-watchdog", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread, and wait for its end."""
        self._stopped.set()
        self._thread.join()

    def is_stuck(self) -> bool:
        """Count one tick; return whether the turn in progress takes longer than it may."""
        num_turns = self._watched.num_turns
        if num_turns != self._num_turns:
            self._num_turns, self._waited_s = num_turns, 0.0
            return False
        self._waited_s += _TICK_S  # of its own, so that a process that was stopped is not stuck
        return self._waited_s > self._watched.limit_s

    def _loop(self) -> None:
        while not self._stopped.wait(_TICK_S):
            if self.is_stuck():
                self._on_stuck()
                return

"""The order in which threads use one model."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class PriorityLock:
    """A lock for which questions wait less than documents: a question takes the next turn."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._is_taken = False
        self._num_questions = 0

    @contextmanager
    def question(self) -> Iterator[None]:
        """Take the next turn."""
        with self._changed:
            self._num_questions += 1
            self._changed.wait_for(lambda: not self._is_taken)
            self._num_questions -= 1
            self._is_taken = True
        with self._take():
            yield

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Take a turn when no question waits."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_taken and not self._num_questions)
            self._is_taken = True
        with self._take():
            yield

    @contextmanager
    def _take(self) -> Iterator[None]:
        try:
            yield
        finally:
            with self._changed:
                self._is_taken = False
                self._changed.notify_all()

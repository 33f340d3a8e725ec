"""A file of API keys that may change while the ingress serves."""

from __future__ import annotations

import math
from pathlib import Path

from rapid.ports import Clock

_LOOK_S = 1.0  # between two looks, while a revoked key may still be taken


class KeyFile:
    """A watch on the content of a file, which is looked at when requests come.

    The whole content is compared, not a time: a Secret of Kubernetes changes by the target of a
    link, and a file may be written twice within the resolution of its time.
    """

    def __init__(self, path: Path | None, clock: Clock) -> None:
        """Take a first look.

        Args:
            path: The file; None for none, which never changes.
            clock: Monotonic seconds.
        """
        self._path = path
        self._clock = clock
        self._next_look = -math.inf
        self._content: bytes | None = None
        self.has_changed()

    def has_changed(self) -> bool:
        """Look, if the last look was a second ago; return whether the content is another one."""
        now = self._clock()
        if self._path is None or now < self._next_look:
            return False
        self._next_look = now + _LOOK_S
        before = self._content
        try:
            self._content = self._path.read_bytes()
        except OSError:
            self._content = None
        return self._content != before

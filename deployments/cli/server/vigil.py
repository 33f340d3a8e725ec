"""What `rapid serve` tells of the readiness of a server that runs."""

from __future__ import annotations

import time
from typing import Any

from deployments.cli.terminal import note
from rapid.ports import Clock

_EVERY_S = 5.0  # between two questions to `/ready`
_SILENT_S = 120.0  # Serve has a lost proxy back within a minute, and a lost ingress


class Vigil:
    """Readiness over time: tells when it goes and comes back, and when nothing answers any more."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._looked_at = self._ready_at = self._answered_at = clock()
        self._is_ready = True

    @property
    def is_due(self) -> bool:
        """Whether it is time for the next look."""
        return self._clock() - self._looked_at >= _EVERY_S

    def look(self, readiness: dict[str, Any] | None) -> str | None:
        """Take what ``/ready`` says, None if nothing; return why the server is given up, if it is.

        In `readiness`, ``answered`` is False where the proxy says it for an ingress.
        """
        now = self._looked_at = self._clock()
        is_ready = bool(readiness and readiness.get("ready"))
        if readiness is not None and readiness.get("answered", True):
            self._answered_at = now
        if is_ready != self._is_ready:
            reason = (readiness or {}).get("reason", "nothing answers /ready")
            note(
                f"ready again after {now - self._ready_at:.0f} s"
                if is_ready
                else f"not ready: {reason}"
            )
        self._is_ready = is_ready
        if is_ready:
            self._ready_at = now
        silent_s = now - self._answered_at
        if silent_s < _SILENT_S:
            return None
        return f"nothing has answered /ready for {silent_s:.0f} s, so the server is ended"

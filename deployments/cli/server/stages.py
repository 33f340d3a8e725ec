"""How far the start of a server has come, as `rapid serve` tells it."""

from __future__ import annotations

import time
from pathlib import Path

from rich.status import Status

from deployments.cli.server.server_state import ServerState
from deployments.cli.terminal import err, note
from rapid.ports import Clock

_LONG_S = 60.0  # a quiet machine starts in half of it


class Stages:
    """The stages of a start.

    A terminal shows the present one beside its spinner; elsewhere each is a line of its own.
    """

    def __init__(
        self, status: Status, config: Path, log_path: Path, clock: Clock = time.monotonic
    ) -> None:
        self._status, self._config, self._log_path = status, config, log_path
        self._clock = clock
        self._began = clock()
        self._ready_after: dict[str, float] = {}
        self._said = ""
        self._is_long = False

    def show(self, state: ServerState | None) -> None:
        """Show the stage, if it is a new one, and once after a minute where the log is."""
        seconds = self._clock() - self._began
        stage = self._stage(state, seconds)
        if stage and stage != self._said:
            if not self._said:
                self._say(f"Ray started ({seconds:.0f} s)")
            if stage != "Ray started":
                self._say(stage)
            self._said = stage
        if seconds >= _LONG_S and not self._is_long:
            self._is_long = True
            note(f"still starting after {seconds:.0f} s: Ray's output is in {self._log_path}")

    def _stage(self, state: ServerState | None, seconds: float) -> str:
        if state is None:
            return ""
        for name, each in state.pools.items():
            if each == "ready":
                self._ready_after.setdefault(name, seconds)
        pools = [
            f"{name} {each}" + (f" ({self._ready_after[name]:.0f} s)" if each == "ready" else "")
            for name, each in state.pools.items()
        ]
        return f"pools: {', '.join(pools)}" if pools else "Ray started"

    def _say(self, stage: str) -> None:
        if err.is_terminal:
            self._status.update(f"starting {self._config}: {stage}")
        else:
            note(stage)

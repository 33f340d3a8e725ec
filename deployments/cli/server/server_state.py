"""The state that the process which runs Serve writes for the one that watches it."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

RUN_FOLDER = Path(".run")
RAY_DID_NOT_START = os.EX_TEMPFAIL
NO_RAY = "Ray did not start"
PARTS_OF_RAY = ("raylet", "gcs_server")  # without either of them nothing is answered
_STATE = RUN_FOLDER / "serve.json"

PoolState = Literal["starting", "ready"]


@dataclass(frozen=True)
class ServerState:
    """How far a server has come.

    Attributes:
        dashboard: The URL of Ray's dashboard; empty where the Ray is not its own.
        pools: Whether each pool has a replica that runs.
        metrics: The metrics URL of every node.
        session: The folder of Ray's session on this machine, with the log of every process.
        url: Where this machine reaches the HTTP server.
    """

    dashboard: str
    pools: dict[str, PoolState] = field(default_factory=dict)
    metrics: list[str] = field(default_factory=list)
    session: str = ""
    url: str = ""

    def write(self) -> None:
        """Write the state in place of the last one."""
        RUN_FOLDER.mkdir(exist_ok=True)
        partial = _STATE.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(self)), encoding="utf-8")
        os.replace(partial, _STATE)


def read_state() -> ServerState | None:
    """Return the state of this folder's server; None before its Ray has started."""
    try:
        return ServerState(**json.loads(_STATE.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None


def forget_state() -> None:
    """Delete the state, of a server that has ended."""
    _STATE.unlink(missing_ok=True)

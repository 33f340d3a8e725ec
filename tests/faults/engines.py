"""Engines that break on command: a file with the name of their process says how."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rapid.config import EngineConfig
from rapid.messages import LeaseRequest

STICKY, WEDGED = "sticky", "wedged"


def load_breakable(config: EngineConfig, directory: str) -> Any:
    """Load the real engine, whose every forward first looks at its file in `directory`.

    While the file says `sticky`, each forward raises what a GPU raises after a bad access; while it
    says `wedged`, a forward does not return. A second file (`told_by`) then has the time of the
    first forward that this met, and of every lease that the engine was asked for later.
    """
    from rapid.engines.engine import Engine
    from rapid.engines.parallel.leading import load_replica
    from rapid.engines.warming import warm_up

    engine = warm_up(Engine(load_replica(config, with_pools=True), config), config)
    order = Path(directory) / str(os.getpid())
    told = told_by(order)
    runner = engine._compute.runner
    run, open_ = runner.run, engine.open

    def note() -> None:
        with told.open("a") as file:
            file.write(f"{time.monotonic()}\n")

    async def opening(request: LeaseRequest) -> None:
        if told.exists():
            note()
        await open_(request)

    def breakable(feeds: Sequence[Any]) -> Any:
        if order.exists() and not told.exists():
            note()
        while order.exists():
            if order.read_text() == STICKY:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            time.sleep(0.05)
        return run(feeds)

    runner.run = breakable  # type: ignore[method-assign]
    engine.open = opening  # type: ignore[method-assign]
    return engine


def told_by(order: Path) -> Path:
    """Return the file in which an engine tells what became of the order to break."""
    return order.with_suffix(".told")


def left_alone_s(order: Path) -> float | None:
    """Return the seconds for which a broken engine was asked for leases, from its first forward on.

    None: it met no forward, so that nothing can be said.
    """
    told = told_by(order)
    if not told.exists():
        return None
    times = [float(line) for line in told.read_text().split()]
    return times[-1] - times[0]

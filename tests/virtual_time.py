"""An event loop whose clock stands still while anything can run, and jumps to the next timer."""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable
from typing import Any

import pytest

from rapid.speculation.pace.controller import Controller
from rapid.threads import Threads


class _JumpingSelector(selectors.SelectSelector):
    """Instead of waiting it moves the clock on."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise RuntimeError("everything waits for something that no one will do")
            self.now += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop that takes no time: sleeping is free, and what runs in threads runs at once."""

    def __init__(self) -> None:
        self.selector = _JumpingSelector()
        super().__init__(self.selector)
        self._clock_resolution = 1e-6

    def time(self) -> float:
        return self.selector.now

    def run_in_executor(self, _: Any, function: Callable[..., Any], *args: Any) -> Any:
        ended = self.create_future()
        try:
            ended.set_result(function(*args))
        except Exception as error:
            ended.set_exception(error)
        return ended


async def _at_once(_: Threads, tenant: str, function: Any, *args: Any, **settings: Any) -> Any:
    return function(*args, **settings)


@pytest.fixture
def virtual_loop(monkeypatch: pytest.MonkeyPatch) -> VirtualLoop:
    """A loop by whose clock all code of the process goes."""
    loop = VirtualLoop()
    monkeypatch.setattr(time, "monotonic", loop.time)
    monkeypatch.setitem(Controller.__init__.__kwdefaults__, "clock", loop.time)
    monkeypatch.setattr(Threads, "run", _at_once)
    return loop

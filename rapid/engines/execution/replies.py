"""Futures that one thread settles and an event loop awaits."""

from __future__ import annotations

import asyncio
import contextlib


class Reply:
    """Future of the running event loop that any thread may settle, once."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[object] = self._loop.create_future()

    def settle(self, result: object = None, error: Exception | None = None) -> None:
        """Set the result or the error; no-op if the future is done or its loop is closed."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._set, result, error)

    def _set(self, result: object, error: Exception | None) -> None:
        if self.future.done():
            return
        if error is None:
            self.future.set_result(result)
        else:
            self.future.set_exception(error)

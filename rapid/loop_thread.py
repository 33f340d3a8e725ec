"""An event loop in a thread of its own, for callers that block."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable
from typing import Literal, Self, TypeVar

from rapid.errors import RapidError

Result = TypeVar("Result")


class LoopThread:
    """An event loop that runs while the context is open; its end cancels what is left on it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="rapid-pair", daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> Literal[False]:
        self.run(_cancel_all())
        self.run(self._loop.shutdown_default_executor())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        return False

    def run(self, work: Awaitable[Result]) -> Result:
        """Run `work` on the loop and wait for its result; an interrupted wait cancels it.

        Raises:
            RapidError: The loop has ended.
        """
        if not self._thread.is_alive():
            raise RapidError("this pair is closed: open another one")

        async def awaited() -> Result:
            return await work

        waiting = asyncio.run_coroutine_threadsafe(awaited(), self._loop)
        try:
            return waiting.result()
        except BaseException:
            waiting.cancel()
            raise


async def _cancel_all() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)

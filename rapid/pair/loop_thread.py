"""An event loop in a thread of its own, for callers that block."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import CancelledError, Future
from typing import Literal, Self, TypeVar

from rapid.errors import RapidError

Result = TypeVar("Result")


class LoopThread:
    """An event loop that runs while the context is open; its end cancels what is left on it.

    Attributes:
        is_closed: Whether the context has ended, or is about to: nothing new is taken.
    """

    def __init__(self) -> None:
        self.is_closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="rapid-pair", daemon=True
        )
        self._taking = threading.Lock()  # what is taken before the end is cancelled by it

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> Literal[False]:
        with self._taking:
            self.is_closed = True
        for work in (
            _cancel_all,
            self._loop.shutdown_asyncgens,
            self._loop.shutdown_default_executor,
        ):
            self._begin(work).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        return False

    def run(self, work: Callable[[], Awaitable[Result]]) -> Result:
        """Run `work` on the loop and wait for its result; an interrupted wait cancels it.

        It is called on the loop as well: an asynchronous generator belongs to the loop of the
        thread that first takes from it.

        Raises:
            RapidError: The loop has ended, before `work` began or before its result was there.
        """
        with self._taking:
            if self.is_closed:
                raise _make_closed_error()
            waiting = self._begin(work)
        try:
            return waiting.result()
        except CancelledError:
            if self.is_closed:
                raise _make_closed_error() from None
            raise
        except BaseException:
            waiting.cancel()
            raise

    def _begin(self, work: Callable[[], Awaitable[Result]]) -> Future[Result]:
        async def wait() -> Result:
            return await work()

        return asyncio.run_coroutine_threadsafe(wait(), self._loop)


def _make_closed_error() -> RapidError:
    return RapidError("this pair is closed: open another one")


async def _cancel_all() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)

"""Threads for the long calls of requests: few at once, in the tenants' turns."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from rapid.answering.turns import Turns

Args = ParamSpec("Args")
Result = TypeVar("Result")


class Threads:
    """A few threads that run calls of all requests of a process.

    A request that is cancelled while it waits for a thread is never begun. A call that runs cannot
    be interrupted, so it keeps its thread until it returns.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        """Create the threads, which start when they are needed.

        Args:
            num_threads: Most calls at once.
            name: Start of the threads' names.
        """
        self._turns = Turns(num_threads)
        self._threads = ThreadPoolExecutor(num_threads, name)

    def close(self) -> None:
        """End the threads once the calls that run have returned; calls that wait are dropped."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    async def run(
        self,
        tenant: str,
        function: Callable[Args, Result],
        *args: Args.args,
        **kwargs: Args.kwargs,
    ) -> Result:
        """Return what `function` returns in a thread, which is waited for in the tenant's line."""
        await self._turns.enter(tenant)
        loop = asyncio.get_running_loop()

        def ended(_: Future[Result]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(self._turns.leave)

        call = self._threads.submit(functools.partial(function, *args, **kwargs))
        call.add_done_callback(ended)
        return await asyncio.wrap_future(call)

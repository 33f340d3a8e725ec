"""Threads for the long calls of requests: few at once, in the tenants' turns.

Next is the tenant whose calls have taken the fewest seconds, by weight (`rapid.fair_queue`).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Thread
from typing import ParamSpec, TypeVar

from rapid.fair_queue import FairQueue

Args = ParamSpec("Args")
Result = TypeVar("Result")


def begin(function: Callable[[], Result]) -> Future[Result]:
    """Call a function in a thread of its own, which keeps no process from ending."""
    answer: Future[Result] = Future()

    def call() -> None:
        try:
            answer.set_result(function())
        except BaseException as error:
            answer.set_exception(error)

    Thread(target=call, name="rapid-begin", daemon=True).start()
    return answer


class Threads:
    """A few threads that run calls of all requests of a process.

    A request that is cancelled while it waits for a thread is never begun. A call that runs cannot
    be interrupted, so it keeps its thread until it returns. Threads start when they are needed;
    `name` is the start of their names.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._turns = FairQueue(num_threads)
        self._threads = ThreadPoolExecutor(num_threads, name)
        self._weights: dict[str, int] = {}  # of tenants with other weights than 1

    def weigh(self, tenant: str, weight: int) -> None:
        """Give a tenant's calls, from now on, so many shares of another's."""
        if weight == 1:
            self._weights.pop(tenant, None)
        else:
            self._weights[tenant] = weight

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
        await self._turns.enter(tenant, self._weight(tenant))
        return await self._call(tenant, functools.partial(function, *args, **kwargs))

    async def run_steps(self, tenant: str, step: Callable[[], bool]) -> None:
        """Call `step` in a thread until it returns false.

        Between two calls other tenants have their turns, and this one begins nothing else. If the
        caller is cancelled, a call that runs is the last.
        """
        weight = self._weight(tenant)
        with self._turns.stay(tenant, weight):
            await self._turns.enter(tenant, weight)
            while await self._call(tenant, step, keeps_place=True):
                await self._turns.give_way(tenant, weight)
            self._turns.leave()

    def _weight(self, tenant: str) -> int:
        return self._weights.get(tenant, 1)

    async def _call(
        self, tenant: str, function: Callable[[], Result], *, keeps_place: bool = False
    ) -> Result:
        """Call a function in a thread and charge its time; its place is left when it has returned.

        With `keeps_place` it is left only where the call fails or is given up.
        """
        loop = asyncio.get_running_loop()

        def tell(what: Callable[..., None], *arguments: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(what, *arguments)

        def measure() -> Result:
            began = time.perf_counter()
            try:
                return function()
            finally:
                tell(self._turns.charge, tenant, time.perf_counter() - began)

        def end(_: Future[Result]) -> None:
            tell(self._turns.leave)

        call = self._threads.submit(measure)
        if not keeps_place:
            call.add_done_callback(end)
        try:
            return await asyncio.wrap_future(call)
        except BaseException:
            if keeps_place:
                call.add_done_callback(end)
            raise

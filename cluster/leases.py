"""Leases on engines, each held by an open stream to the replica that owns the engine.

The first item of the stream says that a replica has taken the request, which then waits for room in
its engine; the second is the handle of the engine. The stream stays open until the lease ends: so
the autoscaler counts a lease as one ongoing request, a draining replica waits for it, and the lease
of a caller that dies ends. All later calls go to the engine's actor, and take no slot.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import random
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.serve.handle import DeploymentHandle

from cluster.affinity import find_router
from cluster.circuit_breaker import CIRCUITS
from cluster.remote_failures import FailureKind, failure_of
from cluster.reports import EngineWatch
from cluster.serve_internals import transport
from rapid.errors import EngineFailed, LeaseNotFound, Overloaded, RapidError, TargetUnavailable
from rapid.messages import LeaseRequest

logger = logging.getLogger(__name__)

Turn = Callable[[], contextlib.AbstractAsyncContextManager[None]]

# Then the engine is killed; with the check's period and a new lease below 15 s.
_PING_TIMEOUT_S = 8.0
_RETRY_S = 0.2  # between two attempts to lease from a pool whose replica died
_MAX_GRPC_PROMPT_BYTES = 3 * 2**20  # of gRPC's 4 MiB; committed tokens and settings come on top
_FIRST_LOOK_S = 0.2  # after which a request for a drafter looks whether the pool has a replica
_LOOK_S = 1.0  # between two looks whether a lease would open elsewhere, more or less by half


@dataclass(frozen=True, slots=True)
class Granted:
    """The second item of a lease's stream: an engine, and the unique id of its replica."""

    engine: ActorHandle
    replica: str


@dataclass(frozen=True, slots=True)
class HeldLease:
    """A lease on an engine, as `hold` yields it; it took `queued_s` seconds to get."""

    lease_id: str
    engine: ActorHandle
    queued_s: float
    replica: str = ""

    async def is_over(self, call: asyncio.Future[Any], *, after_s: float, silent_s: float) -> bool:
        """Wait for a call of the engine; return whether it is over, or else the engine gave a sign.

        The call may take as long as it needs while its engine lives. After `after_s` seconds the
        engine is asked for a sign of life, which is waited for `silent_s` seconds at most.

        Raises:
            TimeoutError: The engine gave no sign of life.
        """
        if (await asyncio.wait({call}, timeout=after_s))[0]:
            return True
        sign = asyncio.ensure_future(self.engine.ping.remote())
        sign.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            first, _ = await asyncio.wait(
                {call, sign}, timeout=silent_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            sign.cancel()
        if not first:
            raise TimeoutError
        return call.done()

    def blame(self) -> None:
        """Have this process's next leases taken elsewhere, as this one's engine failed."""
        CIRCUITS.put(self.replica)


class LeasingReplica:
    """A Serve replica that owns one engine actor and leases it out.

    The engine's actor class has ``open(request)``, ``wait_closed(lease_id)``, ``renew(lease_id)``,
    ``release(lease_id)``, ``ping()`` and ``live()``, which returns when the engine is closed. It
    ends a lease that is neither used nor renewed. Replica and engine die with each other.
    """

    def __init__(self, start_engine: Callable[[], ActorHandle], replica: str = "") -> None:
        """Start the engine; `replica` is the unique id of this replica."""
        self._engine = start_engine()
        self._replica = replica
        self._fate: asyncio.Task[None] | None = None
        self._watch = EngineWatch(self._engine)

    async def lease(self, request: LeaseRequest) -> AsyncIterator[Granted | None]:
        """Yield None, then the engine once it has room, and wait for the end of the lease."""
        with self._watch.counting(request):
            try:
                yield None
                await self._engine.open.remote(request)
                yield Granted(self._engine, self._replica)
                await self._engine.wait_closed.remote(request.lease_id)
            finally:  # also if cancelled in the queue: release undoes an open that arrives later
                self._engine.release.remote(request.lease_id)

    async def record_routing_stats(self) -> dict[str, Any]:
        """Return the engine's latest report for Serve's routers."""
        return self._watch.routing_stats()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the numbers of the engine's latest report for Serve's autoscaler."""
        return self._watch.autoscaling_stats()

    async def check_health(self) -> None:
        """Raise an error if the engine is gone; the first call waits until its model is loaded."""
        ping = self._engine.ping.remote()
        if self._fate is None:
            await ping
            self._fate = asyncio.create_task(self._share_fate())
            self._watch.start()
            return
        try:
            async with asyncio.timeout(_PING_TIMEOUT_S):
                await ping
        except TimeoutError:
            self._die(f"the engine has not answered within {_PING_TIMEOUT_S:g} s")

    async def _share_fate(self) -> None:
        try:
            await self._engine.live.remote()
        except Exception as error:
            why = f"the engine died: {error}"
        else:
            why = "the engine closed"
        self._die(why)

    def _die(self, why: str) -> None:
        # Serve replaces a dead replica at once, but an unhealthy one slowly.
        logger.error("%s, and this replica ends with it", why)
        ray.kill(self._engine)
        os._exit(1)


@contextlib.asynccontextmanager
async def hold(
    pool: DeploymentHandle,
    request: LeaseRequest,
    *,
    timeout_s: float,
    renew_every_s: float,
    lost: type[RapidError] = TargetUnavailable,
    turn: Turn = contextlib.nullcontext,
    may_rest: bool = False,
) -> AsyncIterator[HeldLease]:
    """Hold a lease for the duration of the context: renew it, and always release it.

    Args:
        timeout_s: Longest wait for room, in seconds.
        renew_every_s: Seconds between renewals, well below the engine's time-to-live.
        lost: Error class for replicas that died or cannot be reached.
        turn: Context to be in until a replica has taken the request. Serve's own queue is first
            come, first served, so fairness is up to whoever lets requests into it.
        may_rest: Whether to give up, with `lost`, on a pool that has no replica. Having been asked
            for a lease is what makes Serve start one.

    Raises:
        Overloaded: No replica had room within `timeout_s`, or the pool's queue is full.
        RapidError: `lost`, or the engine refused the request. Entering raises nothing else.
    """
    started = time.monotonic()
    lease_id, stream, granted = await _acquire(pool, request, timeout_s, lost, turn, may_rest)
    engine = granted.engine
    lease = HeldLease(lease_id, engine, time.monotonic() - started, granted.replica)
    renewal = asyncio.create_task(_renew(lease, renew_every_s))
    try:
        yield lease
    finally:  # no await here: a generator that is being closed must run to its end
        renewal.cancel()
        engine.release.remote(lease.lease_id)
        stream.cancel()


@contextlib.asynccontextmanager
async def hold_beside(
    first: HeldLease,
    request: LeaseRequest,
    *,
    timeout_s: float,
    renew_every_s: float,
    lost: type[RapidError],
) -> AsyncIterator[HeldLease]:
    """Hold a second lease on the engine of `first`, for an engine that both drafts and verifies.

    The lease has no stream of its own and takes no slot of the replica, as it ends with `first`.
    Arguments and errors are those of `hold`.
    """
    started = time.monotonic()
    engine = first.engine
    try:
        try:
            async with asyncio.timeout(timeout_s):
                await engine.open.remote(request)
        except TimeoutError:
            raise Overloaded(f"The engine is full: no room within {timeout_s:g} s.") from None
        except Exception as error:
            raise failure_of(error).as_rapid_error("engine", lost) from None
        lease = HeldLease(request.lease_id, engine, time.monotonic() - started, first.replica)
        renewal = asyncio.create_task(_renew(lease, renew_every_s))
        try:
            yield lease
        finally:
            renewal.cancel()
    finally:  # also undoes an open that arrives later
        engine.release.remote(request.lease_id)


async def _acquire(
    pool: DeploymentHandle,
    request: LeaseRequest,
    timeout_s: float,
    lost: type[RapidError],
    turn: Turn,
    may_rest: bool,
) -> tuple[str, Any, Granted]:
    lease = pool.options(
        stream=True,
        method_name="lease",
        session_id=request.affinity,
        # Through Ray's objects the lease of a killed caller would last for its time to live.
        **transport(by_reference=request.prompt_ids.nbytes > _MAX_GRPC_PROMPT_BYTES),
    )
    name = pool.deployment_name
    attempts = itertools.count()
    death: BaseException | None = None
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                # Each attempt has its own id: the release of a failed one must not undo the next.
                named = replace(request, lease_id=f"{request.lease_id}.{next(attempts)}")
                stream: Any = None
                try:
                    async with turn():
                        stream = lease.remote(named)
                        await _next(pool, named, stream, lost if may_rest else None)
                    granted = await _next(pool, named, stream, lost if may_rest else None)
                    assert granted is not None
                    return named.lease_id, stream, granted
                except _OpensElsewhere:
                    stream.cancel()
                    continue
                except BaseException as error:
                    if stream is not None:
                        stream.cancel()
                    failure = failure_of(error)
                    is_of_engine = isinstance(failure.cause, EngineFailed)
                    if not (failure.is_of_one_replica or is_of_engine):
                        raise
                    logger.warning("lease %s: the replica failed: %s", named.lease_id, error)
                    death = error
                await asyncio.sleep(_RETRY_S)
    except TimeoutError:
        if death is not None:
            raise lost(f"The {name} pool has no replica that lives.") from death
        router = find_router(pool.deployment_id)
        if router is not None and (empty_s := router.empty_s) is not None:
            raise Overloaded(
                f"The {name} pool is still loading ({empty_s:.0f} s so far): it has no replica "
                "that takes requests yet."
            ) from None
        raise Overloaded(f"The {name} pool is full: no room within {timeout_s:g} s.") from None
    except Exception as error:
        raise failure_of(error).as_rapid_error(f"{name} pool", lost) from None


async def _next(
    pool: DeploymentHandle, request: LeaseRequest, stream: Any, resting: type[RapidError] | None
) -> Granted | None:
    """Return the next item of a lease's stream: None from a replica, then what it grants.

    Raises `_OpensElsewhere`, or `resting` if that is given and the pool has no replica.
    """
    coming = asyncio.ensure_future(anext(stream))
    coming.add_done_callback(lambda done: done.cancelled() or done.exception())
    look_s = _FIRST_LOOK_S
    try:
        while not (await asyncio.wait({coming}, timeout=look_s))[0]:
            router = find_router(pool.deployment_id)
            if router is not None and resting and router.is_empty:
                raise resting(f"The {pool.deployment_name} pool has no replica yet.")
            if router is not None and router.can_move(request):
                raise _OpensElsewhere
            look_s = _LOOK_S * random.uniform(0.5, 1.5)
        item: Granted | None = coming.result()
        return item
    finally:
        coming.cancel()


class _OpensElsewhere(Exception):
    """A lease that waits on one replica would open on another at once."""


async def _renew(lease: HeldLease, every_s: float) -> None:
    while True:
        await asyncio.sleep(every_s)
        try:
            await lease.engine.renew.remote(lease.lease_id)
        except Exception as error:
            failure = failure_of(error)
            logger.info("lease %s: not renewed: %s", lease.lease_id, failure.cause)
            if failure.kind is FailureKind.DIED or isinstance(failure.cause, LeaseNotFound):
                return

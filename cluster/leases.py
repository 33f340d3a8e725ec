"""Leases on engines, each held by an open stream to the replica that owns the engine.

The first item of the stream is the handle of the engine; then the stream stays open without further
items until the lease ends. So the autoscaler counts a live sequence as one ongoing request, a
draining replica waits for it, and the lease of a caller that dies ends with its stream. All later
calls go to the engine's actor directly and take no slot of the replica.

The stream is gRPC (``_by_reference=False``): over the actor transport the lease of a killed caller
would last until its time-to-live. A prompt that is too long for a gRPC message takes the actor
transport nevertheless.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

from ray.actor import ActorHandle
from ray.serve.handle import DeploymentHandle

from cluster.failures import FailureKind, failure_of
from rapid.errors import LeaseNotFound, Overloaded, RapidError, TargetUnavailable
from rapid.messages import LeaseRequest

logger = logging.getLogger(__name__)

_PING_TIMEOUT_S = 10.0
_RETRY_S = 0.2
_MAX_GRPC_PROMPT_BYTES = 3 * 2**20  # of gRPC's 4 MiB; committed tokens and settings come on top


@dataclass(frozen=True, slots=True)
class HeldLease:
    """A lease on an engine, as `hold` yields it.

    Attributes:
        lease_id: Id to pass in calls to the engine.
        engine: Handle of the engine's actor.
        queued_s: Seconds that it took to get the lease.
    """

    lease_id: str
    engine: ActorHandle
    queued_s: float


class LeasingReplica:
    """A Serve replica that owns one engine actor and leases it out.

    The engine's actor class has ``open(request)``, ``wait_closed(lease_id)``, ``renew(lease_id)``,
    ``release(lease_id)``, ``ping()`` and ``live()``, which never returns. The engine ends a lease
    that is neither used nor renewed. The actor is the replica's child; each dies with the other.
    """

    def __init__(self, start_engine: Callable[[], ActorHandle]) -> None:
        self._engine = start_engine()
        self._fate: asyncio.Task[None] | None = None

    async def lease(self, request: LeaseRequest) -> AsyncIterator[ActorHandle]:
        """Yield the engine once it has room for `request`, then wait for the end of the lease."""
        try:
            await self._engine.open.remote(request)
            yield self._engine
            await self._engine.wait_closed.remote(request.lease_id)
        finally:  # also if cancelled in the queue: release undoes an open that arrives later
            self._engine.release.remote(request.lease_id)

    async def check_health(self) -> None:
        """Raise an error if the engine is gone; the first call waits until its model is loaded."""
        ping: Awaitable[object] = self._engine.ping.remote()
        if self._fate is not None:
            await asyncio.wait_for(ping, _PING_TIMEOUT_S)
            return
        await ping
        self._fate = asyncio.create_task(self._share_fate())

    async def _share_fate(self) -> None:
        """Exit the process when the engine dies.

        Serve replaces a dead replica at once, but an unhealthy one slowly.
        """
        try:
            await self._engine.live.remote()
        except Exception as error:
            if not failure_of(error).is_loss:
                raise
            logger.error("the engine died, and this replica with it: %s", error)
            os._exit(1)


@contextlib.asynccontextmanager
async def hold(
    pool: DeploymentHandle,
    request: LeaseRequest,
    *,
    timeout_s: float,
    renew_every_s: float,
    lost: type[RapidError] = TargetUnavailable,
) -> AsyncIterator[HeldLease]:
    """Hold a lease for the duration of the context: renew it, and always release it.

    Args:
        pool: Deployment of leasing replicas.
        request: The request for a lease.
        timeout_s: Longest wait for room, in seconds.
        renew_every_s: Seconds between renewals, well below the engine's time-to-live.
        lost: Error class for replicas that died or cannot be reached.

    Raises:
        Overloaded: No replica had room within `timeout_s`, or the pool's queue is full. Its
            ``retry_after_s`` is `timeout_s`, because the end of the running answers is not known.
        RapidError: `lost`, or the engine refused the request. Entering raises nothing else.
    """
    started = time.monotonic()
    lease_id, stream, engine = await _acquire(pool, request, timeout_s, lost)
    lease = HeldLease(lease_id, engine, time.monotonic() - started)
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

    The lease has no stream of its own, as it ends with `first`. So it does not wait for one of the
    replica's slots, which may be full of requests that wait for their first lease.

    Args:
        first: The request's first lease.
        request: The request for the second lease.
        timeout_s: Longest wait for room, in seconds.
        renew_every_s: Seconds between renewals, well below the engine's time-to-live.
        lost: Error class for an engine that died.

    Raises:
        Overloaded: There was no room within `timeout_s`.
        RapidError: `lost`, or the engine refused the request. Entering raises nothing else.
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
        lease = HeldLease(request.lease_id, engine, time.monotonic() - started)
        renewal = asyncio.create_task(_renew(lease, renew_every_s))
        try:
            yield lease
        finally:
            renewal.cancel()
    finally:  # also undoes an open that arrives later
        engine.release.remote(request.lease_id)


async def _acquire(
    pool: DeploymentHandle, request: LeaseRequest, timeout_s: float, lost: type[RapidError]
) -> tuple[str, Any, ActorHandle]:
    lease = pool.options(
        stream=True,
        method_name="lease",
        session_id=request.affinity,
        _by_reference=request.prompt_ids.nbytes > _MAX_GRPC_PROMPT_BYTES,
    )
    name = pool.deployment_name
    attempts = itertools.count()
    death: BaseException | None = None
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                # Each attempt has its own id: the release of a failed one must not undo the next.
                named = replace(request, lease_id=f"{request.lease_id}.{next(attempts)}")
                stream = lease.remote(named)
                try:
                    return named.lease_id, stream, await anext(stream)
                except BaseException as error:
                    stream.cancel()
                    if not failure_of(error).is_of_one_replica:
                        raise
                    logger.warning("lease %s: the replica died: %s", named.lease_id, error)
                    death = error
                await asyncio.sleep(_RETRY_S)
    except TimeoutError:
        if death is not None:
            raise lost(f"The {name} pool has no replica that lives.") from death
        raise Overloaded(
            f"The {name} pool is full: no room within {timeout_s:g} s.", timeout_s
        ) from None
    except Exception as error:
        failure = failure_of(error)
        if failure.kind is FailureKind.SATURATED:
            raise Overloaded(f"The {name} pool's queue is full.", timeout_s) from None
        raise failure.as_rapid_error(f"{name} pool", lost) from None


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

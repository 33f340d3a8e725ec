"""An engine as a Ray actor: the child of a pool's replica, called by whoever holds a lease.

The actor adds four things to `rapid.engines.engine.Engine`: a release that also undoes an ``open``
still in the queue or on its way, and whatever was opened beside the lease; the rule that a
``draft`` whose engine or lease failed is a lost drafter; metrics; and a name under which readiness
finds the engines of all replicas.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING

import ray
from ray import serve
from ray.actor import ActorHandle

from cluster.placement import PoolConfig, engine_options
from deployments.metrics import EngineMetrics
from rapid.config import EngineConfig
from rapid.errors import DrafterUnavailable, EngineFailed, LeaseNotFound
from rapid.messages import (
    DraftBlock,
    EngineStatus,
    LeaseRequest,
    PrefillReceipt,
    TargetLogits,
    Verdict,
)

if TYPE_CHECKING:
    from rapid.engines.engine import Engine

NAMESPACE = "rapid"
_CONCURRENT_CALLS = 1000
_RELEASES_REMEMBERED = 10_000


EngineFactory = Callable[[EngineConfig], "Engine"]


def load_engine(config: EngineConfig) -> Engine:
    """Load the model; torch and transformers are imported here, in the engine's own process."""
    from rapid.engines.engine import Engine
    from rapid.engines.forward.loading import load_model

    return Engine(load_model(config, with_pools=True), config)


class EngineActor:
    """One engine behind Ray; every method may run many times at once on one event loop."""

    def __init__(
        self, config: EngineConfig, load: EngineFactory = load_engine, pool: str = "target"
    ) -> None:
        self._engine = load(config)
        self._metrics = EngineMetrics(pool)
        self._opening: dict[str, asyncio.Task[None]] = {}
        self._companions: dict[str, set[str]] = {}
        self._released: dict[str, None] = {}  # in order; a lease's id is never used again

    async def ping(self) -> int:
        """Answer with the process id: the model is loaded, the event loop turns.

        Raises:
            EngineFailed: the engine closed.
        """
        self._engine.check_running()
        return os.getpid()

    async def live(self) -> None:
        """Never return: who waits for this learns of the actor's death at once."""
        await asyncio.Event().wait()

    async def open(self, request: LeaseRequest) -> None:
        """Wait for room, then hold it under ``request.lease_id``.

        Raises:
            LeaseNotFound: it was released meanwhile, or before: calls of an actor on an event loop
                may overtake each other, and ``open`` carries the long prompt.
        """
        lease_id = request.lease_id
        self._check_wanted(lease_id)
        if request.beside is not None:
            self._check_wanted(request.beside)
            self._companions.setdefault(request.beside, set()).add(lease_id)
        opening = asyncio.ensure_future(self._engine.open(request))
        self._opening[lease_id] = opening
        try:
            await opening
        finally:
            del self._opening[lease_id]
        if lease_id in self._released:
            self._engine.release(lease_id)
        self._metrics.report(self._engine.status())
        self._check_wanted(lease_id)

    def _check_wanted(self, lease_id: str) -> None:
        if lease_id in self._released:
            raise LeaseNotFound(f"Lease {lease_id!r} was given up before it was opened.")

    async def wait_closed(self, lease_id: str) -> None:
        """Return when the lease is over: released, or silent for its time-to-live.

        However it ended, it counts as released from then on, and so does what was opened beside it.
        """
        with contextlib.suppress(LeaseNotFound):
            await self._engine.wait_closed(lease_id)
        await self.release(lease_id)
        self._metrics.report(self._engine.status())

    async def release(self, lease_id: str) -> None:
        """Free a lease, queued, held, gone or still to come, and those beside it."""
        for each in (lease_id, *self._companions.pop(lease_id, ())):
            self._released[each] = None
            if opening := self._opening.get(each):
                opening.cancel()
            self._engine.release(each)
        while len(self._released) > _RELEASES_REMEMBERED:
            del self._released[next(iter(self._released))]

    async def forgo_companion(self, lease_id: str) -> None:
        """Keep no room for a second lease beside this one: none will come."""
        self._engine.forgo_companion(lease_id)

    async def renew(self, lease_id: str) -> None:
        """The caller is alive."""
        self._engine.renew(lease_id)

    async def prefill(self, lease_id: str) -> PrefillReceipt:
        """Put the prompt's KV in place."""
        receipt = await self._engine.prefill(lease_id)
        self._metrics.count(receipt)
        return receipt

    async def draft(
        self, lease_id: str, choice: int, verdict: Verdict | None, num_tokens: int
    ) -> DraftBlock:
        """The next block; it travels to the target by reference.

        Raises:
            DrafterUnavailable: the engine failed, or the lease is gone. The target's call fails
                with it, and must be told from the target's own failures. Anything else that
                drafting raises is a bug, which no answer should go on after: it stays as it is.
        """
        try:
            return await self._engine.draft(lease_id, choice, verdict, num_tokens)
        except (EngineFailed, LeaseNotFound) as error:
            raise DrafterUnavailable(f"The drafter failed: {error}") from error

    async def verify(self, lease_id: str, choice: int, block: DraftBlock) -> Verdict:
        """Judge a block and commit."""
        return await self._engine.verify(lease_id, choice, block)

    async def score(self, lease_id: str, choice: int, block: DraftBlock) -> TargetLogits:
        """The target's logits of a block, to be judged elsewhere and then committed."""
        return await self._engine.score(lease_id, choice, block)

    async def commit(self, lease_id: str, verdict: Verdict) -> None:
        """Commit what was judged elsewhere."""
        await self._engine.commit(lease_id, verdict)

    async def decode(self, lease_id: str, choice: int, num_tokens: int) -> Verdict:
        """Commit tokens of this model alone."""
        return await self._engine.decode(lease_id, choice, num_tokens)

    async def status(self) -> EngineStatus:
        """The ledger."""
        return self._engine.status()

    async def check_integrity(self) -> None:
        """Raise when the ledger does not balance."""
        self._engine.check_integrity()


def start_engine(
    config: EngineConfig, pool: PoolConfig, load: EngineFactory = load_engine
) -> ActorHandle:
    """Start the engine of the Serve replica that calls this; it dies with the replica."""
    replica = serve.get_replica_context()
    name = f"{replica.app_name}/{replica.deployment}/{uuid.uuid4().hex[:8]}"
    return (
        ray.remote(EngineActor)
        .options(
            name=name,
            namespace=NAMESPACE,
            max_concurrency=_CONCURRENT_CALLS,
            **engine_options(pool),
        )
        .remote(config, load, replica.deployment.lower())
    )


def engines_of(app: str) -> dict[str, ActorHandle]:
    """The engines of an application as ``app/deployment/replica``; blocks on Ray's directory."""
    prefix = f"{app}/"
    engines: dict[str, ActorHandle] = {}
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if actor["namespace"] == NAMESPACE and actor["name"].startswith(prefix):
            with contextlib.suppress(ValueError):  # gone since it was listed
                engines[actor["name"]] = ray.get_actor(actor["name"], namespace=NAMESPACE)
    return engines

"""An engine as a Ray actor: the child of a pool's replica, called by whoever holds a lease.

The actor adds three things to `rapid.engines.engine.Engine`: a release that also undoes an ``open``
still in the queue, the rule that a failed ``draft`` is a lost drafter, and a name under which
readiness finds the engines of all replicas.
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
from rapid.config import EngineConfig
from rapid.errors import DrafterUnavailable, LeaseNotFound, RapidError
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


EngineFactory = Callable[[EngineConfig], "Engine"]


def load_engine(config: EngineConfig) -> Engine:
    """Load the model; torch and transformers are imported here, in the engine's own process."""
    from rapid.engines.engine import Engine
    from rapid.engines.loading import load_model

    return Engine(load_model(config), config)


class EngineActor:
    """One engine behind Ray; every method may run many times at once on one event loop."""

    def __init__(self, config: EngineConfig, load: EngineFactory = load_engine) -> None:
        self._engine = load(config)
        self._opening: dict[str, asyncio.Task[None]] = {}

    async def ping(self) -> int:
        """Answer with the process id: the model is loaded and the event loop turns."""
        return os.getpid()

    async def live(self) -> None:
        """Never return: who waits for this learns of the actor's death at once."""
        await asyncio.Event().wait()

    async def open(self, request: LeaseRequest) -> None:
        """Wait for room, then hold it under ``request.lease_id``."""
        opening = asyncio.ensure_future(self._engine.open(request))
        self._opening[request.lease_id] = opening
        try:
            await opening
            if request.lease_id not in self._opening:  # released in the meantime
                self._engine.release(request.lease_id)
                raise LeaseNotFound(f"Lease {request.lease_id!r} was given up while it waited.")
        finally:
            self._opening.pop(request.lease_id, None)

    async def wait_closed(self, lease_id: str) -> None:
        """Return when the lease is over: released, or silent for its time-to-live."""
        with contextlib.suppress(LeaseNotFound):
            await self._engine.wait_closed(lease_id)

    async def release(self, lease_id: str) -> None:
        """Free a lease, queued, held or gone."""
        if opening := self._opening.pop(lease_id, None):
            opening.cancel()
        self._engine.release(lease_id)

    async def renew(self, lease_id: str) -> None:
        """The caller is alive."""
        self._engine.renew(lease_id)

    async def prefill(self, lease_id: str) -> PrefillReceipt:
        """Put the prompt's KV in place."""
        return await self._engine.prefill(lease_id)

    async def draft(
        self, lease_id: str, choice: int, verdict: Verdict | None, num_tokens: int
    ) -> DraftBlock:
        """The next block; it travels to the target by reference.

        Raises:
            DrafterUnavailable: whatever went wrong. The target's call fails with it, and must be
                told from the target's own failures.
        """
        try:
            return await self._engine.draft(lease_id, choice, verdict, num_tokens)
        except RapidError as error:
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
        .remote(config, load)
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

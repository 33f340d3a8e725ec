"""The engine as a Ray actor, a child of its pool's replica that leaseholders call directly.

The actor adds four things to `rapid.engines.engine.Engine`: a release that also cancels an ``open``
that is queued or still in transit, and releases the leases opened beside it; the rule that a
``draft`` whose engine or lease failed raises `DrafterUnavailable`; metrics; and a name under which
readiness finds the engines of all replicas.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import uuid
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, cast

import ray
from ray import serve
from ray.actor import ActorHandle
from ray.util.placement_group import get_current_placement_group

from cluster.placement import PoolConfig, engine_options
from deployments.logs import about_lease, engine_logging
from deployments.metrics import EngineMetrics
from deployments.pools.nodes import Nodes, in_bundle
from deployments.pools.shared_calls import Asked, EndedCall, Mailboxes
from library.accounts.callers import TENANT
from rapid.engine_status import EngineStatus, Erasure, LeaseUsage
from rapid.errors import DrafterUnavailable, EngineFailed, LeaseNotFound
from rapid.messages import (
    DraftBlock,
    LeaseRequest,
    PrefillReceipt,
    ReadSoFar,
    TargetLogits,
    Verdict,
)
from rapid.vllm_config import AnyEngineConfig, VllmConfig

if TYPE_CHECKING:
    from rapid.engines.engine import Engine

logger = logging.getLogger(__name__)

NAMESPACE = "rapid"
_CONCURRENT_CALLS = 1000  # calls at one engine actor at once
_RELEASES_REMEMBERED = 10_000  # so that an `open` that arrives after its release is refused


EngineFactory = Callable[..., "Engine"]


def load_engine(config: AnyEngineConfig, nodes: Nodes | None = None) -> Engine:
    """Load an engine and take its first steps.

    torch and transformers, or vLLM, are imported here, in the engine's own process.

    Args:
        config: The engine's settings.
        nodes: The nodes of its processes; None for one.
    """
    if isinstance(config, VllmConfig):
        from rapid.engines.vllm_engine import open_vllm

        return cast("Engine", open_vllm(config))  # as far as a drafter's pool calls it
    from rapid.engines.engine import Engine
    from rapid.engines.parallel.leading import load_replica
    from rapid.engines.warming import warm_up

    return warm_up(Engine(load_replica(config, with_pools=True, machines=nodes), config), config)


class EngineActor:
    """A Ray actor that runs one engine; calls of its methods overlap on one event loop."""

    def __init__(
        self,
        config: AnyEngineConfig,
        load: EngineFactory = load_engine,
        pool: str = "target",
        model_name: str = "rapid",
        start_logging: Callable[[], None] = lambda: None,
    ) -> None:
        """Load the engine.

        Args:
            config: The engine's settings.
            load: Function that makes the engine.
            pool: The kind of pool that the engine belongs to; a label of metrics.
            model_name: The model name that requests give, or the name of a shared pool; a label of
                metrics.
            start_logging: Function that configures the log of this process.
        """
        start_logging()
        self._engine = load(config)
        self._metrics = EngineMetrics(model_name, pool)
        self._mailboxes = Mailboxes(self)
        self._opening: dict[str, asyncio.Task[None]] = {}
        self._tenants: dict[str, str] = {}  # of leases, oldest first; some end unreleased
        self._companions: dict[str, set[str]] = {}
        self._released: dict[str, None] = {}  # oldest first; lease ids are never reused

    async def ping(self) -> int:
        """Return the process id, which shows that the model is loaded and the event loop runs.

        Raises:
            EngineFailed: If the engine is closed.
        """
        self._engine.check_running()
        return os.getpid()

    async def live(self) -> None:
        """Wait until the engine is closed; the pending call fails as soon as the actor dies."""
        await self._engine.until_closed()

    async def open(self, request: LeaseRequest) -> None:
        """Wait for room, then open the lease ``request.lease_id``.

        Raises:
            LeaseNotFound: If the lease was released meanwhile, or before: calls of an actor with an
                event loop may overtake each other, and ``open`` carries the long prompt.
        """
        lease_id = request.lease_id
        self._check_wanted(lease_id)
        self._tenants[lease_id] = request.terms.tenant
        self._note_tenant(lease_id)
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

    def _note_tenant(self, lease_id: str) -> None:
        """Have the log lines of this call name the tenant of its lease."""
        TENANT.set(self._tenants.get(lease_id))

    def _check_wanted(self, lease_id: str) -> None:
        if lease_id in self._released:
            raise LeaseNotFound(f"Lease {lease_id!r} was given up before it was opened.")

    async def wait_closed(self, lease_id: str) -> None:
        """Wait until the lease is released, or expires because it was not renewed.

        In both cases it then releases the lease and those opened beside it.
        """
        with contextlib.suppress(LeaseNotFound):
            await self._engine.wait_closed(lease_id)
        await self.release(lease_id)
        self._metrics.report(self._engine.status())

    async def release(self, lease_id: str) -> None:
        """Release a lease in any state, even before its ``open`` arrives, and those beside it."""
        for each in (lease_id, *self._companions.pop(lease_id, ())):
            self._released[each] = None
            self._tenants.pop(each, None)
            if opening := self._opening.get(each):
                opening.cancel()
            self._engine.release(each)
        for remembered in (self._released, self._tenants):
            while len(remembered) > _RELEASES_REMEMBERED:
                del remembered[next(iter(remembered))]

    async def settle(self, lease_id: str) -> LeaseUsage:
        """Return what a lease used since this was last asked; see `Engine.settle`."""
        return self._engine.settle(lease_id)

    async def forgo_companion(self, lease_id: str) -> None:
        """Free the room kept for a second lease beside this one, which will not be opened."""
        self._engine.forgo_companion(lease_id)

    async def renew(self, lease_id: str) -> None:
        """Restart a lease's time-to-live."""
        self._engine.renew(lease_id)

    async def prefill(self, lease_id: str) -> PrefillReceipt:
        """Prefill the lease's prompt."""
        self._note_tenant(lease_id)
        receipt = await self._engine.prefill(lease_id)
        self._metrics.count(receipt)
        logger.info(
            "lease %s: %d prompt tokens, %d of them from the cache",
            lease_id,
            receipt.num_tokens,
            receipt.num_cached_tokens,
            extra=about_lease(lease_id),
        )
        return receipt

    async def read_so_far(self, lease_id: str) -> ReadSoFar:
        """Return how many tokens of the lease's prompt have been read."""
        return self._engine.read_so_far(lease_id)

    async def draft(
        self, lease_id: str, choice: int, verdict: Verdict | None, num_tokens: int
    ) -> DraftBlock:
        """Draft the next block, which travels to the target by reference.

        Raises:
            DrafterUnavailable: If the engine failed or the lease is gone. The target's call fails
                with the same error, which must be distinct from the target's own failures. Any
                other error is a bug, after which no answer should continue: it is left as it is.
            EngineFailed: If the engine is closed and verifies for this lease as well.
        """
        self._note_tenant(lease_id)
        try:
            return await self._engine.draft(lease_id, choice, verdict, num_tokens)
        except (EngineFailed, LeaseNotFound) as error:
            if any(lease_id in beside for beside in self._companions.values()):
                self._engine.check_running()
            raise DrafterUnavailable(f"The drafter failed: {error}") from error

    async def verify(
        self, lease_id: str, choice: int, block: DraftBlock, witness_id: str | None = None
    ) -> Verdict:
        """Judge a block, with the witness's reading if there is one, and commit the verdict."""
        self._note_tenant(lease_id)
        witness = (self._engine, witness_id) if witness_id else None
        return await self._engine.verify(lease_id, choice, block, witness)

    @ray.method(num_returns=2)  # type: ignore[untyped-decorator]
    async def exchange(
        self, caller: str, calls: Sequence[Asked], blocks: Sequence[DraftBlock]
    ) -> tuple[list[EndedCall], list[DraftBlock]]:
        """Begin calls that travelled together, and return those that have ended."""
        return await self._mailboxes.exchange(caller, calls, blocks)

    async def score(self, lease_id: str, choice: int, block: DraftBlock) -> TargetLogits:
        """Return the target's logits of a block, for a verdict that `commit` takes."""
        self._note_tenant(lease_id)
        return await self._engine.score(lease_id, choice, block)

    async def commit(self, lease_id: str, verdict: Verdict) -> None:
        """Commit a verdict that was reached outside this engine."""
        self._note_tenant(lease_id)
        await self._engine.commit(lease_id, verdict)

    async def decode(self, lease_id: str, choice: int, num_tokens: int) -> Verdict:
        """Decode and commit up to `num_tokens` tokens of this model alone."""
        self._note_tenant(lease_id)
        return await self._engine.decode(lease_id, choice, num_tokens)

    async def status(self) -> EngineStatus:
        """Return the engine's counts of leases, pages, steps and tiers; its replica asks often."""
        status = self._engine.status()
        self._metrics.report(status)
        return status

    async def forget(self, documents: Collection[str]) -> tuple[Erasure, ...]:
        """Drop the KV of all prompts that hold any of some documents; see `Engine.forget`."""
        return await self._engine.forget(documents)

    async def check_integrity(self) -> None:
        """Raise AssertionError unless every page and lease is accounted for."""
        self._engine.check_integrity()


def start_engine(
    config: AnyEngineConfig,
    pool: PoolConfig,
    load: EngineFactory = load_engine,
    model_name: str = "rapid",
) -> ActorHandle:
    """Start the engine of the Serve replica that calls this; it dies with the replica.

    On several nodes it has the first bundle of the replica's placement group, and starts its other
    processes in the others.
    """
    replica = serve.get_replica_context()
    options = engine_options(pool, ray.get_runtime_context().get_node_id())
    if pool.nodes > 1:
        group = get_current_placement_group()
        load = functools.partial(load, nodes=Nodes(pool.nodes, group, options))
        options = options | in_bundle(group, 0)
    kind = replica.deployment.lower().partition("-")[0]  # "engines" of a pool that models share
    name = f"{replica.app_name}/{replica.deployment}/{uuid.uuid4().hex[:8]}"
    return (
        ray.remote(EngineActor)
        .options(
            name=name,
            namespace=NAMESPACE,
            max_concurrency=_CONCURRENT_CALLS,
            **options,
        )
        .remote(config, load, kind, model_name, engine_logging())
    )


def engines_of(app: str | None = None) -> dict[str, ActorHandle]:
    """Return an application's engines, or those of all, by name, ``app/deployment/replica``.

    The call blocks while it asks Ray for the named actors.
    """
    prefix = "" if app is None else f"{app}/"
    engines: dict[str, ActorHandle] = {}
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if actor["namespace"] == NAMESPACE and actor["name"].startswith(prefix):
            with contextlib.suppress(ValueError):  # it died after it was listed
                engines[actor["name"]] = ray.get_actor(actor["name"], namespace=NAMESPACE)
    return engines

"""The drafter pool: replicas that hold short, retrieved contexts and propose tokens."""

from __future__ import annotations

from cluster.leases import LeasingReplica
from cluster.placement import PoolConfig
from deployments.pools.engine_actor import EngineFactory, load_engine, start_engine
from rapid.config import EngineConfig


class Drafter(LeasingReplica):
    """Leases out the drafter's engine."""

    def __init__(
        self, engine: EngineConfig, pool: PoolConfig, load: EngineFactory = load_engine
    ) -> None:
        super().__init__(lambda: start_engine(engine, pool, load))

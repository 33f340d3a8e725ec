"""The target pool: replicas that hold long contexts and decide every token."""

from __future__ import annotations

from cluster.leases import LeasingReplica
from cluster.placement import PoolConfig
from deployments.pools.engine_actor import EngineFactory, load_engine, start_engine
from rapid.config import EngineConfig


class Target(LeasingReplica):
    """Leases out the target's engine."""

    def __init__(
        self, engine: EngineConfig, pool: PoolConfig, load: EngineFactory = load_engine
    ) -> None:
        super().__init__(lambda: start_engine(engine, pool, load))

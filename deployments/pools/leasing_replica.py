"""The replica of the target's and the drafter's pool."""

from __future__ import annotations

from ray import serve

from cluster.leases import LeasingReplica
from cluster.placement import PoolConfig
from deployments.logs import log_with_serve
from deployments.pools.engine_actor import EngineFactory, load_engine, start_engine
from rapid.vllm_config import AnyEngineConfig


class EngineReplica(LeasingReplica):
    """A Serve replica that owns one engine and leases it out."""

    def __init__(
        self,
        engine: AnyEngineConfig,
        pool: PoolConfig,
        load: EngineFactory = load_engine,
        model_name: str = "rapid",
    ) -> None:
        log_with_serve()
        replica = serve.get_replica_context().replica_id.unique_id
        super().__init__(lambda: start_engine(engine, pool, load, model_name), replica)

"""Placement on logical GPUs: Ray counts them, nothing computes on them."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import ray

from rapid.engine_status import EngineStatus
from tests.fakes import FakeEngine
from tests.ray_cluster import FAKE_CONFIG

pytestmark = pytest.mark.ray


class SeeingEngine(FakeEngine):
    """Reports as its page size how many GPUs it was given."""

    def status(self) -> EngineStatus:
        seen = ray.get_runtime_context().get_accelerator_ids()["GPU"]
        return replace(super().status(), page_tokens=len(seen))


def test_a_drafter_has_its_own_group_beside_the_targets_gpu(ray_cluster: str) -> None:
    from ray import serve

    from deployments.app import compose
    from deployments.config.serve_config import ServeConfig
    from deployments.pools.engine_actor import engines_of

    settings = copy.deepcopy(FAKE_CONFIG)
    settings["target"]["pool"] |= {"num_gpus": 1, "engine_cpus": 0.1}
    settings["drafter"]["pool"] |= {"num_gpus": 4, "engine_cpus": 0.1}
    config = ServeConfig.model_validate(settings)
    serve.run(compose(config, SeeingEngine, SeeingEngine), name="gpus", route_prefix=None)
    try:
        assert ray.available_resources().get("GPU", 0) == 0
        num_gpus = {
            name.split("/")[1]: ray.get(engine.status.remote()).page_tokens
            for name, engine in engines_of("gpus").items()
        }
        assert num_gpus == {"Target": 1, "Drafter": 4}
    finally:
        serve.delete("gpus")

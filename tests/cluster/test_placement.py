from __future__ import annotations

import pytest
from pydantic import ValidationError
from ray import serve

from cluster.placement import PoolConfig, deployment_options, engine_options


def test_on_a_cpu_an_engine_asks_for_nothing_beside_its_replica() -> None:
    pool = PoolConfig(num_cpus=0.05)
    options = deployment_options(pool, max_leases=16)
    assert options["ray_actor_options"] == {"num_cpus": 0.05}
    assert options["max_ongoing_requests"] == 16
    assert "placement_group_bundles" not in options
    assert engine_options(pool) == {"num_cpus": 0}


def test_a_gpu_group_is_one_bundle_that_holds_replica_and_engine() -> None:
    pool = PoolConfig(num_gpus=4, engine_cpus=8, num_cpus=0.5)
    options = deployment_options(pool, max_leases=16)
    assert options["placement_group_bundles"] == [{"CPU": 8.5, "GPU": 4}]
    assert options["placement_group_strategy"] == "STRICT_PACK"
    assert engine_options(pool) == {"num_cpus": 8, "num_gpus": 4}


def test_two_pools_may_share_a_gpu_but_not_a_group() -> None:
    assert engine_options(PoolConfig(num_gpus=0.5))["num_gpus"] == 0.5
    with pytest.raises(ValidationError, match="must be whole above 1"):
        PoolConfig(num_gpus=1.5)


def test_a_gpu_type_is_asked_of_both() -> None:
    pool = PoolConfig(num_gpus=1, accelerator="H100")
    (bundle,) = deployment_options(pool, max_leases=16)["placement_group_bundles"]
    assert bundle["accelerator_type:H100"] > 0
    assert engine_options(pool)["accelerator_type"] == "H100"


def test_a_replica_without_an_engine_has_its_gpu_itself() -> None:
    pool = PoolConfig(num_cpus=1, num_gpus=0.5, accelerator="L4")
    options = deployment_options(pool)
    assert options["ray_actor_options"] == {
        "num_cpus": 1,
        "num_gpus": 0.5,
        "accelerator_type": "L4",
    }
    assert "placement_group_bundles" not in options
    serve.deployment(PoolConfig).options(**options)  # Serve knows these options


def test_a_hung_replica_is_noticed_but_an_engine_may_take_its_time_to_load() -> None:
    assert deployment_options(PoolConfig())["health_check_timeout_s"] == 5.0
    assert "health_check_timeout_s" not in deployment_options(PoolConfig(), max_leases=16)


def test_the_autoscaler_counts_what_the_pool_says() -> None:
    pool = PoolConfig(min_replicas=1, max_replicas=3, target_ongoing_requests=4)
    autoscaling = deployment_options(pool)["autoscaling_config"]
    assert (autoscaling["min_replicas"], autoscaling["max_replicas"]) == (1, 3)
    assert autoscaling["target_ongoing_requests"] == 4


def test_counts_must_be_ordered() -> None:
    with pytest.raises(ValidationError, match="raise max_replicas"):
        PoolConfig(min_replicas=3, max_replicas=2)

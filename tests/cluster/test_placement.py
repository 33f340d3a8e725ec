from __future__ import annotations

import pytest
from pydantic import ValidationError
from ray import serve
from ray._private.label_utils import validate_label_selector

from cluster.placement import PoolConfig, deployment_options, engine_options, num_queued

NODE = "0f" * 28  # a node's id


def test_on_a_cpu_an_engine_asks_for_nothing_beside_its_replica() -> None:
    pool = PoolConfig(num_cpus=0.05)
    options = deployment_options(pool, max_leases=16)
    assert options["ray_actor_options"] == {"num_cpus": 0.05}
    assert options["max_ongoing_requests"] == 16
    assert "placement_group_bundles" not in options
    assert engine_options(pool, NODE)["num_cpus"] == 0


def test_an_engine_without_a_group_is_pinned_to_its_replica_s_node() -> None:
    assert engine_options(PoolConfig(), NODE)["label_selector"] == {"ray.io/node-id": NODE}
    assert "label_selector" not in engine_options(PoolConfig(num_gpus=1), NODE)


def test_replicas_go_to_the_nodes_that_have_the_labels() -> None:
    labels = {"rapid-pool": "drafter", "ray.io/accelerator-type": "in(H100, H200)"}
    group = deployment_options(PoolConfig(num_gpus=4, node_labels=labels), max_leases=16)
    assert group["placement_group_bundle_label_selector"] == [labels]
    serve.deployment(PoolConfig).options(**group)  # Serve knows these options
    alone = deployment_options(PoolConfig(node_labels=labels), max_leases=16)
    assert alone["ray_actor_options"]["label_selector"] == labels
    serve.deployment(PoolConfig).options(**alone)
    assert "label_selector" not in deployment_options(PoolConfig())["ray_actor_options"]


@pytest.mark.parametrize(
    "labels", [{"": "a"}, {"kind": "-a"}, {"kind": "in(a"}, {"a b": "c"}, {"kind": ""}]
)
def test_labels_are_refused_here_and_not_while_replicas_wait_for_ever(
    labels: dict[str, str],
) -> None:
    with pytest.raises(ValidationError, match="not a label selector of Ray: write key: value"):
        PoolConfig(node_labels=labels)


@pytest.mark.parametrize("value", ["a", "!a", "in(a, b)", "!in(a,b)", "A.b_c-1", "-a", "in()", ""])
def test_what_is_a_label_selector_is_ray_s_own_rule(value: str) -> None:
    try:
        PoolConfig(node_labels={"example.org/kind": value})
    except ValidationError:
        assert value == "" or validate_label_selector({"example.org/kind": value})
    else:
        assert validate_label_selector({"example.org/kind": value}) is None


def test_a_gpu_group_is_one_bundle_that_holds_replica_and_engine() -> None:
    pool = PoolConfig(num_gpus=4, engine_cpus=8, num_cpus=0.5)
    options = deployment_options(pool, max_leases=16)
    assert options["placement_group_bundles"] == [{"CPU": 8.5, "GPU": 4}]
    assert options["placement_group_strategy"] == "STRICT_PACK"
    assert engine_options(pool, NODE) == {"num_cpus": 8, "num_gpus": 4}


def test_an_engine_on_two_nodes_has_a_bundle_on_each_the_first_with_its_replica() -> None:
    labels = {"rapid-pool": "drafter"}
    pool = PoolConfig(num_gpus=8, nodes=2, engine_cpus=8, num_cpus=0.5, node_labels=labels)
    options = deployment_options(pool, max_leases=16)
    assert options["placement_group_bundles"] == [{"CPU": 8.5, "GPU": 4}, {"CPU": 8, "GPU": 4}]
    assert options["placement_group_strategy"] == "STRICT_SPREAD"
    assert options["placement_group_bundle_label_selector"] == [labels, labels]
    assert engine_options(pool, NODE) == {"num_cpus": 8, "num_gpus": 4}
    serve.deployment(PoolConfig).options(**options)  # Serve knows these options


def test_on_several_nodes_an_engine_without_gpus_has_bundles_as_well() -> None:
    pool = PoolConfig(nodes=2, engine_cpus=0.5, num_cpus=0.1)
    options = deployment_options(pool, max_leases=16)
    assert options["placement_group_bundles"] == [{"CPU": 0.6}, {"CPU": 0.5}]
    assert engine_options(pool, NODE) == {"num_cpus": 0.5, "num_gpus": 0}


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"num_gpus": 6, "nodes": 4}, "does not divide them"),
        ({"num_gpus": 0.5, "nodes": 2}, "does not divide them"),
        ({"engine_cpus": 0, "nodes": 2}, "reserves nothing on the other nodes"),
    ],
)
def test_nodes_have_equal_parts_of_an_engine(settings: dict[str, float], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        PoolConfig.model_validate(settings)


def test_two_pools_may_share_a_gpu_but_not_a_group() -> None:
    assert engine_options(PoolConfig(num_gpus=0.5), NODE)["num_gpus"] == 0.5
    with pytest.raises(ValidationError, match="must be whole above 1"):
        PoolConfig(num_gpus=1.5)


def test_a_gpu_type_is_asked_of_both() -> None:
    pool = PoolConfig(num_gpus=1, accelerator="H100")
    (bundle,) = deployment_options(pool, max_leases=16)["placement_group_bundles"]
    assert bundle["accelerator_type:H100"] > 0
    assert engine_options(pool, NODE)["accelerator_type"] == "H100"


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


@pytest.mark.parametrize(
    ("settings", "max_leases", "num_waiting"),
    [
        ({}, None, 256),
        ({"max_queued_requests": 5}, None, 5),
        ({"max_replicas": 3}, 16, 8 * 3 * 16),
        ({"max_replicas": 3, "max_queued_requests": 5}, 16, 5),
    ],
)
def test_every_queue_has_a_bound(
    settings: dict[str, int], max_leases: int | None, num_waiting: int
) -> None:
    pool = PoolConfig.model_validate(settings)
    assert num_queued(pool, max_leases) == num_waiting
    options = deployment_options(pool, max_leases)
    assert options["max_queued_requests"] == num_waiting
    serve.deployment(PoolConfig).options(**options)  # Serve knows these options

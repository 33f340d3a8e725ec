"""Placement on a Ray of several nodes, all on this machine, in a process of its own."""

from __future__ import annotations

import copy
import multiprocessing
import shutil
import tempfile
from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.fakes import FakeEngine
from tests.ray_cluster import FAKE_CONFIG, free_port

pytestmark = pytest.mark.ray


def test_engines_stay_with_their_replicas_on_nodes_with_the_pool_s_labels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tempfile.mkdtemp(prefix="rapid-", dir="/tmp")  # short: socket paths are limited
    monkeypatch.setenv("RAY_TMPDIR", folder)
    try:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            engines, kinds = process.submit(_on_three_nodes).result()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    assert len(engines) == 6
    assert all(node == replica_node for _, node, replica_node in engines)
    targets = {kinds[node] for name, node, _ in engines if "/Target/" in name}
    drafters = {kinds[node] for name, node, _ in engines if "/Drafter/" in name}
    assert (targets, drafters) == ({"small", "other"}, {"large"})


def _on_three_nodes() -> tuple[list[tuple[str, str, str]], dict[str, str]]:
    """Start two pools of three replicas on three nodes.

    Returns:
        Of every engine, its name, its node and its replica's node; and the label of every node.
    """
    import ray
    from ray import serve
    from ray._private.state import actors
    from ray.cluster_utils import Cluster

    from deployments.app import compose
    from deployments.config.serve_config import ServeConfig

    settings = copy.deepcopy(FAKE_CONFIG)
    replicas = {"min_replicas": 3, "max_replicas": 3}
    settings["target"]["pool"] |= replicas | {"node_labels": {"kind": "!large"}}
    settings["drafter"]["pool"] |= replicas | {"node_labels": {"kind": "large"}}
    config = ServeConfig.model_validate(settings)

    store = 2**26 + 2**25
    head = {"num_cpus": 2, "object_store_memory": store, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head | {"labels": {"kind": "other"}})
    try:
        for kind in ("small", "large"):
            cluster.add_node(num_cpus=2, object_store_memory=store, labels={"kind": kind})
        ray.init(cluster.address, log_to_driver=False)
        serve.start(http_options={"host": "127.0.0.1", "port": free_port()})
        serve.run(compose(config, FakeEngine, FakeEngine), name="nodes", route_prefix=None)
        engines = [
            (each["Name"], each["Address"]["NodeID"], each["OwnerAddress"]["NodeID"])
            for each in actors().values()
            if each["ActorClassName"] == "EngineActor" and each["State"] == "ALIVE"
        ]
        kinds = {node["NodeID"]: node["Labels"]["kind"] for node in ray.nodes()}
        return engines, kinds
    finally:
        ray.shutdown()
        cluster.shutdown()

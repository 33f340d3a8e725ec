"""Placement on a Ray of several nodes, all on this machine, in a process of its own."""

from __future__ import annotations

import copy
import multiprocessing
import shutil
import tempfile
from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.fakes import FakeEngine
from tests.ports import free_port
from tests.ray_cluster import FAKE_CONFIG

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def test_engines_stay_with_their_replicas_on_nodes_with_the_pool_s_labels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tempfile.mkdtemp(prefix="rapid-", dir="/tmp")  # short: socket paths are limited
    monkeypatch.setenv("RAY_TMPDIR", folder)
    try:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            engines = process.submit(_engines_on_three_nodes).result()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    assert len(engines) == 3
    assert all(node == replica_s for node, replica_s, _ in engines)
    assert {kind for _, _, kind in engines} <= {"head", "small"}


def _engines_on_three_nodes() -> list[tuple[str, str, str]]:
    """Start three replicas that may go to two of three nodes.

    Returns:
        Of every engine, its node, its replica's node, and the label of the latter.
    """
    import ray
    from ray import serve
    from ray._private.state import actors
    from ray.cluster_utils import Cluster

    from deployments.app import compose
    from deployments.config.serve_config import ServeConfig

    settings = copy.deepcopy(FAKE_CONFIG) | {"drafter": "prompt_lookup"}
    del settings["retriever"]
    replicas = {"min_replicas": 3, "max_replicas": 3}
    settings["target"]["pool"] |= replicas | {"node_labels": {"kind": "!large"}}
    config = ServeConfig.model_validate(settings)

    each = {"num_cpus": 2, "object_store_memory": 2**26 + 2**25}
    cluster = Cluster()
    try:
        cluster.add_node(**each, labels={"kind": "head"}, include_dashboard=False)
        for kind in ("small", "large"):
            cluster.add_node(**each, labels={"kind": kind})
        ray.init(cluster.address, log_to_driver=False)
        serve.start(http_options={"host": "127.0.0.1", "port": free_port()})
        serve.run(compose(config, FakeEngine), name="nodes", route_prefix=None)
        kinds = {node["NodeID"]: node["Labels"]["kind"] for node in ray.nodes()}
        engines = [
            (actor["Address"]["NodeID"], actor["OwnerAddress"]["NodeID"])
            for actor in actors().values()
            if actor["ActorClassName"] == "EngineActor" and actor["State"] == "ALIVE"
        ]
        return [(node, replica_s, kinds[replica_s]) for node, replica_s in engines]
    finally:
        ray.shutdown()
        cluster.shutdown()

"""The application with a target over two nodes, on a Ray of four nodes that are on this machine.

The texts are those of the same application with a target of one process.
"""

from __future__ import annotations

import json
import multiprocessing
import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import httpx
import psutil
import pytest

from tests.end_to_end.test_many_processes import ROOT, body, text_of
from tests.ports import free_port
from tests.ray_cluster import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.slow]

NUM_WORKERS = 3
PATIENCE_S = 180.0
LONG = body(11, "plain", 1.5, max_tokens=200)
REQUESTS = [
    *(body(3, mode, heat) for mode in ("plain", "lossless", "fused") for heat in (0.0, 1.0)),
    LONG,
]


class TwoNodes:
    """The application, whose Ray belongs to another process.

    Attributes:
        url: Its address.
        texts: Texts of one process, in the order of the requests.
    """

    def __init__(self, process: ProcessPoolExecutor) -> None:
        self.url = process.submit(_serve).result()
        process.submit(_deploy, 1).result()
        self.texts = [text_of(self.url, request) for request in REQUESTS]
        process.submit(_deploy, 2).result()
        self._process = process

    def kill_a_rank(self) -> None:
        """Kill the process of the rank on the other node."""
        (rank,) = self.ranks()
        rank.kill()

    def kill_a_node(self) -> None:
        """Kill Ray on the other node, as if the machine had been switched off."""
        self._process.submit(_kill_node_of_ranks).result()

    def kill_an_engine(self) -> None:
        """Kill the first rank's process."""
        psutil.Process(self._process.submit(_pid_of_engine).result()).kill()

    def ranks(self) -> set[psutil.Process]:
        """The processes of ranks on other nodes than their engine."""
        found = set()
        for process in psutil.Process(self._process.submit(_pid).result()).children(True):
            try:
                if "rapid.engines.parallel.follower" in process.cmdline():
                    found.add(process)
            except psutil.NoSuchProcess:
                continue
        return found


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[TwoNodes]:
    folder = tempfile.mkdtemp(prefix="rapid-", dir="/tmp")  # short: socket paths are limited
    with (
        pytest.MonkeyPatch.context() as environment,
        ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process,
    ):
        environment.setenv("RAY_TMPDIR", folder)
        try:
            yield TwoNodes(process)
        finally:
            process.submit(_stop).result()
            shutil.rmtree(folder, ignore_errors=True)


def test_two_nodes_give_the_texts_of_one_process(two_nodes: TwoNodes) -> None:
    assert [text_of(two_nodes.url, request) for request in REQUESTS] == two_nodes.texts


@pytest.mark.parametrize(
    "lose", [TwoNodes.kill_a_rank, TwoNodes.kill_an_engine, TwoNodes.kill_a_node]
)
def test_an_answer_outlives_what_its_target_loses(
    two_nodes: TwoNodes, lose: Callable[[TwoNodes], None]
) -> None:
    before = two_nodes.ranks()
    assert len(before) == 1
    assert streamed(two_nodes, LONG, lambda: lose(two_nodes)) == two_nodes.texts[-1]
    wait_until(lambda: len(two_nodes.ranks() - before) == 1, PATIENCE_S)
    assert not before & two_nodes.ranks()


def streamed(two_nodes: TwoNodes, request: dict[str, Any], disturb: Callable[[], None]) -> str:
    """The text of an answer that is disturbed once it has begun."""
    parts: list[str] = []
    with httpx.stream(
        "POST",
        f"{two_nodes.url}/v1/chat/completions",
        json=request | {"stream": True},
        timeout=PATIENCE_S,
    ) as reply:
        for line in reply.iter_lines():
            if not line.startswith("data: {"):
                continue
            has_begun = any(parts)
            choices = json.loads(line.removeprefix("data: "))["choices"]
            parts += [choice["delta"].get("content") or "" for choice in choices]
            if any(parts) and not has_begun:
                disturb()
    return "".join(parts)


# --- in the process that has the Ray --------------------------------------------------------------

cluster: Any = None


def _serve() -> str:
    """Start Ray and Serve; return the address."""
    global cluster
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    each = {"num_cpus": 2, "object_store_memory": 2**26 + 2**25}
    cluster.add_node(**each, labels={"kind": "head"}, include_dashboard=False)
    for _ in range(NUM_WORKERS):
        cluster.add_node(**each, labels={"kind": "worker"})
    ray.init(cluster.address, log_to_driver=False)
    port = free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port}, proxy_location="HeadOnly")
    return f"http://127.0.0.1:{port}"


def _deploy(nodes: int) -> None:
    """Deploy the application, its target on so many workers, a process on each."""
    from ray import serve

    from deployments.app import check, compose
    from deployments.config.serve_config import ServeConfig

    settings = check(ROOT / "cluster/configs/two-processes.yaml").model_dump(exclude_unset=True)
    for name in ("drafter", "retriever", "orchestrator", "api"):
        settings[name]["pool"] |= {"node_labels": {"kind": "head"}, "max_replicas": 1}
    settings["drafter"]["engine"]["tensor_parallel"] = 1
    settings["target"]["engine"]["tensor_parallel"] = nodes
    spread = {"nodes": nodes, "engine_cpus": 0.1, "node_labels": {"kind": "worker"}}
    settings["target"]["pool"] |= spread | {"max_replicas": 1, "max_surge_percent": 0}
    settings["orchestrator"] |= {"draft_length": "fixed", "target_wait_s": PATIENCE_S}
    serve.run(compose(ServeConfig.model_validate(settings)), name="two-nodes")


def _pid() -> int:
    return multiprocessing.current_process().pid or 0


def _alive(kind: str) -> dict[str, Any]:
    """What Ray knows of the one living actor of a class in the target's pool."""
    from ray._private.state import actors

    found = [
        actor
        for actor in actors().values()
        if actor["ActorClassName"] == kind
        and actor["State"] == "ALIVE"
        and "Drafter" not in actor["Name"]
    ]
    (actor,) = found
    return dict(actor)


def _pid_of_engine() -> int:
    return int(_alive("EngineActor")["Pid"])


def _kill_node_of_ranks() -> None:
    ranks_at = _alive("RankHost")["Address"]["NodeID"]
    assert ranks_at != _alive("EngineActor")["Address"]["NodeID"]
    (node,) = (node for node in cluster.worker_nodes if node.node_id == ranks_at)
    cluster.remove_node(node, allow_graceful=False)


def _stop() -> None:
    import ray

    ray.shutdown()
    cluster.shutdown()

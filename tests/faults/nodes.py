"""The application on a Ray of several nodes, and the faults of nodes and of their network.

The head has no replicas, two workers share those of every pool, and the run itself is on a fourth
node without room for any: there are the clients, as behind a load balancer over the workers'
proxies, Qdrant, and Redis with the head's state (Debian's `redis-server`, where it is installed).
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from tests.faults.breakages import RETRIEVING, Fault
from tests.faults.hosts import Host, Network
from tests.faults.judgement import Allowed
from tests.faults.qdrant import qdrant
from tests.faults.service import Service, deployed, is_healthy, temporary

PORT, GCS_PORT, REDIS_PORT = 8000, 6390, 6391
START_S = 60.0
NOTICE_S = 30
REDIS = "redis-server"
ROOT = Path(__file__).resolve().parents[2]
_RAY = [sys.executable, "-m", "ray.scripts.scripts"]
ENVIRONMENT = {
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",  # nobody else reaches this network
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "4",
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
    # A node that says nothing is given up after 15 seconds; Ray's own values would take a minute.
    "RAY_health_check_period_ms": "2000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "3",
}


class Hosts:
    """The hosts of one Ray, and what runs on each."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.disk = folder, folder / "ray"
        self.disk.mkdir()
        self.head, self.left, self.right = (Host(number, self.disk) for number in (2, 3, 4))
        self.has_redis = shutil.which(REDIS) is not None
        self._own = ExitStack()

    def __enter__(self) -> Hosts:
        """Switch all on; this process's own node is the last."""
        try:
            self._start()
        except BaseException:
            self._own.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._own.close()

    def _start(self) -> None:
        network = Network()
        self._own.callback(network.close)
        for host in (self.head, self.left, self.right):
            self._own.callback(host.kill)
        if self.has_redis:
            options = f"--bind {network.address(1)} --port {REDIS_PORT} --protected-mode no --save"
            self._run([REDIS, *options.split(), "", "--dir", str(self.folder)])
        self.start_all()
        here = ["start", f"--address={self.head.address}:{GCS_PORT}", "--num-cpus=0"]
        own = f"--node-ip-address={network.address(1)}"
        self._run([*_RAY, *here, own, f"--temp-dir={self.disk}", "--block"])

    def start(self, host: Host) -> None:
        """Switch a host on, with its node of Ray."""
        is_head = host is self.head
        where = ["--head", f"--port={GCS_PORT}", "--include-dashboard=false", "--num-cpus=0"]
        if not is_head:
            where = [f"--address={self.head.address}:{GCS_PORT}", "--num-cpus=4"]
        command = [
            *_RAY, "start", *where, f"--node-ip-address={host.address}", f"--temp-dir={self.disk}",
            "--object-store-memory=100000000", "--block",
        ]  # fmt: skip
        own = {}
        if is_head and self.has_redis:
            own = {"RAY_REDIS_ADDRESS": f"{Network.address(1)}:{REDIS_PORT}"}
        host.start(command, ENVIRONMENT | own, self.folder / "hosts.log")

    def start_all(self) -> None:
        """Switch on who is off."""
        for host in (self.head, self.left, self.right):
            if not host.is_on:
                self.start(host)

    def drain(self, host: Host, notice_s: int) -> None:
        """Tell Ray, as a provider's notice would be passed on, that a host is taken away."""
        import ray

        (node,) = (
            each["NodeID"]
            for each in ray.nodes()
            if each["Alive"] and each["NodeManagerAddress"] == host.address
        )
        options = {
            "address": f"{self.head.address}:{GCS_PORT}",
            "node-id": node,
            "reason": "DRAIN_NODE_REASON_PREEMPTION",
            "reason-message": "the machine is taken away",
            "deadline-remaining-seconds": notice_s,
        }
        words = [f"--{name}={value}" for name, value in options.items()]
        environment = os.environ | ENVIRONMENT
        subprocess.run([*_RAY, "drain-node", *words], env=environment, check=True)

    def _run(self, command: list[str]) -> None:
        log = self._own.enter_context((self.folder / "hosts.log").open("ab"))
        process = subprocess.Popen(
            command, env=os.environ | ENVIRONMENT, stdout=log, stderr=log, stdin=subprocess.DEVNULL
        )
        self._own.callback(process.wait)
        self._own.callback(process.kill)


class ServiceOnHosts(Service):
    """The application on several hosts, whose processes have ids of their own.

    Attributes:
        hosts: The hosts.
    """

    hosts: Hosts
    _is_mended = False

    def _engine_pids(self) -> dict[int, str]:
        return {}

    def mend(self) -> None:
        """Switch on who is off, join what was cut, and make room on the disks."""
        self.hosts.start_all()
        self.hosts.left.cut_off(is_cut=False)
        with suppress(subprocess.CalledProcessError):  # nothing was cut
            self.hosts.left.cut_from(self.hosts.right, is_cut=False)
        self.hosts.left.fill_disk(is_full=False)
        super().mend()
        self._is_mended = True

    def is_whole(self) -> bool:
        """As with one host; a node that ends itself once it is joined again is started anew."""
        if self._is_mended:
            self.hosts.start_all()
        return super().is_whole()

    def _can_be_reached(self) -> bool:
        """A node that has joined again has no proxy until it has a replica."""
        healthy = []
        for url in self.urls:
            with suppress(httpx.HTTPError):
                healthy.append(is_healthy(url))
        return any(healthy)

    def kill_worker(self) -> None:
        """Pull a worker's plug."""
        self.hosts.left.kill()

    async def replace_head(self) -> None:
        """Pull the head's plug, and switch it on again ten seconds later."""
        self.hosts.head.kill()
        await asyncio.sleep(10.0)
        await asyncio.to_thread(self.hosts.start, self.hosts.head)

    async def drain_worker(self) -> None:
        """Tell Ray that a worker goes in half a minute, and pull its plug then."""
        await asyncio.to_thread(self.hosts.drain, self.hosts.left, NOTICE_S)
        await asyncio.sleep(NOTICE_S)
        self.hosts.left.kill()

    def cut_workers(self) -> None:
        """Cut the workers from each other; both still reach the head."""
        self.hosts.left.cut_from(self.hosts.right)

    def cut_off_worker(self) -> None:
        """Cut a worker from everybody."""
        self.hosts.left.cut_off()

    def fill_disk(self) -> None:
        """Fill the disk of a worker."""
        self.hosts.left.fill_disk()


def faults_of_nodes() -> dict[str, Fault]:
    """Every fault of several nodes by its name."""
    behind = Allowed(refuses=RETRIEVING)  # drafters and retrievers may be on what is lost
    breaks = replace(behind, breaks=True)
    return {
        "none": Fault(lasts_s=10.0),
        "disk full": Fault(ServiceOnHosts.fill_disk, behind, lasts_s=10.0),
        "cut between workers": Fault(ServiceOnHosts.cut_workers, behind, lasts_s=20.0),
        "cut off worker": Fault(ServiceOnHosts.cut_off_worker, breaks, lasts_s=20.0, spends=True),
        "drain worker": Fault(
            ServiceOnHosts.drain_worker, Allowed(slows=3.0, share=0.99), lasts_s=40.0, spends=True
        ),
        "kill worker": Fault(ServiceOnHosts.kill_worker, breaks, lasts_s=30.0, spends=True),
        "kill head": Fault(
            ServiceOnHosts.replace_head, behind, lasts_s=40.0, spends=True, needs=REDIS
        ),
    }


@contextmanager
def served_on_hosts() -> Iterator[ServiceOnHosts]:
    """Serve the application on three hosts and this one."""
    os.environ.update(ENVIRONMENT)
    import ray
    from ray import serve

    logging.getLogger("ray").setLevel(logging.ERROR)
    own = Network.address(1)
    with temporary() as folder, Hosts(folder) as hosts, qdrant(own) as store:
        try:
            join(hosts.head.address)
            options = {"host": "0.0.0.0", "port": PORT}  # of hosts that nobody else reaches
            serve.start(http_options=options, proxy_location="EveryNode")
            urls = [f"http://{host.address}:{PORT}" for host in (hosts.left, hosts.right)]
            kind: Any = partial(_on, hosts)
            with deployed(urls, folder, store, kind) as service:
                yield service
        finally:
            ray.shutdown()


def _on(hosts: Hosts, *args: Any) -> ServiceOnHosts:
    service = ServiceOnHosts(*args)
    service.hosts = hosts
    return service


def join(head: str) -> None:
    """Join this process to Ray, once all four nodes are there."""
    import ray

    deadline = time.monotonic() + START_S
    while True:
        try:
            ray.init(
                f"{head}:{GCS_PORT}",
                namespace="rapid-faults",
                log_to_driver=False,
                _node_ip_address=Network.address(1),
            )
            break
        except (ConnectionError, ValueError, RuntimeError):
            if time.monotonic() > deadline:
                raise
            time.sleep(1.0)
    while sum(node["Alive"] for node in ray.nodes()) < 4:
        if time.monotonic() > deadline:
            raise TimeoutError("the nodes do not come up")
        time.sleep(0.5)

"""The shipped application on a private Ray, with two replicas a pool, its processes and ledgers."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import shutil
import signal
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil

from deployments.cli.server.server_process import LOCAL_RAY
from deployments.config.api_config import ApiKey
from deployments.config.serve_config import ServeConfig
from deployments.config.tenants import hash_key
from rapid.checkpoints.files import checkpoint_source
from retrieval.settings import ServerStoreConfig
from tests.faults.engines import left_alone_s, load_breakable
from tests.faults.hostile import HOSTILE_KEY, Hostile, Hostility
from tests.faults.qdrant import Qdrant, qdrant
from tests.ray_cluster import wait_until

APP = "rapid"
KEY = "sk-clients"
OTHERS = ("sk-second", "sk-third")  # of two more tenants, who ask in few rows
POOLS = ("Target", "Drafter", "Retriever", "Orchestrator", "Ingress")
FOLLOWER = "rapid.engines.parallel.follower"
WAIT_S = 120.0

AService = TypeVar("AService", bound="Service")


class Service:
    """A running application, its processes by kind, and what its engines hold.

    Attributes:
        urls: Of its proxies, as a load balancer would have them.
        config: Its settings.
        folder: Where what the faults need is kept.
        qdrant: Its store.
    """

    def __init__(
        self, urls: Sequence[str], config: ServeConfig, folder: Path, qdrant: Qdrant
    ) -> None:
        self.urls, self.config, self.folder, self.qdrant = urls, config, folder, qdrant
        self.breaks = folder / "breaks"
        self.breaks.mkdir(exist_ok=True)
        self._deployed = config
        self._struck: list[psutil.Process] = []
        self._hostile: Hostile | None = None

    def deploy(self, config: ServeConfig, *, blocking: bool = True) -> None:
        """Deploy the application with engines that can be broken."""
        from ray import serve

        from deployments.app import compose

        load = functools.partial(load_breakable, directory=str(self.breaks))
        application = compose(config, load, load)
        if blocking:
            serve.run(application, name=APP, route_prefix="/")
        else:
            serve._run(application, name=APP, route_prefix="/", _blocking=False)
        self._deployed = config

    def processes(self) -> dict[str, list[psutil.Process]]:
        """The application's processes by kind, such as `Target replica` and `Target engine`."""
        engines = self._engine_pids()
        found: dict[str, list[psutil.Process]] = defaultdict(list)
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                title = " ".join(process.cmdline()[:1])
                if process.pid in engines:
                    found[f"{engines[process.pid]} engine"].append(process)
                elif process.ppid() in engines and FOLLOWER in process.cmdline():
                    found[f"{engines[process.ppid()]} follower"].append(process)
                elif title.startswith("ray::ProxyActor"):
                    found["proxy"].append(process)
                elif title.startswith("ray::ServeController"):
                    found["controller"].append(process)
                for pool in POOLS:
                    if title.startswith(f"ray::ServeReplica:{APP}:{pool}"):
                        found[f"{pool} replica"].append(process)
        return dict(found)

    def _engine_pids(self) -> dict[int, str]:
        import ray

        from deployments.pools.engine_actor import engines_of

        found = {}
        for name, engine in engines_of(APP).items():
            with suppress(Exception):  # it is dying
                found[ray.get(engine.ping.remote(), timeout=10)] = name.split("/")[1]
        return found

    def signal(self, kind: str, number: signal.Signals) -> None:
        """Send a signal to one process of a kind, the eldest."""
        process = self._eldest(kind)
        process.send_signal(number)
        self._struck.append(process)

    def kill_raylet(self) -> None:
        """Kill Ray's process of this node, below everything, which nothing brings back."""
        (raylet,) = [each for each in psutil.Process().children() if each.name() == "raylet"]
        raylet.kill()

    def break_engine(self, pool: str, how: str) -> None:
        """Break one engine of a pool; see `load_breakable`."""
        process = self._eldest(f"{pool} engine")
        (self.breaks / str(process.pid)).write_text(how)
        self._struck.append(process)

    def left_alone_s(self) -> float | None:
        """For how long a broken engine was asked for leases; None if none was broken."""
        orders = [each for each in self.breaks.iterdir() if not each.suffix]
        return left_alone_s(orders[0]) if orders else None

    def _eldest(self, kind: str) -> psutil.Process:
        return min(self.processes()[kind], key=lambda each: each.create_time())

    def change(self, section: str, **settings: Any) -> None:
        """Change settings of a section, as an operator who deploys an edited file."""
        changed = getattr(self.config, section).model_copy(update=settings)
        self.deploy(self.config.model_copy(update={section: changed}), blocking=False)

    def scale(self, section: str, num_replicas: int) -> None:
        """Change the size of a pool of engines."""
        pool = getattr(self.config, section).pool
        sizes = {"min_replicas": num_replicas, "max_replicas": num_replicas}
        self.change(section, pool=pool.model_copy(update=sizes))

    def rest_drafters(self) -> None:
        """Let the drafters come to rest while nobody asks, and wait until none is left."""
        pool = self.config.drafter_pool.pool.model_copy(update={"min_replicas": 0})
        self.change("drafter", pool=pool.model_copy(update={"downscale_delay_s": 1.0}))
        wait_until(lambda: not self.replicas().get("Drafter"), WAIT_S, 1.0)
        self.change("drafter", pool=pool)

    def split_targets(self) -> None:
        """Let two processes compute each target, and wait until they do."""
        engine = self.config.target.engine.model_copy(update={"tensor_parallel": 2})
        self.change("target", engine=engine)
        wait_until(
            lambda: len(self.processes().get("Target follower", ())) == 2 and self.is_whole(),
            WAIT_S,
            1.0,
        )

    def keep_chunks_inside(self) -> None:
        """Let one retriever keep the chunks, as is shipped, and wait until it does.

        The Qdrant of the tests becomes slower with each new document, and its speed says nothing.
        """
        shipped = shipped_settings().retriever
        self.change("retriever", retrieval=shipped.retrieval, pool=shipped.pool)
        wait_until(self.is_whole, WAIT_S, 1.0)

    def prepare_hostile(self, hostility: Hostility) -> None:
        """Start the process of a hostile tenant, which waits."""
        self._hostile = Hostile(hostility, self.urls[0])

    async def let_hostile_loose(self) -> None:
        """Let the hostile tenant do its worst until it is cancelled."""
        assert self._hostile is not None
        self._hostile.let_loose()
        try:
            await asyncio.Future()
        finally:
            self._hostile.end()

    def upgrade(self) -> None:
        """Roll the targets to new weights: the same ones at another path."""
        target = copied(self.config, self.folder / "upgraded").target
        self.change("target", engine=target.engine)

    def mend(self) -> None:
        """Wake who was stopped, mend the engines, and deploy the first settings again."""
        self.qdrant.start()
        for process in self._struck:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)
        self._struck.clear()
        for order in self.breaks.iterdir():
            order.unlink()
        if self._deployed is not self.config:
            self.deploy(self.config, blocking=False)

    def replicas(self) -> dict[str, dict[str, int]]:
        """Replicas of each deployment, by their state; without the deployments that have none."""
        from ray import serve

        deployments = serve.status().applications[APP].deployments
        found = {name: dict(each.replica_states) for name, each in deployments.items()}
        return {name: states for name, states in found.items() if any(states.values())}

    def is_whole(self) -> bool:
        """Whether who was struck is gone, and pools and proxy are as if nothing had happened."""
        from ray import serve

        try:
            status = serve.status().applications[APP]
            healthy = self._can_be_reached()
        except Exception:  # the controller or the proxy is away
            return False
        sizes = {name: pool.min_replicas for name, pool in self._deployed.pools.items()}
        return (
            healthy
            and not any(map(is_alive, self._struck))
            and all(
                deployment.status == "HEALTHY"
                and deployment.replica_states == {"RUNNING": sizes[name.lower()]}
                for name, deployment in status.deployments.items()
            )
        )

    def _can_be_reached(self) -> bool:
        return all(map(is_healthy, self.urls))

    async def whole_again(self, since: float) -> float | None:
        """Wait until every replica is back; return how long that was after `since`."""
        await asyncio.sleep(max(0.0, since + 1.0 - time.monotonic()))
        num_good = 0
        while time.monotonic() < since + WAIT_S:
            num_good = num_good + 1 if await asyncio.to_thread(self.is_whole) else 0
            if num_good == 3:
                return time.monotonic() - since
            await asyncio.sleep(1.0)
        return None

    def held(self) -> tuple[int, int]:
        """Leases and pages in use over all engines, whose ledgers must balance."""
        import ray

        from deployments.pools.engine_actor import engines_of

        leases = pages = 0
        for engine in engines_of(APP).values():
            asked = [engine.status.remote(), engine.check_integrity.remote()]
            status = ray.get(asked, timeout=10)[0]
            leases += status.leases_open
            pages += status.kv_pages_in_use
        return leases, pages

    def leaks(self, before: dict[str, dict[int, tuple[int, int]]]) -> list[str]:
        """What an idle server should not hold: leases, pages, many more descriptors than before."""
        found = []
        deadline = time.monotonic() + self.config.target.engine.lease_ttl_s + 10
        while (held := self._held_or_why()) != (0, 0) and time.monotonic() < deadline:
            time.sleep(1.0)
        if held != (0, 0):
            found.append(f"leases and pages held while idle: {held}")
        for kind, processes in self.sizes().items():
            for pid, (_, num_fds) in processes.items():
                if pid in before.get(kind, {}) and num_fds > before[kind][pid][1] + MANY_FDS:
                    was = before[kind][pid][1]
                    found.append(f"{kind} has {num_fds} descriptors, before {was}")
        return found

    def _held_or_why(self) -> tuple[int, int] | str:
        try:
            return self.held()
        except Exception as error:
            return f"{type(error).__name__}: {error}"[:200]

    def sizes(self) -> dict[str, dict[int, tuple[int, int]]]:
        """Resident bytes and descriptors of each process, by kind."""
        sizes: dict[str, dict[int, tuple[int, int]]] = {}
        for kind, processes in self.processes().items():
            sizes[kind] = {}
            for process in processes:
                with suppress(psutil.NoSuchProcess):
                    memory = process.memory_info().rss
                    sizes[kind][process.pid] = (memory, process.num_fds())
        return sizes


MANY_FDS = 64  # connections that are kept for reuse


def is_healthy(url: str) -> bool:
    """Whether Serve's proxy there answers that it is well."""
    return httpx.get(f"{url}/-/healthz", timeout=2).status_code == 200


def is_alive(process: psutil.Process) -> bool:
    """Whether a process has not ended, unless only its parent does not know that yet."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def shipped_settings() -> ServeConfig:
    """The shipped laptop settings."""
    from deployments.app import check

    return check("serve_config.yaml")


def settings(store: str) -> ServeConfig:
    """The shipped laptop settings with two replicas a pool, four tenants and the Qdrant `store`."""
    config = shipped_settings()

    def paired(pool: Any) -> Any:
        return pool.model_copy(update={"min_replicas": 2, "max_replicas": 2})

    keys = tuple(
        ApiKey(tenant=tenant, sha256=hash_key(key))
        for tenant, key in zip(
            ("clients", "hostile", "second", "third"), (KEY, HOSTILE_KEY, *OTHERS), strict=True
        )
    )
    server = ServerStoreConfig(kind="server", url=store)
    retrieval = config.retriever.retrieval.model_copy(update={"store": server})
    own: dict[str, dict[str, Any]] = {"api": {"keys": keys}, "retriever": {"retrieval": retrieval}}
    sections = {
        name: getattr(config, name).model_copy(
            update={"pool": paired(getattr(config, name).pool)} | own.get(name, {})
        )
        for name in ("target", "drafter", "retriever", "orchestrator", "api")
    }
    return config.model_copy(update=sections | {"library": None})


def copied(config: ServeConfig, folder: Path) -> ServeConfig:
    """The same settings with the target's model in a folder of its own.

    An embedded model is said to be one by every ingress, which upgrades of others do not concern.
    """
    if not folder.exists():
        shutil.copytree(checkpoint_source(config.target.engine.model), folder)
    engine = config.target.engine.model_copy(update={"model": str(folder)})
    return config.model_copy(update={"target": config.target.model_copy(update={"engine": engine})})


@contextmanager
def served(port: int) -> Iterator[Service]:
    """Serve the application on a private Ray on loopback."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for name, value in LOCAL_RAY.items():
        os.environ.setdefault(name, value)
    import ray
    from ray import serve

    logging.getLogger("ray").setLevel(logging.ERROR)
    with temporary() as folder, qdrant() as store:
        try:
            ray.init(
                num_cpus=4,
                include_dashboard=False,
                log_to_driver=False,
                namespace="rapid-faults",
                _temp_dir=str(folder / "ray"),
                _node_ip_address="127.0.0.1",
            )
            options = {"host": "127.0.0.1", "port": port}
            serve.start(http_options=options, proxy_location="HeadOnly")
            with deployed([f"http://127.0.0.1:{port}"], folder, store, Service) as service:
                yield service
        finally:
            ray.shutdown()


@contextmanager
def temporary() -> Iterator[Path]:
    """A folder with a short name, as paths of sockets are limited."""
    folder = Path(tempfile.mkdtemp(prefix="rapid-", dir="/tmp"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def deployed(
    urls: Sequence[str], folder: Path, store: Qdrant, kind: Callable[..., AService]
) -> Iterator[AService]:
    """Deploy the application on the Ray that this process has joined."""
    from ray import serve
    from ray.serve.context import _set_global_client

    config = copied(settings(store.url), folder / "model")
    service = kind(urls, config, folder, store)
    try:
        service.deploy(config)
        yield service
    finally:
        with suppress(Exception):  # it may be broken: what is left ends with Ray
            service.mend()
            serve.shutdown()
        _set_global_client(None)


Sizes = dict[str, dict[int, tuple[int, int]]]
"""Resident bytes and descriptors of each process, by kind."""


def grown(*seen: Sizes) -> list[tuple[str, list[float], list[int]]]:
    """Return each surviving process's kind, resident MB and descriptors, as seen each time."""
    found = []
    for kind, processes in sorted(seen[-1].items()):
        for pid in processes:
            sizes = [each[kind][pid] for each in seen if pid in each.get(kind, {})]
            if len(sizes) == len(seen):
                memory = [num_bytes / 2**20 for num_bytes, _ in sizes]
                found.append((kind, memory, [num_fds for _, num_fds in sizes]))
    return found

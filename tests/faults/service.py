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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil

from deployments.cli.server_process import LOCAL_RAY
from deployments.config.serve_config import ApiKey, ServeConfig
from deployments.config.tenants import hash_key
from tests.faults.engines import load_breakable

APP = "rapid"
KEY, HOSTILE_KEY = "sk-clients", "sk-hostile"
POOLS = ("Target", "Drafter", "Retriever", "Orchestrator", "Ingress")
WAIT_S = 120.0


class Service:
    """A running application, its processes by kind, and what its engines hold."""

    def __init__(self, url: str, config: ServeConfig, breaks: Path) -> None:
        self.url, self.config, self.breaks = url, config, breaks
        self._deployed = config
        self._struck: list[psutil.Process] = []

    def processes(self) -> dict[str, list[psutil.Process]]:
        """The application's processes by kind, such as `Target replica` and `Target engine`."""
        engines = self._engine_pids()
        found: dict[str, list[psutil.Process]] = defaultdict(list)
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                title = " ".join(process.cmdline()[:1])
                if process.pid in engines:
                    found[f"{engines[process.pid]} engine"].append(process)
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

    def break_engine(self, pool: str, how: str) -> None:
        """Break one engine of a pool; see `load_breakable`."""
        process = self._eldest(f"{pool} engine")
        (self.breaks / str(process.pid)).write_text(how)
        self._struck.append(process)

    def _eldest(self, kind: str) -> psutil.Process:
        return min(self.processes()[kind], key=lambda each: each.create_time())

    def change(self, section: str, **settings: Any) -> None:
        """Change settings of a section, as an operator who deploys an edited file."""
        changed = getattr(self.config, section).model_copy(update=settings)
        self._deployed = self.config.model_copy(update={section: changed})
        deploy(self._deployed, self.breaks, blocking=False)

    def scale(self, section: str, num_replicas: int) -> None:
        """Change the size of a pool of engines."""
        pool = getattr(self.config, section).pool
        sizes = {"min_replicas": num_replicas, "max_replicas": num_replicas}
        self.change(section, pool=pool.model_copy(update=sizes))

    def mend(self) -> None:
        """Wake who was stopped, mend the engines, and deploy the first settings again."""
        if self._deployed is not self.config:
            deploy(self.config, self.breaks, blocking=False)
            self._deployed = self.config
        for process in self._struck:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)
        self._struck.clear()
        for order in self.breaks.iterdir():
            order.unlink()

    def is_whole(self) -> bool:
        """Whether who was struck is gone, and pools and proxy are as if nothing had happened."""
        from ray import serve

        try:
            status = serve.status().applications[APP]
            healthy = httpx.get(f"{self.url}/-/healthz", timeout=2).status_code == 200
        except Exception:  # the controller or the proxy is away
            return False
        sizes = {name: pool.min_replicas for name, pool in self._deployed.pools.items()}
        return (
            healthy
            and not any(map(_is_alive, self._struck))
            and all(
                deployment.status == "HEALTHY"
                and deployment.replica_states == {"RUNNING": sizes[name.lower()]}
                for name, deployment in status.deployments.items()
            )
        )

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


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def settings() -> ServeConfig:
    """The shipped laptop settings with two replicas a pool and two tenants.

    The retriever stays one: its store lives inside it.
    """
    from deployments.app import check

    config = check("serve_config.yaml")

    def paired(pool: Any) -> Any:
        return pool.model_copy(update={"min_replicas": 2, "max_replicas": 2})

    keys = tuple(
        ApiKey(tenant=tenant, sha256=hash_key(key))
        for tenant, key in (("clients", KEY), ("hostile", HOSTILE_KEY))
    )
    sections = {
        name: getattr(config, name).model_copy(
            update={"pool": paired(getattr(config, name).pool)}
            | ({"keys": keys} if name == "api" else {})
        )
        for name in ("target", "drafter", "orchestrator", "api")
    }
    return config.model_copy(update=sections)


def deploy(config: ServeConfig, breaks: Path, *, blocking: bool = True) -> None:
    """Deploy the application with engines that can be broken."""
    from ray import serve

    from deployments.app import compose

    load = functools.partial(load_breakable, directory=str(breaks))
    application = compose(config, load, load)
    if blocking:
        serve.run(application, name=APP, route_prefix="/")
    else:
        serve._run(application, name=APP, route_prefix="/", _blocking=False)


@contextmanager
def served(port: int) -> Iterator[Service]:
    """Serve the application on a private Ray on loopback."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for name, value in LOCAL_RAY.items():
        os.environ.setdefault(name, value)
    import ray
    from ray import serve

    logging.getLogger("ray").setLevel(logging.ERROR)
    temporary = Path(tempfile.mkdtemp(prefix="rapid-", dir="/tmp"))  # short: socket paths
    breaks = temporary / "breaks"
    breaks.mkdir()
    try:
        ray.init(
            num_cpus=4,
            include_dashboard=False,
            log_to_driver=False,
            namespace="rapid-faults",
            _temp_dir=str(temporary / "ray"),
            _node_ip_address="127.0.0.1",
        )
        serve.start(http_options={"host": "127.0.0.1", "port": port}, proxy_location="HeadOnly")
        config = settings()
        deploy(config, breaks)
        service = Service(f"http://127.0.0.1:{port}", config, breaks)
        try:
            yield service
        finally:
            service.mend()
            serve.shutdown()
    finally:
        ray.shutdown()
        shutil.rmtree(temporary, ignore_errors=True)


def grown(
    before: dict[str, dict[int, tuple[int, int]]], after: dict[str, dict[int, tuple[int, int]]]
) -> Sequence[tuple[str, int, int, int, int]]:
    """Return each surviving process's kind, resident MB and descriptors before and after."""
    return [
        (kind, before[kind][pid][0] >> 20, memory >> 20, before[kind][pid][1], fds)
        for kind, processes in sorted(after.items())
        for pid, (memory, fds) in processes.items()
        if pid in before.get(kind, {})
    ]

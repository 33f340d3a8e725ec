"""What the limits in front of Serve cost a request: processor time and waiting, by who has them.

    python -m benchmarks.serving.front_limits     # two minutes

Each row is a server of its own, all run at once and are asked in turns, one small request after
another on a connection that stays open. Behind Serve's rows is an ingress that only says hello, on
a private Ray:

    uvicorn             the HTTP server of Serve's proxy, without Ray and without limits
    with our limits     the same with `deployments.api.proxy`
    uvicorn with h11    uvicorn's other HTTP server, which limits a head to 64 KiB
    proxy               Serve's proxy without limits
    with our limits     the same with `deployments.api.proxy`
    HAProxy             Serve's HAProxy, which limits a head to 16 KiB, and not its time
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import httpx
import psutil
from starlette.responses import JSONResponse

from benchmarks.reporting import ROOT, keep, shown, spread, table
from deployments.cli.server_process import LOCAL_RAY
from tests.ray_cluster import free_port, wait_until

SERVERS = {
    "uvicorn": ("uvicorn", "httptools"),
    "uvicorn with our limits": ("uvicorn", "limits"),
    "uvicorn with h11": ("uvicorn", "h11"),
    "Serve's proxy": ("serve", "plain"),
    "Serve's proxy with our limits": ("serve", "limits"),
    "Serve's HAProxy": ("serve", "haproxy"),
}
REQUESTS = {"uvicorn": 3000, "serve": 300}  # in a turn
PATIENCE_S = 120.0


async def hello(scope: Any, receive: Any, send: Any) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", b"7")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b'"hello"'})


class Hello:
    """The ingress of Serve's rows."""

    async def __call__(self, request: Any) -> JSONResponse:
        return JSONResponse("hello")


def serve_uvicorn(form: str, port: int) -> None:
    import uvicorn

    from deployments.api.proxy.http_limits import HttpWithLimits

    http: Any = HttpWithLimits if form == "limits" else form
    options: dict[str, Any] = {"loop": "uvloop", "lifespan": "off", "access_log": False}
    uvicorn.run(hello, host="127.0.0.1", port=port, http=http, log_level="error", **options)


def serve_ray(form: str, port: int) -> None:
    import ray
    from ray import serve

    from deployments.api.proxy.server_limits import router_options

    folder = tempfile.mkdtemp(prefix="rapid-", dir="/tmp")
    try:
        ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, _temp_dir=folder,
                 _node_ip_address="127.0.0.1", namespace="front")  # fmt: skip
        serve.start(http_options={"host": "127.0.0.1", "port": port}, proxy_location="HeadOnly")
        options = router_options() if form == "limits" else {}
        serve.run(serve.deployment(Hello, **options).bind(), blocking=True)
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def server(name: str) -> Iterator[tuple[str, psutil.Process]]:
    """Start a row's server; its address and its first process."""
    kind, form = SERVERS[name]
    port = free_port()
    environment = LOCAL_RAY | os.environ
    with tempfile.TemporaryDirectory(prefix="rapid-", dir="/tmp") as folder:
        if form == "haproxy":
            environment |= haproxy_environment(folder)
        command = [sys.executable, "-m", "benchmarks.serving.front_limits"]
        process = subprocess.Popen(
            [*command, "--serve", kind, form, str(port)],
            cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        url = f"http://127.0.0.1:{port}/v1"
        try:
            wait_until(lambda: is_up(url), PATIENCE_S, every_s=0.5)
            yield url, psutil.Process(process.pid)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait()


def haproxy_environment(folder: str) -> dict[str, str]:
    prefix = "RAY_SERVE_HAPROXY"
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        f"{prefix}_CONFIG_FILE_LOC": f"{folder}/haproxy.cfg",
        f"{prefix}_SOCKET_PATH": f"{folder}/admin.sock",
        f"{prefix}_METRICS_SOCKET_PATH": f"{folder}/metrics.sock",
        f"{prefix}_SERVER_STATE_BASE": folder,
        f"{prefix}_SERVER_STATE_FILE": f"{folder}/server-state",
        f"{prefix}_METRICS_PORT": str(free_port()),
        f"{prefix}_STATS_PORT": str(free_port()),
    }


def is_up(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).text == '"hello"'
    except httpx.HTTPError:
        return False


def cpu_s(root: psutil.Process) -> float:
    """Return the processor time of what a request passes through: server, proxies and replica."""
    total = 0.0
    for each in [root, *root.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            times, command = each.cpu_times(), each.cmdline()
            if is_passed(command):
                total += times.user + times.system
    return total


def is_passed(command: list[str]) -> bool:
    """Whether this is the command line of a process that a row's requests pass through."""
    name = command[0] if command else ""
    is_serves = name.endswith("/haproxy") or name.startswith(("ray::ProxyActor", "ray::ServeRepl"))
    return is_serves or "uvicorn" in command


async def ask(url: str, number: int) -> list[float]:
    """Return the seconds of each of so many requests."""
    address = httpx.URL(url)
    reader, writer = await asyncio.open_connection(address.host, address.port)
    seconds = []
    for _ in range(number):
        began = time.perf_counter()
        writer.write(b"GET /v1 HTTP/1.1\r\nhost: localhost\r\naccept: */*\r\nuser-agent: x\r\n\r\n")
        await reader.readuntil(b'"hello"')
        seconds.append(time.perf_counter() - began)
    writer.close()
    return seconds


def measure(servers: dict[str, tuple[str, psutil.Process]], turns: int) -> list[dict[str, Any]]:
    """Ask all servers in turns, and return the milliseconds of a request, by server."""
    waits: dict[str, list[float]] = {name: [] for name in servers}
    costs: dict[str, list[float]] = {name: [] for name in servers}
    for turn in range(turns + 1):
        for name, (url, process) in servers.items():
            number = REQUESTS[SERVERS[name][0]]
            before = cpu_s(process)
            seconds = asyncio.run(ask(url, number))
            if turn:  # the first is a warm-up
                waits[name].append(1e3 * statistics.median(seconds))
                costs[name].append(1e3 * (cpu_s(process) - before) / number)
    return [
        {"server": name, "processor": spread(costs[name]), "waiting": spread(waits[name])}
        for name in servers
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--serve", nargs=3, metavar=("KIND", "FORM", "PORT"))
    options = parser.parse_args()
    if options.serve:
        kind, form, port = options.serve
        (serve_uvicorn if kind == "uvicorn" else serve_ray)(form, int(port))
        return
    with ExitStack() as running:
        servers = {name: running.enter_context(server(name)) for name in SERVERS}
        rows = measure(servers, options.turns)
    shown_rows = [
        [row["server"], shown(row["processor"], 3), shown(row["waiting"], 3)] for row in rows
    ]
    text = (
        "Milliseconds of one small request, the median of "
        f"{options.turns} turns (least to most). Processor time is that of the server, or of "
        "proxies and replica.\n\n"
    )
    text += table(["server", "processor", "waiting"], shown_rows)
    keep("front_limits", "What the limits in front cost a request", text, {"rows": rows})


if __name__ == "__main__":
    main()

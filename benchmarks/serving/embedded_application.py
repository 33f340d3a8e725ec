"""The application of `make run`, started for a measurement on a free port of this machine."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from benchmarks.reporting import ROOT
from tests.ports import free_port

TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Application:
    """A running application.

    Attributes:
        url: Its address.
        pid: Process of the command that started it, above all its other processes.
        ready_s: Seconds from the command to the first 200 of ``GET /ready``.
    """

    url: str
    pid: int
    ready_s: float


@contextmanager
def embedded_application(
    api: Mapping[str, Any] | None = None, *, pools_grow: bool = True
) -> Iterator[Application]:
    """Run ``rapid serve serve_config.yaml`` on a free port until the block ends.

    `api` are other settings of its API. Where pools do not grow, each has one replica: one that
    starts takes both cores of a small machine for seconds.

    Raises:
        SystemExit: It ended by itself, or was not ready in five minutes.
    """
    settings = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    port = settings["http_options"]["port"] = free_port()
    args = settings["applications"][0]["args"]
    args["api"].update(api or {})
    if not pools_grow:
        for each in args.values():
            each.get("pool", {}).update(min_replicas=1, max_replicas=1)
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory(prefix="rapid-", dir="/tmp") as folder:
        config = Path(folder) / "serve_config.yaml"
        config.write_text(yaml.safe_dump(settings))
        command = [str(Path(sys.executable).parent / "rapid"), "serve", str(config)]
        began = time.monotonic()
        with (Path(folder) / "output").open("wb") as output:
            process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=output)
            try:
                _wait_until_ready(process, url, began)
                yield Application(url, process.pid, time.monotonic() - began)
            finally:
                process.send_signal(signal.SIGINT)
                process.wait(90)


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, began: float) -> None:
    while time.monotonic() - began < TIMEOUT_S:
        if process.poll() is not None:
            raise SystemExit(f"the application ended with {process.returncode}")
        try:
            if httpx.get(f"{url}/ready", timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.25)
    raise SystemExit(f"not ready within {TIMEOUT_S} s")

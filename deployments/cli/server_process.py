"""Control of the process that runs Serve: its lock, log, readiness and shutdown."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import httpx
import yaml

RUN_FOLDER = Path(".run")
SERVE_COMMAND = (sys.executable, "-m", "deployments.cli.run_serve")
_LOCK, _LOG = RUN_FOLDER / "serve.pid", RUN_FOLDER / "serve.log"
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# Messages that Serve's controller logs at any log level when an application will not start.
_GIVEN_UP = re.compile(
    r" -- (Failed to update the deployments .*|Deploying app '.*' failed.*"
    r"|Unexpected error occurred while .*|Runtime env setup for app .*)"
)
_OUR_ERROR = re.compile(r"(?:^|\) )(?:rapid|retrieval|cluster|deployments)\.[\w.]+: (.+)")
_INTERRUPT_TIMEOUT_S, _TERMINATE_TIMEOUT_S = 60.0, 10.0
_ANY_ADDRESS = ("0.0.0.0", "::", "")
LOCAL_RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # These start a separate Ray whose servers bind to loopback: the last variable is Ray's name for
    # "a cluster over the network". A RAY_ADDRESS in the environment joins a cluster instead.
    "RAY_ADDRESS": "local",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # Serve replaces a proxy after three failed checks; its own values would take half a minute.
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "4",
    # A replica that hangs is killed after three failed checks; Serve would first wait for as long
    # as its answers may take.
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
}


class CannotStart(Exception):
    """Another process holds the lock or the port, or there is no such address."""


@dataclass
class ServerProcess:
    """A process with Ray Serve that this process starts and stops.

    This process locks the lock file and the child inherits the lock: the file stays locked while
    either lives, even when process ids are reused. It holds the ids of both; `rapid stop` signals
    the first that is alive.

    Attributes:
        url: The base URL of the HTTP API.
        log_path: The file with its output and that of Ray.
    """

    url: str
    log_path: Path
    _process: subprocess.Popen[bytes]
    _lock: IO[str]
    _http: httpx.Client

    @classmethod
    def start(cls, config: Path) -> ServerProcess:
        """Start Serve with the applications of a file.

        Raises:
            CannotStart: If a server started from this folder runs, or its address cannot be had.
        """
        RUN_FOLDER.mkdir(exist_ok=True)
        host, port = _address(config)
        with contextlib.ExitStack() as undone_on_error:
            lock = undone_on_error.enter_context(_LOCK.open("a+"))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise CannotStart(
                    f"a server started from this folder is running (process {running_pid()}): "
                    "`rapid stop` ends it"
                ) from None
            _check_is_free(host, port)
            process = _run_serve(config, lock)
            undone_on_error.pop_all()
        lock.truncate(0)
        lock.write(f"{os.getpid()} {process.pid}\n")
        lock.flush()
        url = f"http://{'127.0.0.1' if host in _ANY_ADDRESS else host}:{port}"
        http = httpx.Client(base_url=url, timeout=5.0, trust_env=False)
        return cls(url, _LOG, process, lock, http)

    def has_ended(self) -> bool:
        """Return whether the process has ended."""
        return self._process.poll() is not None

    def is_ready(self) -> bool:
        """Return whether the application is ready, and every pool that it shows has started."""
        try:
            state = self._http.get("/ready").json()
        except (httpx.HTTPError, ValueError):
            return False
        return state.get("ready", False) and not any(
            pool["status"] == "UPDATING" and not pool["replicas"]
            for pool in state.get("pools", {}).values()
        )

    def failure(self) -> str | None:
        """Return why the application will not start, from the log; None while it still may."""
        log = self._log()
        given_up = _GIVEN_UP.search(log)
        if given_up is None:
            return None
        reasons = [found[1] for line in log.splitlines() if (found := _OUR_ERROR.search(line))]
        return reasons[-1] if reasons else f"{given_up[1]}\n{self.tail()}"

    def tail(self, num_lines: int = 15) -> str:
        """Return the last `num_lines` lines of the log."""
        return "\n".join(deque(self._log().splitlines(), maxlen=num_lines))

    def stop(self) -> None:
        """End the process with SIGINT, as Ctrl-C does, then with SIGTERM, then with SIGKILL."""
        for number, patience_s in (
            (signal.SIGINT, _INTERRUPT_TIMEOUT_S),
            (signal.SIGTERM, _TERMINATE_TIMEOUT_S),
        ):
            self._process.send_signal(number)
            try:
                self._process.wait(patience_s)
                return
            except subprocess.TimeoutExpired:
                continue
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def forget(self) -> None:
        """Close the HTTP client, and empty and release the lock file."""
        self._http.close()
        self._lock.truncate(0)
        self._lock.close()

    def _log(self) -> str:
        try:
            return _COLOUR.sub("", self.log_path.read_text(encoding="utf-8", errors="replace"))
        except FileNotFoundError:
            return ""


def _environment() -> dict[str, str]:
    return ({} if _joins_cluster() else LOCAL_RAY) | os.environ


def _joins_cluster() -> bool:
    return os.environ.get("RAY_ADDRESS", "local") != "local"


def _run_serve(config: Path, lock: IO[str]) -> subprocess.Popen[bytes]:
    with _LOG.open("wb") as log:
        return subprocess.Popen(
            [*SERVE_COMMAND, str(config)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=_environment(),
            pass_fds=(lock.fileno(),),
            start_new_session=True,  # Ctrl-C then reaches only this process, which ends it
            # A shell that runs this command in the background makes its children ignore SIGINT.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )


def running_pid() -> int | None:
    """Return the id of the process to signal to end this folder's server; None if none runs."""
    try:
        with _LOCK.open("r+") as lock:
            if _is_free(lock):
                return None
            pids = [int(pid) for pid in lock.read().split()]
    except (FileNotFoundError, ValueError):
        return None
    return next((pid for pid in pids if _is_alive(pid)), None)


def stop_running(pid: int, timeout_s: float) -> bool:
    """Send SIGTERM to `pid`; return whether the lock becomes free within `timeout_s` seconds."""
    os.kill(pid, signal.SIGTERM)
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        with _LOCK.open("r+") as lock:
            if _is_free(lock):
                return True
        time.sleep(0.2)
    return False


def _is_free(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(lock, fcntl.LOCK_UN)
    return True


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _address(config: Path) -> tuple[str, int]:
    """Return host and port of the configured HTTP server; Serve's defaults are for all."""
    options = yaml.safe_load(config.read_text(encoding="utf-8")).get("http_options") or {}
    return options.get("host", _ANY_ADDRESS[0]), int(options.get("port", 8000))


def _check_is_free(host: str, port: int) -> None:
    """Check that a server can bind to an address of this machine; Serve would try for ever."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(
                socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
            )  # a server may just have ended
            probe.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise CannotStart(
                f"something else has {host}:{port}: end it, or set http_options.port"
            ) from None
        if _joins_cluster():  # whose proxies may be on other machines
            return
        raise CannotStart(
            f"{host}:{port} cannot be bound ({error.strerror}): set http_options.host to an "
            "address of this machine, and a port that you may use"
        ) from None

"""Control of the process that runs Serve: its lock, log, readiness, losses and shutdown."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import psutil

from deployments.cli.addresses import SERVE_MODULE, address_of, joins_cluster, url_of, why_taken
from deployments.cli.server.server_state import (
    NO_RAY,
    PARTS_OF_RAY,
    RAY_DID_NOT_START,
    RUN_FOLDER,
    ServerState,
    forget_state,
    read_state,
)

if TYPE_CHECKING:
    import httpx

SERVE_COMMAND = (sys.executable, "-m", SERVE_MODULE)
_LOCK, LOG = RUN_FOLDER / "serve.pid", RUN_FOLDER / "serve.log"
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_OUR_ERROR = re.compile(r"(?:^|\) )(?:rapid|retrieval|cluster|library|deployments)\.[\w.]+: (.+)")
_INTERRUPT_TIMEOUT_S, _TERMINATE_TIMEOUT_S, _REST_TIMEOUT_S = 60.0, 10.0, 5.0
_LOOPBACK = "127.0.0.1"
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
    either lives. It holds the ids of both; `rapid stop` signals the first that is alive.
    """

    url: str
    log_path: Path  # of its output and that of Ray
    _command: list[str]
    _process: subprocess.Popen[bytes]
    _lock: IO[str]
    _http: httpx.Client
    _parts: dict[str, psutil.Process] = field(default_factory=dict)

    @classmethod
    def start(cls, config: Path, metrics_port: int | None = None) -> ServerProcess:
        """Start Serve with the applications of a file.

        Args:
            config: The file.
            metrics_port: The port of the metrics of a Ray of its own; None for a free one.

        Raises:
            CannotStart: A server started from this folder runs, or its address cannot be had.
        """
        import httpx  # only here, as other commands use this module for its lock

        RUN_FOLDER.mkdir(exist_ok=True)
        host, port = address_of(config)
        command = [*SERVE_COMMAND, str(config)]
        if metrics_port is not None:
            command += ["--metrics-port", str(metrics_port)]
        with contextlib.ExitStack() as undone_on_error:
            lock = undone_on_error.enter_context(_LOCK.open("a+"))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise CannotStart(
                    f"a server started from this folder is running (process {running_pid()}): "
                    "`rapid stop` ends it"
                ) from None
            if problem := why_taken(host, port):
                raise CannotStart(problem)
            if metrics_port and (problem := why_taken(_LOOPBACK, metrics_port, "--metrics-port")):
                raise CannotStart(problem)
            forget_state()
            LOG.unlink(missing_ok=True)
            process = _run_serve(command, lock)
            undone_on_error.pop_all()
        url = url_of(host, port)
        http = httpx.Client(base_url=url, timeout=5.0, trust_env=False)
        return cls(url, LOG, command, process, lock, http)

    def start_again(self) -> None:
        """Start the process again, which has ended."""
        self._end_rest()
        self._process = _run_serve(self._command, self._lock)

    def has_ended(self) -> bool:
        """Return whether the process has ended."""
        return self._process.poll() is not None

    def why_no_ray(self) -> str | None:
        """Return why the process's Ray did not start; None unless it has ended for that reason."""
        if self._process.poll() != RAY_DID_NOT_START:
            return None
        said = [line for line in self._log().splitlines() if line.startswith(NO_RAY)]
        return said[-1] if said else NO_RAY

    def state(self) -> ServerState | None:
        """Return how far the process has come; None before Ray has started."""
        return read_state()

    def find_lost_part(self) -> str | None:
        """Return which part of the Ray that this process started has died; None while all live."""
        if len(self._parts) < len(PARTS_OF_RAY):
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in psutil.Process(self._process.pid).children():
                    if (name := child.name()) in PARTS_OF_RAY:
                        self._parts.setdefault(name, child)
        return next((name for name, part in self._parts.items() if not _lives(part)), None)

    def readiness(self) -> dict[str, Any] | None:
        """Return what ``/ready`` says; None if nothing answers it within 5 s."""
        import httpx

        try:
            state = self._http.get("/ready").json()
        except (httpx.HTTPError, ValueError):
            return None
        return state if isinstance(state, dict) else None

    def is_ready(self) -> bool:
        """Return whether the application is ready, and every pool that it shows has started."""
        state = self.readiness() or {}
        return state.get("ready", False) and not any(
            pool["status"] == "UPDATING" and not pool["replicas"]
            for pool in state.get("pools", {}).values()
        )

    def failure(self) -> str | None:
        """Return why the application will not start, from the log; None while it still may."""
        from cluster.serve_internals import find_reason_given_up

        log = self._log()
        given_up = find_reason_given_up(log)
        if given_up is None:
            return None
        reasons = [found[1] for line in log.splitlines() if (found := _OUR_ERROR.search(line))]
        return reasons[-1] if reasons else f"{given_up}\n{self.tail()}"

    def tail(self) -> str:
        """Return the last 15 lines of the log."""
        return "\n".join(self._log().splitlines()[-15:])

    def stop(self) -> None:
        """End the process with SIGINT, as Ctrl-C does, then with SIGTERM, then with SIGKILL.

        Also ends what it has left behind: where the raylet dies, its workers live on.
        """
        self._end_process()
        self._end_rest()

    def _end_process(self) -> None:
        if self.has_ended():
            return
        patience = {signal.SIGINT: _INTERRUPT_TIMEOUT_S, signal.SIGTERM: _TERMINATE_TIMEOUT_S}
        for number, patience_s in patience.items():
            self._process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(patience_s)
                return
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _end_rest(self) -> None:
        """End what is left of the process's session, which all that it started are in."""
        left = [each for each in psutil.process_iter() if _session(each.pid) == self._process.pid]
        _, left = psutil.wait_procs(left, timeout=_REST_TIMEOUT_S)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=_REST_TIMEOUT_S)
        self._parts.clear()
        forget_state()

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


def _run_serve(command: list[str], lock: IO[str]) -> subprocess.Popen[bytes]:
    with LOG.open("ab") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=({} if joins_cluster() else LOCAL_RAY) | os.environ,
            pass_fds=(lock.fileno(),),
            start_new_session=True,  # Ctrl-C then reaches only this process, which ends it
            # A shell that runs this command in the background makes its children ignore SIGINT.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
    lock.truncate(0)
    lock.write(f"{os.getpid()} {process.pid}\n")
    lock.flush()
    return process


def dashboard_address() -> str | None:
    """Return the address of Ray's dashboard of this folder's server; None if none runs with one."""
    state = read_state() if running_pid() is not None else None
    return state.dashboard or None if state else None


def running_pid() -> int | None:
    """Return the id of the process to signal to end this folder's server; None if none runs."""
    try:
        with _LOCK.open("r+") as lock:
            if _is_free(lock):
                return None
            pids = [int(pid) for pid in lock.read().split()]
    except (FileNotFoundError, ValueError):
        return None
    return next(filter(psutil.pid_exists, pids), None)


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


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except (ProcessLookupError, PermissionError):
        return None

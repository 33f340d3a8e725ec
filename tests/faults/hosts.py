"""Test hosts on one machine: namespaces of Linux on a bridge, which nothing outside can reach.

A host is a process tree with its own network, process ids and disk; killing its first process is
pulling its plug. Everything lives in the namespaces of the run itself, and ends with it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

BRIDGE = "bridge0"
DISK = "256m"
_INSIDE = "RAPID_FAULTS_INSIDE"


def enter() -> None:
    """Start this program again in namespaces of its own, unless it is there already."""
    if os.environ.get(_INSIDE):
        return
    missing = [tool for tool in ("unshare", "nsenter", "ip", "mount") if not shutil.which(tool)]
    if missing:
        raise SystemExit(f"The faults of nodes need {', '.join(missing)} (util-linux, iproute2).")
    own = ["--user", "--map-root-user"] if os.geteuid() else []
    own += ["--net", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child=SIGKILL"]
    command = [sys.executable, "-m", "tests.faults", *sys.argv[1:]]
    ended = subprocess.run(
        ["unshare", *own, *command], env=os.environ | {_INSIDE: "1"}, check=False
    )
    raise SystemExit(ended.returncode)


class Network:
    """The bridge of this process's own network, on which this process is the host `address(1)`."""

    def __init__(self) -> None:
        _ip("link", "set", "lo", "up")
        _ip("link", "add", BRIDGE, "type", "bridge")
        _ip("addr", "add", f"{self.address(1)}/24", "dev", BRIDGE)
        _ip("link", "set", BRIDGE, "up")

    @staticmethod
    def address(number: int) -> str:
        """Return the address of the host with a number."""
        return f"10.77.0.{number}"

    def close(self) -> None:
        """Take the bridge away."""
        _ip("link", "del", BRIDGE)


class Host:
    """One host, which runs one command at a time.

    Attributes:
        address: Its address.
    """

    def __init__(self, number: int, disk: Path) -> None:
        """Describe the host.

        Args:
            number: Its number in the network.
            disk: A folder that is a small disk of the host's own while it runs.
        """
        self.address = Network.address(number)
        self._hardware = f"02:00:00:00:00:{number:02x}"  # others remember it
        self._link, self._disk = f"host{number}", disk
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        """Switch the host on; the command's output goes to a file."""
        self.kill()  # of a host that went by itself, the link may be left
        own = ["--net", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child=SIGKILL"]
        mounted = f"mount -t tmpfs -o size={DISK} disk {self._disk}"
        script = f'{mounted} && echo && read _ && exec "$@" >&2'
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                ["unshare", *own, "sh", "-c", script, "sh", *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                env=os.environ | environment,
            )
        assert self._process.stdout is not None
        assert self._process.stdin is not None
        self._process.stdout.readline()  # it has its namespaces
        pid = str(self._process.pid)
        peer = f"name eth0 address {self._hardware} netns {pid}"
        _ip("link", "add", self._link, "type", "veth", "peer", *peer.split())
        _ip("link", "set", self._link, "master", BRIDGE, "up")
        for words in (
            "link set lo up",
            f"addr add {self.address}/24 dev eth0",
            "link set eth0 up",
            f"route add default via {Network.address(1)}",
        ):
            self._do("ip", *words.split())
        self._process.stdin.write(b"\n")
        self._process.stdin.close()

    @property
    def is_on(self) -> bool:
        """Whether the host runs."""
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        """Pull the plug: all its processes end at once, and its network goes without a word."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        with suppress(subprocess.CalledProcessError):  # it went with the host
            _ip("link", "del", self._link)

    def cut_off(self, *, is_cut: bool = True) -> None:
        """Lose everything that the host sends and is sent, or no more."""
        _ip("link", "set", self._link, "down" if is_cut else "up")

    def cut_from(self, other: Host, *, is_cut: bool = True) -> None:
        """Lose everything between two hosts alone, or no more: their frames go to nobody."""
        for one, peer in ((self, other), (other, self)):
            nobody = ("lladdr", "02:00:00:00:00:99", "nud", "permanent") if is_cut else ()
            verb = "replace" if is_cut else "del"
            one._do("ip", "neigh", verb, peer.address, *nobody, "dev", "eth0")

    def fill_disk(self, *, is_full: bool = True) -> None:
        """Write to the host's disk until nothing more fits, or make room again."""
        ballast = str(self._disk / "ballast")
        if is_full:
            self._do("sh", "-c", f"cat /dev/zero > {ballast} 2>/dev/null || true")
        else:
            self._do("rm", "-f", ballast)

    def _do(self, *command: str) -> None:
        assert self._process is not None
        target = ("--target", str(self._process.pid), "--net", "--mount")
        subprocess.run(["nsenter", *target, *command], check=True, capture_output=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)

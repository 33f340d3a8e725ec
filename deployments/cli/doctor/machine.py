"""What there is of a machine, as the checks take it."""

from __future__ import annotations

import os
import platform
import re
import resource
import runpy
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

import psutil

from deployments.cli.server.server_state import PARTS_OF_RAY

_INIT = 1  # the process whose children have lost their parents
_SMI_TIMEOUT_S = 2.5  # below the three seconds of all checks


@dataclass(frozen=True, slots=True)
class RayProcess:
    """A part of a Ray that runs here; an orphan's parent has ended, or it was made a daemon."""

    name: str
    pid: int
    age_s: float
    is_orphan: bool


@dataclass(frozen=True, slots=True)
class Accelerators:
    """The GPUs of a machine.

    Attributes:
        names: Their names.
        memory: Bytes of each; empty where they are not known, as are the other two.
        driver: The version of their driver.
        driver_cuda: The latest CUDA that the driver runs, as major and minor number.
    """

    names: tuple[str, ...] = ()
    memory: tuple[float, ...] = ()
    driver: str = ""
    driver_cuda: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine, as it was seen at one moment.

    Attributes:
        python: Major and minor number.
        platform: The system and the architecture, as ``Linux x86_64``.
        load: Processes that wanted to run, on average over the last minute.
        free_memory: Bytes that processes can still have.
        shm_free: Bytes that are free in ``/dev/shm``; None where there is none.
        open_files: The most files that one process may be allowed to open.
        now: Seconds since the epoch.
        newest_file: The same, of this program's newest file.
        rays: Parts of Rays.
        token_mode: Permissions of the file with Ray's token; None where there is none.
        gpus: The GPUs.
        torch_cuda: The CUDA that torch was built for; None for a build without, or no torch.
        environment: Environment variables.
    """

    python: tuple[int, int]
    platform: str
    num_cores: int
    load: float
    free_memory: float
    shm_free: float | None
    open_files: float
    now: float
    newest_file: float
    rays: tuple[RayProcess, ...] = ()
    token_mode: int | None = None
    gpus: Accelerators = Accelerators()
    torch_cuda: tuple[int, ...] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def look(cls) -> Machine:
        """Look at this machine."""
        _, open_files = resource.getrlimit(resource.RLIMIT_NOFILE)  # Ray raises it to the hard one
        return cls(
            python=sys.version_info[:2],
            platform=f"{platform.system()} {platform.machine()}",
            num_cores=os.cpu_count() or 1,
            load=os.getloadavg()[0],
            free_memory=psutil.virtual_memory().available,
            shm_free=_free_in(Path("/dev/shm")),
            open_files=float("inf") if open_files == resource.RLIM_INFINITY else open_files,
            now=time.time(),
            newest_file=max(each.stat().st_mtime for each in Path(__file__).parent.iterdir()),
            rays=find_rays(),
            token_mode=_mode_of(Path(os.path.expanduser("~/.ray/auth_token"))),
            gpus=look_at_gpus(),
            torch_cuda=_find_torch_cuda(),
            environment=dict(os.environ),
        )


def find_rays() -> tuple[RayProcess, ...]:
    """Return the parts of all Rays that run here."""
    now, found = time.time(), []
    for each in psutil.process_iter(["name", "ppid", "create_time", "status"]):
        seen = each.info
        if seen["name"] in PARTS_OF_RAY and seen["status"] != psutil.STATUS_ZOMBIE:
            age_s = now - seen["create_time"]
            found.append(RayProcess(seen["name"], each.pid, age_s, seen["ppid"] == _INIT))
    return tuple(found)


def look_at_gpus() -> Accelerators:
    """Return the GPUs that NVIDIA's tool lists; where it does not, as many as have device files."""
    unnamed = Accelerators(("NVIDIA GPU",) * len(list(Path("/dev").glob("nvidia[0-9]*"))))
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return unnamed
    try:
        done = subprocess.run(
            [tool, "-q", "-x"], capture_output=True, text=True, timeout=_SMI_TIMEOUT_S, check=True
        )
        return read_gpus(done.stdout)
    except (OSError, subprocess.SubprocessError, ElementTree.ParseError):
        return unnamed


def read_gpus(told: str) -> Accelerators:
    """Return the GPUs that ``nvidia-smi -q -x`` tells of."""
    root = ElementTree.fromstring(told)
    gpus = root.findall("gpu")
    return Accelerators(
        tuple(gpu.findtext("product_name", "?") for gpu in gpus),
        # In MiB: "81559 MiB".
        tuple(float(gpu.findtext("fb_memory_usage/total", "0").split()[0]) * 2**20 for gpu in gpus),
        root.findtext("driver_version", ""),
        _numbers(root.findtext("cuda_version", "")),
    )


def _find_torch_cuda() -> tuple[int, ...] | None:
    """Return the CUDA that torch was built for, without importing torch, which takes seconds."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    told = runpy.run_path(str(Path(spec.origin).with_name("version.py"))).get("cuda")
    return _numbers(told) if told else None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)))


def _free_in(folder: Path) -> float | None:
    return shutil.disk_usage(folder).free if folder.is_dir() else None


def _mode_of(file: Path) -> int | None:
    try:
        return stat.S_IMODE(file.stat().st_mode)
    except OSError:
        return None

"""Checks of the machine: Python, cores, memory, files, GPUs and clock, beside what is needed."""

from __future__ import annotations

import time

from deployments.cli.doctor.check_result import CheckResult, approve, refuse, say_size, warn
from deployments.cli.doctor.machine import Machine
from deployments.cli.doctor.subject import Subject

_LEAST_PYTHON = (3, 11)  # as in pyproject.toml
_SYSTEMS = ("Linux", "Darwin")
_MOST_LOAD = 4.0  # for each core; at 8 and more Ray did not start within its 30 s
_LEAST_OPEN_FILES = 8192  # Ray's own advice for servers
_PROCESS_BYTES = 0.25 * 2**30  # of a process before it holds anything (docs/operations.md)
_TORCH_BYTES = 0.7 * 2**30  # of an engine's process, before its model (docs/operations.md)
_SERVE_PROCESSES = 2  # Serve's controller and its proxy
_SHARE_OF_STORE = 0.3  # of the free memory, which Ray gives to the objects in /dev/shm
_MOST_STORE = 10e9  # bytes, above which Ray takes less rather than /tmp


def check_python(machine: Machine, _: Subject) -> CheckResult:
    """Check Python's version, and the system that it runs on."""
    version = ".".join(map(str, machine.python))
    fact = f"Python {version} on {machine.platform}"
    if machine.python < _LEAST_PYTHON:
        return refuse(f"{fact} is too old", "make PYTHON=python3.11 install")
    if not machine.platform.startswith(_SYSTEMS):
        return warn(f"{fact}, where nothing was tried", "use Linux or macOS")
    return approve(fact)


def check_load(machine: Machine, _: Subject) -> CheckResult:
    """Check that the cores are free enough for Ray, which gives its start 30 s."""
    fact = f"{machine.num_cores} cores, {machine.load:.1f} processes want to run"
    if machine.load <= _MOST_LOAD * machine.num_cores:
        return approve(fact)
    return warn(
        f"{fact}: Ray may give up, as it has 30 s to start",
        "see `top`, and wait until the load has fallen",
    )


def check_memory(machine: Machine, subject: Subject) -> CheckResult:
    """Check what engines on the CPU need by the plan, and all processes about, beside free."""
    from deployments.config.preflight import cpu_needs
    from rapid.checkpoints.memory import check_fits
    from rapid.errors import ConfigurationError

    free = f"{say_size(machine.free_memory)} are free"
    if subject.problem:
        return approve(f"{free}; what is needed is not known")
    needs = [need for config in subject.configs.values() for need in cpu_needs(config)]
    if not subject.joins_cluster:
        try:
            check_fits(needs, "this machine", machine.free_memory)
        except ConfigurationError as error:
            return refuse(str(error))
    engines = sum(need.total for _, need in needs)
    num_replicas = sum(max(1, pool.min_replicas) for pool in subject.pools) + _SERVE_PROCESSES
    num_engines = sum(
        max(1, part.settings.pool.min_replicas)
        for config in subject.configs.values()
        for part in config.engine_parts.values()
    )
    processes = (num_replicas + num_engines) * _PROCESS_BYTES + num_engines * _TORCH_BYTES
    fact = (
        f"{free}; engines on the CPU need {say_size(engines)}, and {num_replicas + num_engines} "
        f"processes about {say_size(processes)} beside it"
    )
    if engines + processes > machine.free_memory and not subject.joins_cluster:
        return warn(fact, "end other programs, or lower kv_cache_tokens")
    return approve(fact)


def check_shared_memory(machine: Machine, _: Subject) -> CheckResult:
    """Check that Ray's objects have room in /dev/shm; else Ray puts them on the disk."""
    if machine.shm_free is None:
        return approve("there is none, and Ray takes a folder")
    wanted = min(_SHARE_OF_STORE * machine.free_memory, _MOST_STORE)
    fact = f"{say_size(machine.shm_free)} are free, Ray wants {say_size(wanted)}"
    if machine.shm_free >= wanted:
        return approve(fact)
    return warn(
        f"{fact}, and takes a folder of /tmp instead, which is slower",
        "docker run --shm-size 10g, or mount -o remount,size=10G /dev/shm",
    )


def check_open_files(machine: Machine, _: Subject) -> CheckResult:
    """Check how many files and connections one process may have; Ray raises it to the most."""
    if machine.open_files >= _LEAST_OPEN_FILES:
        return approve(f"{machine.open_files:,.0f} for each process")
    return warn(
        f"{machine.open_files:,.0f} for each process: connections may be refused under load",
        f"ulimit -Hn {_LEAST_OPEN_FILES}",
    )


def check_gpus(machine: Machine, subject: Subject) -> CheckResult:
    """Check that there are as many GPUs as the pools reserve, with memory for their engines."""
    from deployments.config.preflight import gpu_needs

    gpus = machine.gpus
    wanted = sum(max(1, pool.min_replicas) * pool.num_gpus for pool in subject.pools)
    names = ", ".join(f"{gpus.names.count(name)} x {name}" for name in dict.fromkeys(gpus.names))
    fact = f"the pools reserve {wanted:g} GPUs, and there are {names or 'none'}"
    if not wanted:
        return approve(f"no pool reserves one, and there are {names or 'none'}")
    if subject.joins_cluster:
        return approve(f"the pools reserve {wanted:g} GPUs of the cluster")
    if wanted > len(gpus.names):
        return refuse(
            fact,
            "write one for what is here (rapid init), or set RAY_ADDRESS to a cluster with more",
        )
    if gpus.memory and not subject.problem:
        for config in subject.configs.values():
            for name, need in gpu_needs(config):
                if need.total > min(gpus.memory):
                    return refuse(
                        f"{name} needs {say_size(need.total)} on each of its GPUs, which have "
                        f"{say_size(min(gpus.memory))}",
                        "lower kv_cache_tokens, or raise tensor_parallel and num_gpus; `rapid "
                        "plan` says what fits",
                    )
    return approve(fact)


def check_cuda(machine: Machine, subject: Subject) -> CheckResult:
    """Check that driver and torch agree on CUDA: one major version runs all of its minor ones."""
    gpus, built = machine.gpus, machine.torch_cuda
    is_wanted = any(pool.num_gpus for pool in subject.pools) and not subject.joins_cluster
    ours = "without CUDA" if built is None else f"for CUDA {'.'.join(map(str, built))}"
    driver = f"the driver {gpus.driver} runs CUDA {'.'.join(map(str, gpus.driver_cuda))}"
    fact = f"torch is built {ours}" + f", {driver}" * bool(gpus.driver)
    if not is_wanted:
        return approve(f"{fact}; no pool here needs it")
    if built is None:
        return refuse(
            fact, "install the CUDA build of the torch version in constraints.txt into .venv"
        )
    if gpus.driver_cuda and built[:1] > gpus.driver_cuda[:1]:
        return refuse(fact, "update NVIDIA's driver, or install a torch for an older CUDA")
    return approve(fact)


def check_clock(machine: Machine, _: Subject) -> CheckResult:
    """Check that the clock is not before this program's files: keys and certificates have times."""
    moment = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(machine.now))
    if machine.now >= machine.newest_file:
        return approve(moment)
    return warn(
        f"it is {moment} here, which is before this program was installed",
        "timedatectl set-ntp true",
    )

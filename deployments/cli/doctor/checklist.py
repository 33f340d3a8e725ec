"""The list of checks, which ``rapid doctor`` tells and ``rapid serve`` passes before it starts Ray.

Checks that wait for another machine wait at the same time, and less than three seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from deployments.cli.doctor import configuration_checks, machine_checks, ray_checks
from deployments.cli.doctor.check_result import CheckResult
from deployments.cli.doctor.machine import Machine
from deployments.cli.doctor.subject import Subject
from rapid.threads import begin

Check = Callable[[Machine, Subject], CheckResult]

CHECKS: Mapping[str, Check] = {
    "python": machine_checks.check_python,
    "configuration": configuration_checks.check_file,
    "models": configuration_checks.check_models,
    "memory": machine_checks.check_memory,
    "gpus": machine_checks.check_gpus,
    "cuda": machine_checks.check_cuda,
    "cores": machine_checks.check_load,
    "/dev/shm": machine_checks.check_shared_memory,
    "open files": machine_checks.check_open_files,
    "clock": machine_checks.check_clock,
    "port": configuration_checks.check_port,
    "qdrant": configuration_checks.check_qdrant,
    "ray": ray_checks.check_leftovers,
    "cluster": ray_checks.check_cluster,
    "ray token": ray_checks.check_token,
    "proxy": ray_checks.check_front,
}


@dataclass(frozen=True)
class Diagnosis:
    """What all checks found, and the configuration that they are about."""

    subject: Subject
    findings: tuple[CheckResult, ...]

    @property
    def errors(self) -> list[CheckResult]:
        """Findings with which a server cannot work."""
        return [each for each in self.findings if each.mark == "error"]

    @property
    def status(self) -> int:
        """The exit status: 0 if all is well, 1 with warnings, 2 if it cannot work."""
        marks = {each.mark for each in self.findings}
        return 2 if "error" in marks else int("warning" in marks)


def examine(path: Path) -> Diagnosis:
    """Run all checks of this machine and of a configuration file."""
    machine = begin(Machine.look)
    return diagnose(Subject.read(path), machine.result())


def diagnose(subject: Subject, machine: Machine, checks: Mapping[str, Check] = CHECKS) -> Diagnosis:
    """Run checks of a machine and a configuration, at the same time."""
    begun = {name: begin(partial(check, machine, subject)) for name, check in checks.items()}
    findings = (replace(each.result(), check=name) for name, each in begun.items())
    return Diagnosis(subject, tuple(findings))

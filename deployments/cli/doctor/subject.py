"""The configuration that the checks are about, as far as it could be read."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deployments.cli.addresses import address_of, joins_cluster
from rapid.threads import begin

if TYPE_CHECKING:
    from cluster.placement import PoolConfig
    from deployments.config.serve_config import ApplicationConfig


def _nothing_refused() -> Future[str]:
    return begin(str)


@dataclass(frozen=True)
class Subject:
    """A configuration.

    Attributes:
        path: Its file.
        address: Host and port of its HTTP server; None where the file cannot be read.
        front: The name of the application that clients ask.
        configs: The settings of every application; empty where the file is wrong.
        misreading: Why the file is wrong; empty if it is not.
        refusal: Why the checkpoints cannot be served, once they are read; empty if they can.
        joins_cluster: Whether it is to run in a Ray that is there.
    """

    path: Path
    address: tuple[str, int] | None = None
    front: str = ""
    configs: Mapping[str, ApplicationConfig] = field(default_factory=dict)
    misreading: str = ""
    refusal: Future[str] = field(default_factory=_nothing_refused)
    joins_cluster: bool = False

    @property
    def problem(self) -> str:
        """Why it cannot be served, in a sentence; empty if it can. It waits for the checkpoints."""
        return self.misreading or self.refusal.result()

    @property
    def pools(self) -> list[PoolConfig]:
        """The pools of all applications."""
        return [pool for config in self.configs.values() for pool in config.pools.values()]

    @classmethod
    def read(cls, path: Path) -> Subject:
        """Read a file, and begin to read what it names of checkpoints."""
        from deployments.config.serve_file import front_of, read_applications
        from rapid.config_errors import read_yaml
        from rapid.errors import ConfigurationError

        subject = cls(path, joins_cluster=joins_cluster())
        try:
            settings = read_yaml(path, "serve_config.yaml")
            absence = begin(partial(_why_absent, settings))  # which waits for another machine
            configs = read_applications(settings, f"{path}: ")
            front = front_of(settings)
        except ConfigurationError as error:
            return replace(subject, misreading=str(error))
        refusal = begin(partial(_why_refused, configs, absence))
        return replace(
            subject, address=address_of(path), front=front, configs=configs, refusal=refusal
        )


def _why_absent(settings: dict[str, Any]) -> str:
    """Return why a model of a file can be had nowhere; empty if all can, or the file is wrong."""
    from deployments.config.named_models import read_application
    from deployments.config.preflight import check_hub
    from deployments.config.serve_file import applications_of
    from rapid.errors import ConfigurationError

    try:
        for application in applications_of(settings):
            check_hub(read_application(application.get("args") or {}))
    except ConfigurationError as error:
        return str(error)
    return ""


def _why_refused(configs: Mapping[str, ApplicationConfig], absence: Future[str]) -> str:
    import transformers  # noqa: F401 (which takes its time, while the hub is asked)

    from deployments.config.preflight import preflight
    from rapid.errors import ConfigurationError

    if why := absence.result():
        return why
    try:
        for config in configs.values():
            preflight(config)
    except ConfigurationError as error:
        return str(error)
    return ""

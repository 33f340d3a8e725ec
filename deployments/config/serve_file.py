"""Parsing and validation of a Serve configuration file before Serve reads it.

Serve validates in an actor, reports errors as nested tracebacks, and passes over keys that it does
not know; `check` reports all of them in one message that names the key.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deployments.config.named_models import read_application
from deployments.config.plans import deployment_plans
from deployments.config.preflight import check_hub, preflight
from deployments.config.serve_config import ApplicationConfig
from deployments.config.tenants import is_loopback
from rapid.config_errors import read_yaml, validate
from rapid.errors import ConfigurationError

if TYPE_CHECKING:
    from ray.serve.schema import ServeDeploySchema

BUILDER = "deployments.app:build"
_MADE_FROM_ARGS = ("user_config", "autoscaling_config", "num_replicas", "request_router_config")


def check(path: str | Path) -> ApplicationConfig:
    """Validate all that can be checked without a start: keys, ranges, checkpoints and bind address.

    Returns:
        The settings of the application that clients ask: the only one that `BUILDER` builds, or of
        several the one at ``/``.

    Raises:
        ConfigurationError: If a check fails; schema violations are listed one per line.
    """
    settings = read_yaml(Path(path), "serve_config.yaml")
    is_local = os.environ.get("RAY_ADDRESS", "local") == "local"
    configs = check_applications(settings, f"{path}: ", starts_here=is_local)
    return configs[front_of(settings)]


def check_applications(
    settings: dict[str, Any], prefix: str = "", *, starts_here: bool = False
) -> dict[str, ApplicationConfig]:
    """Return the checked settings of every application that `BUILDER` builds, by its name.

    Args:
        settings: Content of the file.
        prefix: Start of every line of an error.
        starts_here: Whether they are about to start on this machine, so that the engines of each
            must fit its free memory.

    Raises:
        ConfigurationError: If a check fails.
    """
    configs = read_applications(settings, prefix)
    for config in configs.values():
        check_hub(config)
    return {name: preflight(config, runs_here=starts_here) for name, config in configs.items()}


def read_applications(settings: dict[str, Any], prefix: str = "") -> dict[str, ApplicationConfig]:
    """Return the settings of every application that `BUILDER` builds, by its name.

    Nothing but the file's content is looked at; arguments and errors are `check_applications`'s.
    """
    from ray.serve.schema import ServeDeploySchema  # a second, in which `doctor` asks the hub

    front = front_of(settings)
    file = validate(ServeDeploySchema, settings, prefix=prefix, top="file", extra="forbid")
    configs: dict[str, ApplicationConfig] = {}
    for application in applications_of(settings):
        config = read_application(application.get("args") or {}, prefix)
        _check_address(file, config)
        _check_overrides(application, config)
        configs[name_of(application)] = config
    canary = configs[front].api.canary
    if canary is not None and canary.application not in configs.keys() - {front}:
        raise ConfigurationError(
            f"{prefix}api.canary.application: the file has no other application "
            f"{canary.application!r} with import_path: {BUILDER}"
        )
    if canary is not None and _routes(configs[front]) != _routes(configs[canary.application]):
        raise ConfigurationError(
            f"{prefix}api.canary.application: {canary.application!r} must have the same models, "
            "with targets in pools of the same names"
        )
    return configs


def _routes(config: ApplicationConfig) -> set[tuple[str, str]]:
    return {(model.orchestrator.name, model.target.name) for model in config.served}


def applications_of(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the file's applications that `BUILDER` builds.

    Raises:
        ConfigurationError: If there is none.
    """
    applications = settings.get("applications")
    ours = [
        each
        for each in (applications if isinstance(applications, list) else [])
        if isinstance(each, dict) and each.get("import_path") == BUILDER
    ]
    if not ours:
        raise ConfigurationError(
            f"the file must have at least one application with import_path: {BUILDER}"
        )
    return ours


def name_of(application: dict[str, Any]) -> str:
    """Return an application's name."""
    return str(application.get("name", "default"))


def front_of(settings: dict[str, Any]) -> str:
    """Return the name of the application that clients ask.

    Raises:
        ConfigurationError: If there are several and not exactly one is at ``/``.
    """
    ours = applications_of(settings)
    fronts = [each for each in ours if len(ours) == 1 or each.get("route_prefix", "/") == "/"]
    if len(fronts) != 1:
        raise ConfigurationError(
            f"of {len(ours)} applications with import_path: {BUILDER}, one must have "
            f"route_prefix: /; {len(fronts)} have it"
        )
    return name_of(fronts[0])


def _check_overrides(application: dict[str, Any], config: ApplicationConfig) -> None:
    """Check that every deployment's block is of a deployment, and replaces nothing of ``args``.

    A block replaces an option as a whole: with one number of `autoscaling_config` it would lose
    the others, and with one setting in `user_config` all API keys.
    """
    names = deployment_plans(config).keys()
    for block in application.get("deployments") or ():
        if (name := block["name"]) not in names:
            raise ConfigurationError(
                f"deployments: there is no deployment {name!r}: give one of {', '.join(names)}"
            )
        for option in _MADE_FROM_ARGS:
            if option in block:
                raise ConfigurationError(
                    f"deployments: {name}: {option} is made from args: change the "
                    "settings there (docs/operations.md says what an edit does)"
                )


def _check_address(file: ServeDeploySchema, config: ApplicationConfig) -> None:
    """Check the port, and that a server without API keys binds to loopback.

    Without keys every request that reaches the port is served as the tenant `local`.
    """
    host, port = file.http_options.host, file.http_options.port
    if not 1 <= port <= 65535:
        raise ConfigurationError(f"http_options.port is {port}: set one from 1 to 65535")
    if not config.api.has_keys and not is_loopback(host):
        default = "" if "host" in file.http_options.model_fields_set else ", Serve's default"
        raise ConfigurationError(
            f"http_options.host is {host}{default}, which other machines can reach, and api.keys "
            "is empty: list keys (`rapid hash-key`), name keys_file or keys_env, or bind to "
            "127.0.0.1"
        )

"""Parsing and validation of a Serve configuration file before Serve reads it.

Serve validates in an actor and reports errors as nested tracebacks; `check` reports them in one
message that names the key.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deployments.config.preflight import preflight
from deployments.config.serve_config import ServeConfig
from deployments.config.tenants import is_loopback
from rapid.config_errors import read_yaml, validated
from rapid.errors import ConfigurationError

BUILDER = "deployments.app:build"
_MADE_FROM_ARGS = ("user_config", "autoscaling_config", "num_replicas", "request_router_config")


def check(path: str | Path, *, starts: bool = True) -> ServeConfig:
    """Validate all that can be checked without a start: keys, ranges, checkpoints and bind address.

    Args:
        path: The file.
        starts: Whether the application is about to start, so that its engines must fit the free
            memory of this machine if Ray runs here.

    Raises:
        ConfigurationError: If a check fails; schema violations are listed one per line.
    """
    settings = read_yaml(Path(path), "serve_config.yaml")
    application = application_of(settings)
    args = application.get("args") or {}
    config = validated(ServeConfig, args, prefix=f"{path}: ", top="args")
    _check_bind(settings, config)
    _check_overrides(application)
    is_local = os.environ.get("RAY_ADDRESS", "local") == "local"
    return preflight(config, runs_here=starts and is_local)


def application_of(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the file's one application that `BUILDER` builds.

    Raises:
        ConfigurationError: If there is none, or another one.
    """
    applications = settings.get("applications")
    ours = [
        each
        for each in (applications if isinstance(applications, list) else [])
        if isinstance(each, dict) and each.get("import_path") == BUILDER
    ]
    if len(ours) != 1:
        raise ConfigurationError(
            f"the file must have one application with import_path: {BUILDER}; it has {len(ours)}"
        )
    return ours[0]


def _check_overrides(application: dict[str, Any]) -> None:
    """Check that no deployment's block replaces what is made from ``args``.

    A block replaces an option as a whole: with one number of `autoscaling_config` it would lose
    the others, and with one setting in `user_config` all API keys.
    """
    for block in application.get("deployments") or ():
        for option in _MADE_FROM_ARGS:
            if isinstance(block, Mapping) and option in block:
                raise ConfigurationError(
                    f"deployments: {block.get('name')}: {option} is made from args: change the "
                    "settings there (docs/operations.md says what an edit does)"
                )


def _check_bind(settings: dict[str, Any], config: ServeConfig) -> None:
    """Check that a server without API keys binds to loopback.

    Without keys every request that reaches the port is served as the tenant `local`.
    """
    options = settings.get("http_options") or {}
    if not isinstance(options, Mapping):
        raise ConfigurationError("http_options must be a mapping, such as host: 127.0.0.1")
    host = str(options.get("host", "127.0.0.1"))
    if not config.api.keys and not is_loopback(host):
        raise ConfigurationError(
            f"http_options.host is {host}, which other machines can reach, and api.keys is empty: "
            "list keys (`rapid hash-key`) or bind to 127.0.0.1"
        )

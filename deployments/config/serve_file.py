"""A Serve configuration file, read and checked before Serve sees it.

Serve validates in an actor and reports with a stack of tracebacks; `check` says the same in one
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


def check(path: str | Path) -> ServeConfig:
    """Validate everything that can be known without starting: keys, ranges, checkpoints, the bind.

    Raises:
        ConfigurationError: all that is wrong, a line each.
    """
    settings = read_yaml(Path(path), "serve_config.yaml")
    args = _application(settings).get("args") or {}
    config = validated(ServeConfig, args, prefix=f"{path}: ", top="args")
    _check_bind(settings, config)
    return preflight(config, runs_here=os.environ.get("RAY_ADDRESS", "local") == "local")


def _application(settings: dict[str, Any]) -> dict[str, Any]:
    """The one application of the file."""
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


def _check_bind(settings: dict[str, Any], config: ServeConfig) -> None:
    """Without keys everyone who reaches the port is the tenant `local`: this machine only."""
    options = settings.get("http_options") or {}
    if not isinstance(options, Mapping):
        raise ConfigurationError("http_options must be a mapping, such as host: 127.0.0.1")
    host = str(options.get("host", "127.0.0.1"))
    if not config.api.keys and not is_loopback(host):
        raise ConfigurationError(
            f"http_options.host is {host}, which other machines can reach, and api.keys is empty: "
            "list keys (`rapid hash-key`) or bind to 127.0.0.1"
        )

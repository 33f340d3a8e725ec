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


def check(path: str | Path) -> ServeConfig:
    """Validate all that can be checked without a start: keys, ranges, checkpoints and bind address.

    Raises:
        ConfigurationError: If a check fails; schema violations are listed one per line.
    """
    settings = read_yaml(Path(path), "serve_config.yaml")
    args = application_of(settings).get("args") or {}
    config = validated(ServeConfig, args, prefix=f"{path}: ", top="args")
    _check_bind(settings, config)
    return preflight(config, runs_here=os.environ.get("RAY_ADDRESS", "local") == "local")


def application_of(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the file's one application that `BUILDER` builds."""
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
    """Check that a server without API keys binds to loopback.

    Without keys every request that reaches the port is served as the tenant `local`.
    """
    options = settings.get("http_options") or {}
    if not isinstance(options, Mapping):
        raise ConfigurationError("http_options must be a mapping, such as host: 127.0.0.1")
    host = str(options.get("host", "127.0.0.1"))
    if not config.api.has_keys and not is_loopback(host):
        raise ConfigurationError(
            f"http_options.host is {host}, which other machines can reach, and api.keys is empty: "
            "list keys (`rapid hash-key`), name keys_env, or bind to 127.0.0.1"
        )

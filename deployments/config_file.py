"""A Serve configuration file, read and checked before Serve sees it.

Serve validates in an actor and reports with a stack of tracebacks; `check` says the same in one
message that names the key.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from deployments.config import ServeConfig
from deployments.preflight import preflight
from deployments.tenants import is_loopback
from rapid.errors import ConfigurationError

BUILDER = "deployments.app:build"


def check(path: str | Path) -> ServeConfig:
    """Validate everything that can be known without starting: keys, ranges, checkpoints, the bind.

    Raises:
        ConfigurationError: all that is wrong, a line each.
    """
    settings = _read(Path(path))
    args = _application(settings).get("args") or {}
    try:
        config = ServeConfig.model_validate(args)
    except ValidationError as error:
        raise ConfigurationError(readable(error, args, f"{path}: ")) from None
    _check_bind(settings, config)
    return preflight(config)


def readable(error: ValidationError, data: object, prefix: str = "") -> str:
    """Pydantic's findings, one line each: the key as written in the file, and what is wrong."""
    return "\n".join(
        f"{prefix}{_key(each, data)}: {_what(each['type'], each['msg'], each['loc'])}"
        for each in error.errors()
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        first = " ".join(str(error).split())
        raise ConfigurationError(f"{path} is not YAML: {first}") from None
    if not isinstance(settings, dict):
        raise ConfigurationError(f"{path} is empty: start from serve_config.yaml")
    return settings


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


def _key(error: ErrorDetails, data: object) -> str:
    """Where it is, without the names that pydantic gives to members of a union."""
    location = error["loc"]
    path: list[str] = []
    for index, part in enumerate(location):
        is_absent = error["type"] == "missing" and index == len(location) - 1
        if isinstance(data, Mapping) and (part in data or is_absent):
            data = data.get(part)
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            data = data[part]
        else:
            continue
        path.append(str(part))
    return ".".join(path) or "args"


def _what(kind: str, message: str, location: tuple[int | str, ...]) -> str:
    if kind != "extra_forbidden":
        return message.removeprefix("Value error, ")
    near = difflib.get_close_matches(str(location[-1]), _known_keys(), n=1)
    return "unknown key" + (f"; did you mean {near[0]}?" if near else "")


def _known_keys(root: type[BaseModel] = ServeConfig) -> set[str]:
    """Every key that a configuration may contain, anywhere."""
    keys: set[str] = set()
    for name, field in root.model_fields.items():
        keys.add(name)
        for inner in _models(field.annotation):
            keys |= _known_keys(inner)
    return keys


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [m for each in getattr(annotation, "__args__", ()) for m in _models(each)]

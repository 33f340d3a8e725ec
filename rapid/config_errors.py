"""Reading of settings files, with errors that name the keys as the file writes them."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from rapid.errors import ConfigurationError

Model = TypeVar("Model", bound=BaseModel)


class _Loader(yaml.SafeLoader):
    """A loader that refuses a key written twice, of which the last would hold without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key for key, _ in node.value]
        for at, key in enumerate(keys):
            if key.value in [earlier.value for earlier in keys[:at]]:
                raise yaml.MarkedYAMLError(
                    problem=f"{key.value!r} is written twice", problem_mark=key.start_mark
                )
        return super().construct_mapping(node, deep)


def read_yaml(path: Path, example: str) -> dict[str, Any]:
    """Return the mapping in a YAML file.

    Raises:
        ConfigurationError: The file cannot be read, is not YAML or holds no mapping. The message
            then names `example` as a file to start from.
    """
    try:
        settings = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        first = " ".join(str(error).split())
        raise ConfigurationError(f"{path} is not YAML: {first}") from None
    if not isinstance(settings, dict):
        what = "is empty" if settings is None else "is no configuration, which has keys"
        raise ConfigurationError(f"{path} {what}: start from {example}")
    return settings


def validate(
    model: type[Model],
    settings: object,
    *,
    prefix: str,
    top: str,
    extra: Literal["forbid"] | None = None,
) -> Model:
    """Return `settings` validated as `model`.

    Args:
        settings: Parsed content of the file.
        prefix: Start of every line of the error.
        top: Name used where a finding concerns no single key.
        extra: Whether to refuse unknown keys where the model itself would ignore them.

    Raises:
        ConfigurationError: Validation failed. The message has one line per finding, with the key
            as written in the file; an unknown key comes with the closest known one.
    """
    try:
        return model.model_validate(settings, extra=extra)
    except ValidationError as error:
        findings = (
            f"{prefix}{_key(each, settings) or top}: {_what(each, model)}"
            for each in error.errors()
        )
        raise ConfigurationError("\n".join(findings)) from None


def _key(error: ErrorDetails, data: object) -> str:
    """Return the dotted key of an error, without pydantic's names for members of a union."""
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
    return ".".join(path)


def _what(error: ErrorDetails, root: type[BaseModel]) -> str:
    if error["type"] != "extra_forbidden":
        return error["msg"].removeprefix("Value error, ")
    near = difflib.get_close_matches(str(error["loc"][-1]), _list_keys(root), n=1)
    return "unknown key" + (f"; did you mean {near[0]}?" if near else "")


def _list_keys(root: type[BaseModel]) -> set[str]:
    """Return every key that a file may contain, at any depth."""
    keys: set[str] = set()
    for name, field in root.model_fields.items():
        keys.add(name)
        for inner in _models(field.annotation):
            keys |= _list_keys(inner)
    return keys


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [m for each in getattr(annotation, "__args__", ()) for m in _models(each)]

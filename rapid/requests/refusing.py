"""The refusal of a request whose fields are not valid."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import TypeVar

from pydantic import ValidationError

from rapid.errors import BadRequest
from rapid.requests.chat_fields import AttachedDocument
from rapid.requests.request_fields import Fields

Model = TypeVar("Model", bound=Fields)

_MESSAGES = {
    "too_short": "must not be empty",
    "string_too_short": "must not be empty",
    "too_long": "is too long: at most {max_length}",
    "string_too_long": "is too long: at most {max_length}",
    "model_type": "must be an object",
    "dict_type": "must be an object",
    "list_type": "must be a list",
    "none_required": "is not supported yet: leave it out",
}


def validate_fields(
    schema: type[Model], fields: object, options: type[Fields] | None = None
) -> Model:
    """Return the fields of a request as a model of them.

    Raises:
        BadRequest: One is not valid; the first is named. An unknown one may have been meant for one
            of `options`, which are the model's own unless they are given.
    """
    try:
        return schema.model_validate(fields)
    except ValidationError as error:
        raise bad_request(error, options or schema) from None


def bad_request(error: ValidationError, options: type[Fields]) -> BadRequest:
    """Return the refusal for the first finding of a validation, which it names."""
    first = error.errors(include_url=False, include_input=False)[0]
    param, kind = _param(first["loc"]), first["type"]
    if kind == "extra_forbidden":
        known = AttachedDocument if "documents" in first["loc"] else options
        close = difflib.get_close_matches(str(first["loc"][-1]), list(known.model_fields), n=1)
        hint = f": did you mean {close[0]!r}?" if close else ""
        return BadRequest(f"{param} is not known{hint}", param, "unknown_parameter")
    if kind == "missing":
        return BadRequest(f"{param} is missing", param, "missing_required_parameter")
    message = first["msg"].replace("Input should be", "must be")
    if kind in _MESSAGES:
        message = _MESSAGES[kind].format(**first.get("ctx", {}))
    return BadRequest(f"{param} {message}", param, "invalid_value")


def _param(loc: Sequence[int | str]) -> str:
    """Format a location such as ``("messages", 0, "content")`` as ``messages[0].content``."""
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc)
    return param.removeprefix(".")

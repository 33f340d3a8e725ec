"""Errors of a body that is a chat with other names for its fields, in the words of its caller."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

from deployments.api.dialects.chat.chat_request import ChatRequest
from deployments.api.dialects.chat.parsing import check_chat_request
from deployments.config.api_config import ApiConfig
from rapid.errors import BadRequest


@dataclass(frozen=True)
class Renaming:
    """The names that the fields of a chat have in another form of it.

    Attributes:
        names: The caller's names by those of the chat; the longest ones first.
        places: For each message of the chat, the field that it is of; what is in a message is told
            where that is an entry of a list.
        tools: For each tool of the chat, its place among the caller's.
        schema: The caller's name for the ``parameters`` of a tool.
    """

    names: Mapping[str, str]
    places: Sequence[str]
    tools: Sequence[int] = ()
    schema: str = "parameters"

    def check(self, chat: Mapping[str, Any], config: ApiConfig) -> ChatRequest:
        """Validate a chat.

        Raises:
            BadRequest: It is invalid; the error names the caller's field.
        """
        with self.tell():
            return check_chat_request(chat, config)

    @contextmanager
    def tell(self) -> Iterator[None]:
        """Have refusals within the context name the caller's fields."""
        try:
            yield
        except BadRequest as error:
            if error.param is None:
                raise
            here = self.name(error.param)
            told = str(error).replace(error.param, here, 1)
            raise type(error)(told, here, error.code) from None

    def name(self, param: str) -> str:
        """Return the caller's name for a field of the chat."""
        if found := re.match(r"(messages|tools)\[([0-9]+)\]", param):
            number, rest = int(found[2]), param[found.end() :]
            if found[1] == "tools":
                place = self.tools[number] if number < len(self.tools) else number
                rest = rest.removeprefix(".function").replace(".parameters", f".{self.schema}", 1)
                return f"tools[{place}]{rest}"
            where = self.places[number] if number < len(self.places) else ""
            return where + rest if where.endswith("]") else where
        name = next((each for each in self.names if _is_within(param, each)), None)
        return param if name is None else self.names[name] + param[len(name) :]


def _is_within(param: str, name: str) -> bool:
    """Return whether a field is one of this name, or is in it."""
    return param.startswith(name) and param[len(name) : len(name) + 1] in ("", ".", "[")


def read_text(part: Mapping[str, Any], name: str, where: str) -> str:
    """Return a text in a part of a body, and refuse what is none."""
    text = part.get(name)
    if not isinstance(text, str):
        refuse_field(f"{where}.{name}", "must be a string")
    return text


def refuse_field(param: str, why: str, code: str = "invalid_value") -> NoReturn:
    """Raise BadRequest for a field, whose name the reason continues."""
    raise BadRequest(f"{param} {why}.", param, code)

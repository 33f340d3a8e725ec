"""The error of a file that cannot be turned into text."""

from __future__ import annotations

from typing import Literal

from rapid.errors import BadRequest

UnreadableCode = Literal[
    "unsupported_file",
    "encrypted_file",
    "broken_file",
    "empty_file",
    "file_too_large",
    "parsing_limit",
]


class UnreadableFile(BadRequest):
    """A file that was not read; `code` is an `UnreadableCode`, the message says what to do."""

    def __init__(self, message: str, code: UnreadableCode, param: str | None = "file") -> None:
        super().__init__(message, param, code)

    def __reduce__(self) -> tuple[type[UnreadableFile], tuple[str, UnreadableCode, str | None]]:
        message, param, code = self.args  # in the order of `BadRequest`
        return type(self), (message, code, param)

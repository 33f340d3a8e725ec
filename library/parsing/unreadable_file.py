"""The error of a file that cannot be turned into text, and its sentences."""

from __future__ import annotations

from typing import Literal, NoReturn

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


def refuse_kind(hint: str = "Use plain text, Markdown, HTML, PDF or DOCX.") -> NoReturn:
    """Refuse a file of a kind that is not read."""
    raise UnreadableFile(f"Files of this kind are not read. {hint}", "unsupported_file")


def refuse_encrypted() -> NoReturn:
    """Refuse a file that only a password opens."""
    raise UnreadableFile(
        "The file is encrypted. Remove its password in its program and send it again.",
        "encrypted_file",
    )


def refuse_broken(why: str) -> NoReturn:
    """Refuse a file that breaks the rules of its kind."""
    raise UnreadableFile(
        f"The file is broken: {why}. Open it in its program, save it again and send that.",
        "broken_file",
    )


def refuse_empty(hint: str = "Send one that has.") -> NoReturn:
    """Refuse a file without text."""
    raise UnreadableFile(f"The file has no text. {hint}", "empty_file")


def refuse_costly(what: str, code: UnreadableCode = "parsing_limit") -> NoReturn:
    """Refuse a file whose reading takes more than it may."""
    raise UnreadableFile(
        f"Reading the file takes more than {what}. Split it, or save it in a simpler form.", code
    )

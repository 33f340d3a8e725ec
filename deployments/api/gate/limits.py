"""Limits on what one request can multiply, checked from the cheapest to the dearest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rapid.errors import BadRequest

_MAX_KEYS = 64  # of objects that refuse unknown keys: each would be an error of its own
_KEY_OF_A_MESSAGE = b'"role"'
_MAX_STRINGS = 2**17  # 1.3 million keys held the interpreter's lock for 0.7 s
_MAX_BRACKETS = 2**19  # six million empty objects held the interpreter's lock for 0.75 s


@dataclass(frozen=True, slots=True)
class Limits:
    """What one request may have.

    Attributes:
        max_choices: Most answers (`n`).
        max_messages: Most messages.
        max_documents: Most attached documents.
        max_characters: Most characters of messages and documents together; None for no limit.
    """

    max_choices: int = 8
    max_messages: int = 2048
    max_documents: int = 1024
    max_characters: int | None = None

    def check_body(self, body: bytes) -> None:
        """Check a body before it is parsed, by how often it has the key that every message has.

        Quotes within a text are escaped and do not count. Strings and brackets are counted because
        a parser holds the interpreter's lock, in any thread: a million keys would hold it for a
        second. Brackets count in texts as well.

        Raises:
            BadRequest: There are too many messages, strings of any kind, or brackets.
        """
        num_messages = body.count(_KEY_OF_A_MESSAGE)
        if num_messages > self.max_messages:
            raise _too_many("messages", num_messages, self.max_messages)
        plain = body.replace(rb"\\", b"")  # so that only a quote is escaped by what is left
        num_strings = (plain.count(b'"') - plain.count(b'\\"')) // 2
        if num_strings > _MAX_STRINGS:
            raise BadRequest(
                f"The request body has {num_strings} strings, and this server takes {_MAX_STRINGS}"
                " at most."
            )
        num_brackets = body.count(b"{") + body.count(b"[")
        if num_brackets > _MAX_BRACKETS:
            raise BadRequest(
                f"The request body has {num_brackets} opening brackets, and this server takes "
                f"{_MAX_BRACKETS} at most."
            )

    def check_counts(self, fields: Mapping[str, Any]) -> None:
        """Check a parsed body before it is validated, which looks at everything in it.

        Raises:
            BadRequest: There are too many messages or documents, or too many keys where unknown
                ones are refused: each would be an error of its own.
        """
        for name, entries, most in self._count(fields):
            if len(entries) > most:
                raise _too_many(name, len(entries), most)

    def _count(
        self, fields: Mapping[str, Any]
    ) -> Iterator[tuple[str, list[Any] | dict[str, Any], int]]:
        messages, rapid = fields.get("messages"), fields.get("rapid")
        if isinstance(messages, list):
            yield "messages", messages, self.max_messages
        if not isinstance(rapid, dict):
            return
        yield "rapid", rapid, _MAX_KEYS
        documents = rapid.get("documents")
        if isinstance(documents, list):
            yield "rapid.documents", documents, self.max_documents
            for index, document in enumerate(documents):
                if isinstance(document, dict):
                    yield f"rapid.documents[{index}]", document, _MAX_KEYS

    def check_sizes(
        self, num_choices: int, messages: Iterable[str], documents: Iterable[str]
    ) -> None:
        """Check a validated body.

        Args:
            num_choices: Number of answers.
            messages: Texts of the messages.
            documents: Texts of the documents.

        Raises:
            BadRequest: There are too many answers or too many characters.
        """
        if num_choices > self.max_choices:
            raise BadRequest(f"n must be at most {self.max_choices}", "n", "invalid_value")
        said, attached = sum(map(len, messages)), sum(map(len, documents))
        if self.max_characters is not None and said + attached > self.max_characters:
            raise BadRequest(
                f"messages and documents have {said + attached} characters together, and this "
                f"server takes {self.max_characters} at most",
                "rapid.documents" if attached > said else "messages",
                "context_length_exceeded",
            )


def _too_many(name: str, number: int, most: int) -> BadRequest:
    message = f"{name} has {number} entries, and this server takes {most} at most"
    return BadRequest(message, name, "invalid_value")


USUAL_LIMITS = Limits()

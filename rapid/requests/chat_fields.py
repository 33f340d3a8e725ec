"""Request fields of a chat: its messages, and attached documents."""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

from pydantic import AfterValidator, Field, field_validator

from rapid.chat_messages import Document, Message
from rapid.requests.request_fields import MAX_NAME, Fields, Text, refuse


class Turn(Fields):
    """A message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text

    def as_message(self) -> Message:
        """Return the message in a role that chat templates know: `developer` becomes `system`."""
        return Message("system" if self.role == "developer" else self.role, self.content)


AnyTurn = TypeVar("AnyTurn", bound=Turn)


def someone_asks(turns: list[AnyTurn]) -> list[AnyTurn]:
    """Return the messages of a conversation in which there is a question, and refuse others."""
    if all(turn.role != "user" for turn in turns):
        refuse("messages", "has no message with role 'user': there is no question")
    last = next(turn.content for turn in reversed(turns) if turn.role == "user")
    if not last.strip():
        refuse("messages", "has an empty last message with role 'user': there is no question")
    return turns


class AttachedDocument(Fields):
    """A document attached to the request.

    Attributes:
        message: Number of the user's message with which it came; None for the first one.
    """

    name: Text = Field(min_length=1, max_length=MAX_NAME)
    text: Text
    message: int | None = Field(None, ge=0)

    @field_validator("name")
    @classmethod
    def _name_is_one_line(cls, name: str) -> str:
        if not name.isprintable():
            refuse("name", "must be one line of printable characters")
        return name

    @field_validator("text")
    @classmethod
    def _text_is_not_blank(cls, text: str) -> str:
        if not text.strip():
            refuse("text", "is empty")
        return text

    def as_document(self) -> Document:
        """Return the document as the orchestrator gets it."""
        return Document(self.name, self.text)


def _names_are_distinct(documents: list[AttachedDocument]) -> list[AttachedDocument]:
    names: set[str] = set()
    for document in documents:
        if document.name in names:
            refuse("documents", f"has two documents named {document.name!r}: rename one")
        names.add(document.name)
    return documents


Documents = Annotated[list[AttachedDocument], AfterValidator(_names_are_distinct)]

"""The two prompts of a request: the target reads everything, the drafter what retrieval found.

Both are chats, still without a tokenizer or a template. The target's is the chat as given, with the
attached documents at the start of its first user message, so that questions on one document share a
prefix. The drafter's is the same chat with its long parts replaced, in place, by retrieved chunks::

    plan = plan_drafter_chat(messages, documents, budget_tokens=..., count_tokens=...)
    chunks = ...  # retrieved from plan.documents
    drafter_messages(plan, chunks)

The wording is part of the trained models in `rapid.embedded`: a byte changed here is accuracy lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Protocol

from rapid.errors import BadRequest
from rapid.messages import Document, Message

CountTokens = Callable[[str], int]

VERBATIM_SHARE = 4
"""System text and recent turns stay as they are within ``1 / VERBATIM_SHARE`` of the budget."""


class ChunkText(Protocol):
    """What is needed of a retrieved chunk."""

    @property
    def document(self) -> str:
        """The name of the document it was cut from."""
        ...

    @property
    def text(self) -> str:
        """Its text."""
        ...


@dataclass(frozen=True, slots=True)
class DrafterTurn:
    """A turn of the drafter's chat: chunks of the named documents, then the text that stays."""

    message: Message
    document_names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DrafterPlan:
    """A chat taken apart: what stays word for word, and what is to be searched.

    Attributes:
        turns: the chat, with the places where retrieved chunks go.
        documents: to retrieve from: the attachments, then what did not fit.
        question: what stays of the last user message.
    """

    turns: tuple[DrafterTurn, ...]
    documents: tuple[Document, ...]
    question: str


def target_messages(
    messages: Sequence[Message], documents: Sequence[Document]
) -> tuple[Message, ...]:
    """The chat as given, with `documents` at the start of its first user message."""
    place = _first_user(messages)
    prefix = "".join(f'Document "{each.name}":\n{each.text}\n\n' for each in documents)
    chat = list(messages)
    chat[place] = replace(chat[place], content=prefix + chat[place].content)
    return tuple(chat)


def plan_drafter_chat(
    messages: Sequence[Message],
    documents: Sequence[Document],
    *,
    budget_tokens: int,
    count_tokens: CountTokens,
    question: str | None = None,
) -> DrafterPlan:
    """Decide what the drafter reads word for word and what is left to retrieval.

    The last user message stays, or its end when it is over-long. Leading system text stays when it
    fits a quarter of the budget, and so do the most recent turns that fit what then remains of the
    quarter. Older turns become one document, and so does the beginning of an over-long last message
    and system text that does not fit.

    Args:
        messages: The chat; it has a user message.
        documents: The attachments.
        budget_tokens: Tokens that retrieval may fill.
        count_tokens: Of the target's tokenizer.
        question: The end of the last user message to keep, from `rapid.answering.query`;
            None keeps the whole message.
    """
    last = _last_user(messages)
    content = messages[last].content
    if question is None:
        question = content
    if not content.endswith(question):
        raise ValueError("the question must be the end of the last user message")
    room = budget_tokens // VERBATIM_SHARE
    searched = list(documents)
    names = {document.name for document in documents}

    def search(name: str, text: str) -> str:
        """Leave `text` to retrieval, as a document with a name of its own."""
        number, fresh = 2, name
        while fresh in names:
            number, fresh = number + 1, f"{name} {number}"
        names.add(fresh)
        searched.append(Document(fresh, text))
        return fresh

    head = list(takewhile(lambda message: message.role == "system", messages))
    rest = messages[len(head) : last]
    turns: list[DrafterTurn] = []
    for message in head:
        size = count_tokens(message.content)
        if size <= room:
            room -= size
            turns.append(DrafterTurn(message))
        else:
            name = search("instructions", message.content)
            turns.append(DrafterTurn(replace(message, content=""), (name,)))

    kept = _recent(rest, room - count_tokens(question), count_tokens)
    older = rest[: len(rest) - len(kept)]
    attached = [document.name for document in documents]
    if older:
        attached.append(search("conversation", _transcript(older)))
    body = [*kept, replace(messages[last], content=question), *messages[last + 1 :]]
    places: list[list[str]] = [[] for _ in body]
    places[_first_user(body)] += attached
    if context := content[: len(content) - len(question)]:
        places[len(kept)].append(search("message", context))
    turns += [DrafterTurn(m, tuple(names)) for m, names in zip(body, places, strict=True)]
    return DrafterPlan(tuple(turns), tuple(searched), question)


def drafter_messages(plan: DrafterPlan, chunks: Iterable[ChunkText]) -> tuple[Message, ...]:
    """The drafter's chat, with `chunks` (in document order) where the long parts stood.

    A document without a chunk leaves no trace, nor does system text that consisted of it alone.
    """
    found: dict[str, list[str]] = {}
    for chunk in chunks:
        found.setdefault(chunk.document, []).append(chunk.text.strip())
    chat: list[Message] = []
    for turn in plan.turns:
        prefix = "".join(
            f'Retrieved text chunks of "{name}":\n' + "\n\n".join(found[name]) + "\n\n"
            for name in turn.document_names
            if name in found
        )
        content = prefix + turn.message.content
        if content or turn.message.role != "system":
            chat.append(replace(turn.message, content=content))
    return tuple(chat)


def _first_user(messages: Sequence[Message]) -> int:
    for index, message in enumerate(messages):
        if message.role == "user":
            return index
    raise BadRequest("messages has no message with role 'user': there is no question", "messages")


def _last_user(messages: Sequence[Message]) -> int:
    return len(messages) - 1 - _first_user(messages[::-1])


def _recent(turns: Sequence[Message], room: int, count_tokens: CountTokens) -> list[Message]:
    """The longest end of `turns` that fits and begins with the user, as templates expect."""
    start = len(turns)
    for index in range(len(turns) - 1, -1, -1):
        room -= count_tokens(turns[index].content)
        if room < 0:
            break
        if turns[index].role == "user":
            start = index
    return list(turns[start:])


def _transcript(turns: Sequence[Message]) -> str:
    return "\n\n".join(f"{turn.role}: {turn.content}" for turn in turns)

"""The two prompts of a request: the full chat for the target, a retrieved one for the drafter.

Both are chats, before templating and tokenizing. The target's is the chat as given, with the
attached documents at the start of its first user message, or of that with which they came, so that
questions on one document share a prefix. The drafter's is the same chat with its long parts
replaced, in place, by chunks that are retrieved between `plan_drafter_chat` and `drafter_messages`.

The models in `rapid.embedded` were trained on this exact wording; changing it lowers their
accuracy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from rapid.chat_messages import Document, Message
from rapid.errors import BadRequest
from rapid.ports import Passage

CountTokens = Callable[[str], int]

VERBATIM_SHARE = 4
"""System text and recent turns are kept verbatim within ``1 / VERBATIM_SHARE`` of the budget."""


@dataclass(frozen=True, slots=True)
class DrafterTurn:
    """A turn of the drafter's chat: chunks of the named documents, then verbatim text."""

    message: Message
    document_names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DrafterPlan:
    """A chat split into the text that is kept verbatim and the documents to search.

    Attributes:
        turns: The chat, with the places where retrieved chunks go.
        documents: Documents to retrieve from: the attachments, then the text that did not fit.
        question: The part of the last user message that is kept.
    """

    turns: tuple[DrafterTurn, ...]
    documents: tuple[Document, ...]
    question: str


def target_messages(
    messages: Sequence[Message],
    documents: Sequence[Document],
) -> tuple[Message, ...]:
    """Return the chat with `documents` at the start of its first user message.

    One that came with a later message stands there, so that what was said before keeps its place.

    Raises:
        BadRequest: The chat has no user message.
    """
    first = _first_user(messages)
    places = {name: n for n, each in enumerate(messages) for name in each.documents}
    prefixes: dict[int, str] = {}
    for each in documents:
        place = places.get(each.name, first)
        told = f'Document "{each.name}":\n{each.text}\n\n'
        prefixes[place] = prefixes.get(place, "") + told
    return tuple(each.after(prefixes.get(n, "")) for n, each in enumerate(messages))


def plan_drafter_chat(
    messages: Sequence[Message],
    documents: Sequence[Document],
    *,
    budget_tokens: int,
    count_tokens: CountTokens,
    question: str | None = None,
) -> DrafterPlan:
    """Split a chat into what the drafter reads verbatim and what is left to retrieval.

    The last user message is kept, or only its end when it is too long. Leading system text is kept
    when it fits a quarter of the budget, and so are the most recent turns that fit the rest of that
    quarter. Older turns become one document, the beginning of a too long last message another, and
    so does each system text that does not fit. Of the results of tools after the last user message,
    those stay that fit another quarter, the latest first, and each of the others is a document.

    Args:
        messages: The chat, with at least one user message.
        budget_tokens: Tokens that retrieval may fill.
        count_tokens: Token count of the target's tokenizer.
        question: The end of the last user message to keep, from
            `rapid.answering.prompt.excerpts.query`; None keeps the whole message.

    Raises:
        BadRequest: The chat has no user message.
        ValueError: `question` is not the end of the last user message.
    """
    last = _last_user(messages)
    content = messages[last].text
    if question is None:
        question = content
    if not content.endswith(question):
        raise ValueError("the question must be the end of the last user message")
    room = budget_tokens // VERBATIM_SHARE
    searched = list(documents)
    names = {document.name for document in documents}
    numbers: dict[str, int] = {}  # the highest in use after each name

    def search(name: str, text: str) -> str:
        """Add `text` to the searched documents under a unique name, and return that name."""
        number, fresh = numbers.get(name, 1), name
        while fresh in names:
            number, fresh = number + 1, f"{name} {number + 1}"
        numbers[name] = number
        names.add(fresh)
        searched.append(Document(fresh, text))
        return fresh

    head = list(takewhile(lambda message: message.role == "system", messages))
    rest = messages[len(head) : last]
    turns: list[DrafterTurn] = []
    for message in head:
        size = count_tokens(message.text)
        if size <= room:
            room -= size
            turns.append(DrafterTurn(message))
        else:
            name = search("instructions", message.text)
            turns.append(DrafterTurn(replace(message, content=""), (name,)))

    kept = _recent(rest, room - count_tokens(question), count_tokens)
    older = rest[: len(rest) - len(kept)]
    attached = [document.name for document in documents]
    if older:
        attached.append(search("conversation", _transcript(older)))
    body = [*kept, replace(messages[last], content=question), *messages[last + 1 :]]
    places: list[list[str]] = [[] for _ in body]
    places[_first_user(body)] += attached
    room = budget_tokens // VERBATIM_SHARE
    for index in range(len(body) - 1, len(kept), -1):
        if body[index].role != "tool":
            continue
        if (size := count_tokens(body[index].text)) <= room:
            room -= size
        else:
            name = search(f"tool result {body[index].tool_call_id}", body[index].text)
            places[index].append(name)
            body[index] = replace(body[index], content="")
    if context := content[: len(content) - len(question)]:
        places[len(kept)].append(search("message", context))
    turns += [DrafterTurn(m, tuple(names)) for m, names in zip(body, places, strict=True)]
    return DrafterPlan(tuple(turns), tuple(searched), question)


def drafter_messages(plan: DrafterPlan, chunks: Iterable[Passage]) -> tuple[Message, ...]:
    """Return the drafter's chat, with `chunks` in place of the long parts.

    Chunks of one document stand in the order given, which is theirs in it unless there is a reason.
    A document without a chunk is left out, and so is a system message that consisted of it alone.

    Raises:
        ValueError: A chunk is of no document of the plan, so the chat has no place for it.
    """
    names = dict.fromkeys(document.name for document in plan.documents)
    found: dict[str, list[str]] = {}
    for chunk in chunks:
        if chunk.document not in names:
            raise ValueError(
                f"a chunk is of document {chunk.document!r}, and the plan's documents are "
                f"{list(names)}: retrieve from documents of these names"
            )
        found.setdefault(chunk.document, []).append(chunk.text.strip())
    chat: list[Message] = []
    for turn in plan.turns:
        prefix = "".join(
            f'Retrieved text chunks of "{name}":\n' + "\n\n".join(found[name]) + "\n\n"
            for name in turn.document_names
            if name in found
        )
        message = turn.message.after(prefix)
        if message.text or message.role != "system":
            chat.append(message)
    return tuple(chat)


def _first_user(messages: Sequence[Message]) -> int:
    for index, message in enumerate(messages):
        if message.role == "user":
            return index
    raise BadRequest("messages has no message with role 'user': there is no question", "messages")


def _last_user(messages: Sequence[Message]) -> int:
    return len(messages) - 1 - _first_user(messages[::-1])


def _recent(turns: Sequence[Message], room: int, count_tokens: CountTokens) -> list[Message]:
    """Return the longest end of `turns` that fits in `room` tokens and begins with a user turn.

    Chat templates expect a conversation to begin with the user, and results behind their calls.
    """
    start = len(turns)
    for index in range(len(turns) - 1, -1, -1):
        room -= count_tokens(_tell(turns[index]))
        if room < 0:
            break
        if turns[index].role == "user":
            start = index
    return list(turns[start:])


def _transcript(turns: Sequence[Message]) -> str:
    return "\n\n".join(f"{turn.role}: {_tell(turn)}" for turn in turns)


def _tell(turn: Message) -> str:
    return "\n".join(filter(None, (turn.text, *map(str, turn.tool_calls))))

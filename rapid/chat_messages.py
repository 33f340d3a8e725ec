"""What callers send: the turns of a chat, its tools, and documents.

All of it is immutable, and passes through the ingress and the orchestrator as it is.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any


@dataclass(frozen=True, slots=True)
class ContentPart:
    """A part of a message; each kind is a subclass."""


@dataclass(frozen=True, slots=True)
class TextPart(ContentPart):
    """A part that is text."""

    text: str


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the caller runs.

    Attributes:
        parameters: JSON schema of its arguments, as JSON.
        is_strict: Whether a schema that cannot be enforced is refused; else it may be passed over
            where the model chooses whether to call.
    """

    name: str
    parameters: str
    description: str = ""
    is_strict: bool = False

    def describe(self) -> dict[str, Any]:
        """Return the tool as chat templates take it."""
        function = {"name": self.name, "description": self.description}
        return {
            "type": "function",
            "function": function | {"parameters": json.loads(self.parameters)},
        }


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call in the history of a chat.

    Attributes:
        arguments: A JSON object, as JSON, or the beginning of one where an answer was cut.
    """

    id: str
    name: str
    arguments: str

    def read_arguments(self) -> dict[str, Any]:
        """Return the arguments; none where their text is no JSON object."""
        try:
            given = json.loads(self.arguments)
        except (ValueError, RecursionError):
            return {}
        return given if isinstance(given, dict) else {}

    def __str__(self) -> str:
        return f"{self.name}({self.arguments})"


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of a request.

    Attributes:
        tools: All of them, as the model is told.
        must_call: Whether the answer has to be a call.
        only: Name of the one that may be called; None for any.
        is_parallel: Whether there may be several calls.
    """

    tools: tuple[Tool, ...]
    must_call: bool = False
    only: str | None = None
    is_parallel: bool = True

    @property
    def callable_ones(self) -> tuple[Tool, ...]:
        """The tools that may be called."""
        return tuple(each for each in self.tools if self.only in (None, each.name))


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of the chat; `role` is system, user, assistant or tool.

    Attributes:
        tool_calls: The calls that the assistant makes in it.
        tool_call_id: Id of the call of which a tool's message is the result.
        thinking: What the assistant thought before it, for templates that show that.
        documents: Names of the documents that came with it; others stand in the first message of
            the user.
    """

    role: str
    content: str | tuple[ContentPart, ...]
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    thinking: str = ""
    documents: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The text of the message, joined where it has parts."""
        if isinstance(self.content, str):
            return self.content
        return "".join(each.text for each in self.content if isinstance(each, TextPart))

    def after(self, prefix: str) -> Message:
        """Return the message with a text before all that it has."""
        if isinstance(self.content, str):
            return replace(self, content=prefix + self.content)
        return replace(self, content=(TextPart(prefix), *self.content))


@dataclass(frozen=True, slots=True)
class ThinkingRequest:
    """How much a model shall think before it answers; without settings as much as it likes.

    Attributes:
        is_on: Whether it thinks at all, where that is asked.
        budget: Its most tokens.
        share: The same as a share of the answer's longest.
    """

    is_on: bool | None = None
    budget: int | None = None
    share: float | None = None

    @property
    def is_asked(self) -> bool:
        """Whether there has to be thinking, or a bound for it."""
        return bool(self.is_on) or self.budget is not None or self.share is not None


@dataclass(frozen=True, slots=True)
class ChunkSizes:
    """How long the passages of a document are.

    Attributes:
        tokens: The most tokens of a passage.
        overlap: How many of them, at its beginning, are the last ones of the passage before.
    """

    tokens: int
    overlap: int = 0


@dataclass(frozen=True, slots=True)
class DocumentRef:
    """A reference to a document: its text is elsewhere (`rapid.ports.DocumentResolver`).

    Attributes:
        name: Name that prompts state.
        digest: Hash of the text. It is made once and travels with the document, so that no
            component reads a long text again only to name it.
        num_chars: Length of the text.
        chunk_sizes: Lengths of its passages for retrieval; None are the retriever's own.
    """

    name: str
    digest: str
    num_chars: int
    chunk_sizes: ChunkSizes | None = field(default=None, kw_only=True)

    @property
    def ref(self) -> DocumentRef:
        """The reference alone."""
        if type(self) is DocumentRef:
            return self
        return DocumentRef(self.name, self.digest, self.num_chars, chunk_sizes=self.chunk_sizes)


@dataclass(frozen=True, slots=True)
class Document(DocumentRef):
    """A reference that carries its text."""

    digest: str = field(init=False, repr=False, compare=False)
    num_chars: int = field(init=False, repr=False, compare=False)
    text: str

    def __post_init__(self) -> None:
        digest = blake2b(self.text.encode("utf-8", "surrogatepass"), digest_size=16)
        object.__setattr__(self, "digest", digest.hexdigest())
        object.__setattr__(self, "num_chars", len(self.text))

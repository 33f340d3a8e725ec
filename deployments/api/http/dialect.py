"""What the ingress needs of a dialect: one way to ask and to be answered."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from deployments.api.backend.continuing import Cursor
from deployments.config.api_config import ApiConfig
from library.files.attribute_filters import AttributeFilter
from rapid.events import GenerationEvent
from rapid.messages import GenerateRequest
from rapid.ports import Clock

Events = AsyncIterator[GenerationEvent | None]
"""The events of an answer, and None for each heartbeat's time in which none came."""


@dataclass(frozen=True, slots=True)
class StoredNames:
    """The stored documents that a request names.

    Attributes:
        filters: What the attributes of the vector stores' files must be; None takes all.
        places: For files that are parts of messages, the numbers of these.
    """

    file_ids: Sequence[str] = ()
    store_ids: Sequence[str] = ()
    filters: AttributeFilter | None = None
    places: Mapping[str, int] = field(default_factory=dict)


class Question(Protocol):
    """The parsed body of a request."""

    @property
    def stored(self) -> StoredNames | None:
        """The stored documents that it names; None for none."""
        ...

    def field_of(self, param: str | None) -> str | None:
        """Return the caller's name for a field of the `GenerateRequest`."""
        ...


class AnswerRenderer(Protocol):
    """The renderer of one answer.

    Attributes:
        id: The answer's name, for the log.
        media_type: The type of a streamed response.
    """

    id: str
    media_type: str

    async def render_whole(self, events: Events) -> dict[str, Any]:
        """Return the body of a response that is not streamed."""
        ...

    def render(self, events: Events) -> AsyncIterator[bytes]:
        """Yield the chunks of a response that is streamed, to its end."""
        ...

    def render_error(self, body: dict[str, Any]) -> bytes:
        """Return the chunk that ends a stream with an error."""
        ...


class Dialect(Protocol):
    """A way to ask and to be answered: a folder here and an entry in the ingress's table.

    Attributes:
        media_types: The types that a body may have, in lower case and without parameters.
    """

    media_types: Sequence[str] = ("application/json",)

    async def parse(
        self, body: bytes, config: ApiConfig, request_id: str, tenant: str
    ) -> tuple[Question, GenerateRequest]:
        """Return the question, and the request that an orchestrator runs.

        Raises:
            BadRequest: The body is none of this dialect, or beyond the limits of `config`, or names
                a model that `config` has not.
        """
        ...

    def render_refusal(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the body of a refusal, given OpenAI's, which is as it is unless others differ."""
        return body

    def reply(
        self, asked: Any, cursor: Cursor, fingerprint: str, began: float, clock: Clock
    ) -> AnswerRenderer:
        """Return the renderer of what the client has not of the answer to `asked`, by `cursor`.

        `fingerprint` names the server's release and model; the request came at `began`, in seconds
        of `clock`.
        """
        ...

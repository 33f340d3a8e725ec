"""The models of request bodies, validated strictly (`deployments.api.parsing` reads bytes).

A body has OpenAI's fields plus one object, ``rapid``, for the options of this server. A message of
a validator continues the name of its field.
"""

from __future__ import annotations

import datetime
import re
from typing import Annotated, Any, Literal, NoReturn

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError

from rapid.config import MAX_DRAFT, PAPER, Coupling, Finite, Mode, Transfer
from rapid.messages import Document, GenerateRequest, Message, SpeculationRequest, utc_day

MAX_STOPS = 4
MAX_STOP_LENGTH = 1000
_MAX_NAME = 256
_MAX_QUERY = 2**14


def _refuse(code: str, message: str) -> NoReturn:
    """Raise a validation error whose `message` continues the field's name."""
    raise PydanticCustomError(code, "{what}", {"what": message})


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        _refuse("unicode", "has a lone surrogate (half of an escaped character)")
    return text


def _joined_parts(content: object) -> object:
    """Join a list of text parts into one string; return other content unchanged."""
    if content is None:
        _refuse("content", "must be a string or a list of text parts")
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else part
            _refuse("content", f"has a part of type {kind!r}: only 'text' is supported")
        if not isinstance(part.get("text"), str):
            _refuse("content", "has a text part without a string 'text'")
        texts.append(part["text"])
    return "".join(texts)


Text = Annotated[str, AfterValidator(_encodable)]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")


class ChatMessage(_Body):
    """A message of the conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[Text, BeforeValidator(_joined_parts)]
    tool_calls: list[Any] | None = None
    function_call: dict[str, Any] | None = None

    @field_validator("tool_calls", "function_call")
    @classmethod
    def _no_tools(cls, value: object) -> object:
        if value:
            _refuse("unsupported", "is not supported yet")
        return value

    def as_message(self) -> Message:
        """Return the message in a role that chat templates know: `developer` becomes `system`."""
        return Message("system" if self.role == "developer" else self.role, self.content)


class StreamOptions(_Body):
    """Options of a streamed response."""

    include_usage: bool | None = None


class DocumentBody(_Body):
    """A document attached to the request."""

    model_config = ConfigDict(extra="forbid")

    name: Text = Field(min_length=1, max_length=_MAX_NAME)
    text: Text

    @field_validator("name")
    @classmethod
    def _name_is_one_line(cls, name: str) -> str:
        if not name.isprintable():
            _refuse("name", "must be one line of printable characters")
        return name

    @field_validator("text")
    @classmethod
    def _text_is_not_blank(cls, text: str) -> str:
        if not text.strip():
            _refuse("text", "is empty")
        return text


def _as_day(day: object) -> object:
    if day is None:
        return None
    if isinstance(day, str) and re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", day):
        try:
            return datetime.date.fromisoformat(day)
        except ValueError:
            pass
    _refuse("date", "must be a day of the calendar, written as '2026-01-31'")


class RapidOptions(_Body):
    """The ``rapid`` object of a request; None leaves an option to the server's configuration."""

    model_config = ConfigDict(extra="forbid")

    mode: Mode | None = None
    transfer: Transfer | None = None
    eta: Finite | None = Field(None, ge=0, le=1000)
    max_draft: int | None = Field(None, ge=1, le=MAX_DRAFT)
    coupling: Coupling | None = None
    plausibility: Finite | None = Field(None, ge=0, le=1)
    draft_top_k: int | None = Field(None, ge=1)
    retrieval_tokens: int | None = Field(None, ge=1)
    documents: list[DocumentBody] | None = None
    query: Text | None = Field(None, max_length=_MAX_QUERY)
    refresh: bool | None = None
    date: Annotated[datetime.date | None, BeforeValidator(_as_day)] = None
    explain: Literal["tokens", "none"] | None = None

    @field_validator(*PAPER)
    @classmethod
    def _paper_has_no_variants(cls, value: object, info: ValidationInfo) -> object:
        own = PAPER[info.field_name or ""]
        if info.data.get("mode") == "paper" and value not in (None, own):
            _refuse("paper", f"must be left out with mode 'paper', whose own is {own!r}")
        return value

    @field_validator("query")
    @classmethod
    def _query_is_not_blank(cls, query: str | None) -> str | None:
        if query is not None and not query.strip():
            _refuse("query", "is empty: leave it out to search for the last user message")
        return query

    @field_validator("documents")
    @classmethod
    def _names_are_distinct(cls, documents: list[DocumentBody] | None) -> list[DocumentBody] | None:
        names: set[str] = set()
        for document in documents or ():
            if document.name in names:
                _refuse("documents", f"has two documents named {document.name!r}: rename one")
            names.add(document.name)
        return documents

    def as_speculation(self) -> SpeculationRequest:
        """Return the options that concern speculation."""
        cut_is_off = self.draft_top_k is None and "draft_top_k" in self.model_fields_set
        return SpeculationRequest(
            mode=self.mode or "auto",
            transfer=self.transfer,
            eta=self.eta,
            max_draft=self.max_draft,
            coupling=self.coupling,
            plausibility=self.plausibility,
            draft_top_k=self.draft_top_k,
            all_draft_tokens=cut_is_off,
            refresh=bool(self.refresh),
        )


def _as_stops(stop: object) -> object:
    if isinstance(stop, str):
        return [stop]
    if stop is not None and not isinstance(stop, list):
        _refuse("stop", "must be a string or a list of strings")
    return stop


def _without_vllms_all(top_k: object) -> object:
    """Return `top_k` with vLLM's spelling of "all tokens", -1, as None."""
    return None if isinstance(top_k, int) and top_k == -1 else top_k


Stop = Annotated[Text, Field(min_length=1, max_length=MAX_STOP_LENGTH)]


class ChatRequest(_Body):
    """The body of ``POST /v1/chat/completions``."""

    model: str = Field(max_length=_MAX_NAME)
    messages: list[ChatMessage] = Field(min_length=1)
    temperature: Finite | None = Field(None, ge=0, le=2)
    top_p: Finite | None = Field(None, gt=0, le=1)
    top_k: Annotated[int | None, BeforeValidator(_without_vllms_all)] = Field(None, ge=1)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    stop: Annotated[list[Stop] | None, BeforeValidator(_as_stops)] = Field(
        None, max_length=MAX_STOPS
    )
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    n: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Text | None = Field(None, min_length=1, max_length=_MAX_NAME)
    rapid: RapidOptions | None = None

    @field_validator("messages")
    @classmethod
    def _someone_asks(cls, messages: list[ChatMessage]) -> list[ChatMessage]:
        if all(message.role != "user" for message in messages):
            _refuse("messages", "has no message with role 'user': there is no question")
        return messages

    @field_validator("top_logprobs", "stream_options")
    @classmethod
    def _has_its_switch(cls, value: object, info: ValidationInfo) -> object:
        switch = "logprobs" if info.field_name == "top_logprobs" else "stream"
        asks_for_nothing = info.field_name == "top_logprobs" and value == 0
        if value is not None and not asks_for_nothing and not info.data.get(switch):
            _refuse("switch", f"needs {switch} to be true")
        return value

    @field_validator("max_completion_tokens")
    @classmethod
    def _one_limit(cls, value: int | None, info: ValidationInfo) -> int | None:
        older = info.data.get("max_tokens")
        if value is not None and older is not None and value != older:
            _refuse("max_completion_tokens", "differs from max_tokens: send one of them")
        return value

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def field_of(self, param: str | None) -> str | None:
        """Return the field of this body that a refusal by the orchestrator is about.

        The orchestrator knows one length of the answer and one prompt; a client has two names for
        the length, and most of its prompt may be documents.
        """
        if param == "max_tokens" and self.max_completion_tokens is not None:
            return "max_completion_tokens"
        documents = (self.rapid and self.rapid.documents) or ()
        attached = sum(len(each.text) for each in documents)
        if param == "messages" and attached > sum(len(each.content) for each in self.messages):
            return "rapid.documents"
        return param

    def as_generate_request(self, request_id: str, tenant: str) -> GenerateRequest:
        """Convert the body to a `GenerateRequest`."""
        rapid = self.rapid or RapidOptions()
        return GenerateRequest(
            request_id=request_id,
            tenant=tenant,
            messages=tuple(message.as_message() for message in self.messages),
            documents=tuple(Document(d.name, d.text) for d in rapid.documents or ()),
            query=rapid.query,
            retrieval_tokens=rapid.retrieval_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=self.top_k,
            seed=self.seed,
            max_tokens=self.max_completion_tokens or self.max_tokens,
            num_choices=self.n or 1,
            stop=tuple(self.stop or ()),
            num_logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            is_streamed=bool(self.stream),
            speculation=rapid.as_speculation(),
            explain=rapid.explain == "tokens",
            date=rapid.date or utc_day(),
            cache_salt=self.cache_salt or "",
        )

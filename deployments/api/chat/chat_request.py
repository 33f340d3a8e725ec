"""The models of request bodies, validated strictly (`deployments.api.chat.parsing` reads bytes).

A body has OpenAI's fields plus one object, ``rapid``, for the options of this server. What is not
HTTP's own comes from `rapid.requests`. A message of a validator continues the name of its field.
"""

from __future__ import annotations

import datetime
import re
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from deployments.api.dialect import StoredNames
from library.attribute_filters import AttributeFilter
from rapid.messages import GenerateRequest, utc_day
from rapid.requests import (
    MAX_NAME,
    Documents,
    Fields,
    MethodFields,
    SamplingFields,
    Text,
    Turn,
    refuse,
    someone_asks,
)

_MOST_NAMED = 1024  # files or vector stores of one request: as many as documents


def _join_parts(content: object) -> object:
    """Join a list of text parts into one string; return other content unchanged."""
    if content is None:
        refuse("content", "must be a string or a list of text parts")
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        if not isinstance(part, dict):
            refuse("content", "has a part that is no object: write it as {'type': 'text', ...}")
        if part.get("type") == "file":
            continue  # `ChatMessage` has its id
        if part.get("type") != "text":
            what = "only 'text' and 'file' are supported"
            refuse("content", f"has a part of type {part.get('type')!r}: {what}")
        if not isinstance(part.get("text"), str):
            refuse("content", "has a text part without a string 'text'")
        texts.append(part["text"])
    return "".join(texts)


class _Body(Fields):
    model_config = ConfigDict(extra="ignore")


def _ids_of_files(parts: object) -> object:
    """Return the ids of a message's parts of type ``file``."""
    ids = []
    for part in parts if isinstance(parts, list) else ():
        if isinstance(part, dict) and part.get("type") == "file":
            file = part.get("file")
            file_id = file.get("file_id") if isinstance(file, dict) else None
            if not isinstance(file_id, str):
                refuse("content", "has a file without a string 'file_id': upload it to /v1/files")
            ids.append(file_id)
    return tuple(ids)


class ChatMessage(Turn):
    """A message of the conversation.

    Attributes:
        file_ids: The stored files that parts of its content name.
    """

    model_config = ConfigDict(extra="ignore")

    content: Annotated[Text, BeforeValidator(_join_parts)]
    file_ids: Annotated[tuple[str, ...], BeforeValidator(_ids_of_files)] = ()

    @model_validator(mode="before")
    @classmethod
    def _has_parts(cls, message: object) -> object:
        if isinstance(message, dict):
            message = {k: v for k, v in message.items() if k != "file_ids"}
            if isinstance(content := message.get("content"), list):
                message["file_ids"] = content
        return message


class StreamOptions(_Body):
    """Options of a streamed response."""

    include_usage: bool | None = None


def _as_day(day: object) -> object:
    if day is None:
        return None
    if isinstance(day, str) and re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", day):
        try:
            return datetime.date.fromisoformat(day)
        except ValueError:
            pass
    refuse("date", "must be a day of the calendar, written as '2026-01-31'")


class RapidOptions(MethodFields):
    """The ``rapid`` object of a request."""

    documents: Documents | None = None
    file_ids: Annotated[list[str], Field(max_length=_MOST_NAMED)] | None = None
    vector_store_ids: Annotated[list[str], Field(max_length=_MOST_NAMED)] | None = None
    filters: AttributeFilter | None = None
    date: Annotated[datetime.date | None, BeforeValidator(_as_day)] = None
    explain: Literal["tokens", "none"] | None = None
    progress: bool | None = None


def _without_vllms_all(top_k: object) -> object:
    """Return `top_k` with vLLM's spellings of "all tokens", 0 and -1, as None."""
    is_number = isinstance(top_k, int) and not isinstance(top_k, bool)
    return None if is_number and top_k in (0, -1) else top_k


class ChatRequest(SamplingFields):
    """The body of ``POST /v1/chat/completions``."""

    model_config = ConfigDict(extra="ignore")

    model: str = Field(max_length=MAX_NAME)
    messages: Annotated[list[ChatMessage], Field(min_length=1), AfterValidator(someone_asks)]
    top_k: Annotated[int | None, BeforeValidator(_without_vllms_all)] = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    n: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Text | None = Field(None, min_length=1, max_length=MAX_NAME)
    rapid: RapidOptions | None = None

    @field_validator("top_logprobs", "stream_options")
    @classmethod
    def _has_its_switch(cls, value: object, info: ValidationInfo) -> object:
        switch = "logprobs" if info.field_name == "top_logprobs" else "stream"
        asks_for_nothing = info.field_name == "top_logprobs" and value == 0
        if value is not None and not asks_for_nothing and not info.data.get(switch):
            refuse("switch", f"needs {switch} to be true")
        return value

    @field_validator("max_completion_tokens")
    @classmethod
    def _one_limit(cls, value: int | None, info: ValidationInfo) -> int | None:
        older = info.data.get("max_tokens")
        if value is not None and older is not None and value != older:
            refuse("max_completion_tokens", "differs from max_tokens: send one of them")
        return value

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def says_progress(self) -> bool:
        """Whether a stream has comments that say how far the server is."""
        return bool(self.rapid and self.rapid.progress)

    @property
    def stored(self) -> StoredNames | None:
        """The stored documents that the request names; None for none."""
        rapid = self.rapid or RapidOptions()
        in_messages = [each for message in self.messages for each in message.file_ids]
        names = StoredNames(
            tuple(dict.fromkeys([*in_messages, *(rapid.file_ids or ())])),
            tuple(dict.fromkeys(rapid.vector_store_ids or ())),
            rapid.filters,
        )
        return names if names.file_ids or names.store_ids else None

    @property
    def num_chars(self) -> tuple[int, int]:
        """The characters of all messages, and those of all documents."""
        documents = (self.rapid and self.rapid.documents) or ()
        said = sum(len(each.content) for each in self.messages)
        return said, sum(len(each.text) for each in documents)

    def field_of(self, param: str | None) -> str | None:
        """Return the field of this body that a refusal by the orchestrator is about.

        The orchestrator knows one length of the answer and one prompt; a client has two names for
        the length, and most of its prompt may be documents.
        """
        if param == "max_tokens" and self.max_completion_tokens is not None:
            return "max_completion_tokens"
        said, attached = self.num_chars
        if param == "messages" and attached > said:
            return "rapid.documents"
        return param

    def as_generate_request(
        self, request_id: str, tenant: str, default_temperature: float | None = None
    ) -> GenerateRequest:
        """Convert the body to a `GenerateRequest`; without another default its temperature is 1."""
        sampling = self.as_sampling(1.0 if default_temperature is None else default_temperature)
        if self.max_completion_tokens is not None:
            sampling["max_tokens"] = self.max_completion_tokens
        rapid = self.rapid or RapidOptions()
        return GenerateRequest(
            request_id=request_id,
            tenant=tenant,
            messages=tuple(message.as_message() for message in self.messages),
            documents=tuple(each.as_document() for each in rapid.documents or ()),
            query=rapid.query,
            retrieval_tokens=rapid.retrieval_tokens,
            num_choices=self.n or 1,
            num_logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            is_streamed=bool(self.stream),
            speculation=rapid.as_speculation(),
            explain=rapid.explain == "tokens",
            citations=bool(rapid.citations),
            date=rapid.date or utc_day(),
            cache_salt=self.cache_salt or "",
            model=self.model,
            **sampling,
        )

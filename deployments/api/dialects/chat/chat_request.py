"""The models of request bodies, validated strictly (the module `parsing` reads bytes).

A body has OpenAI's fields plus one object, ``rapid``, for the options of this server. What is not
HTTP's own comes from `rapid.requests`. A message of a validator continues the name of its field.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.json_schema import SkipJsonSchema

from deployments.api.dialects.chat.thinking_fields import ThinkingFields
from deployments.api.http.dialect import StoredNames
from library.files.attribute_filters import AttributeFilter
from rapid.calling.tool_fields import CallingTurn, ToolSettings, check_calls
from rapid.chat_messages import Message
from rapid.messages import GenerateRequest, utc_day
from rapid.requests.chat_fields import Documents, someone_asks
from rapid.requests.grammar_fields import Choices, Pattern, Rules, SchemaOrText
from rapid.requests.method_fields import MethodFields
from rapid.requests.request_fields import MAX_NAME, OpenFields, Text, refuse
from rapid.requests.sampling_fields import SamplingFields
from rapid.transfers import Transfer

_GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
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
        kind = part.get("type")
        if kind not in ("text", "refusal"):
            what = "only 'text' and 'file' are supported"
            refuse("content", f"has a part of type {kind!r}: {what}")
        if not isinstance(part.get(kind), str):
            refuse("content", f"has a {kind} part without a string {kind!r}")
        texts.append(part[kind])
    return "".join(texts)


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


class ChatMessage(CallingTurn):
    """A message of the conversation.

    Attributes:
        file_ids: The stored files that parts of its content name.
        reasoning_content: What the assistant thought before it; `reasoning` is another name.
    """

    model_config = ConfigDict(extra="ignore")

    content: Annotated[
        Text, BeforeValidator(_join_parts, json_schema_input_type=str | list[dict[str, Any]])
    ]
    file_ids: SkipJsonSchema[Annotated[tuple[Text, ...], BeforeValidator(_ids_of_files)]] = ()
    reasoning_content: Text | None = None
    reasoning: Text | None = None

    @model_validator(mode="before")
    @classmethod
    def _has_parts(cls, message: object) -> object:
        if isinstance(message, dict):
            message = {k: v for k, v in message.items() if k != "file_ids"}
            if isinstance(content := message.get("content"), list):
                message["file_ids"] = content
            says_more = message.get("tool_calls") or message.get("refusal") is not None
            if content is None and message.get("role") == "assistant" and says_more:
                message["content"] = message.get("refusal") or ""
        return message

    def as_message(self) -> Message:
        """Return the message with what was thought before it."""
        thinking = self.reasoning_content or self.reasoning or ""
        is_told = self.role == "assistant"
        return replace(super().as_message(), thinking=thinking if is_told else "")


class StreamOptions(OpenFields):
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

    transfer: Transfer | None = None  # a program's own rule is known in its process alone
    documents: Documents | None = None
    file_ids: Annotated[list[Text], Field(max_length=_MOST_NAMED)] | None = None
    vector_store_ids: Annotated[list[Text], Field(max_length=_MOST_NAMED)] | None = None
    filters: AttributeFilter | None = None
    date: Annotated[datetime.date | None, BeforeValidator(_as_day)] = None
    progress: bool | None = None


def names_in(
    messages: Sequence[ChatMessage], rapid: RapidOptions | None = None
) -> StoredNames | None:
    """Return the stored documents that messages and the options name; None for none."""
    rapid = rapid or RapidOptions()
    in_messages = [each for message in messages for each in message.file_ids]
    places: dict[str, int] = {}
    for number, message in enumerate(messages):
        for each in message.file_ids if message.role == "user" else ():
            places.setdefault(each, number)
    names = StoredNames(
        tuple(dict.fromkeys([*in_messages, *(rapid.file_ids or ())])),
        tuple(dict.fromkeys(rapid.vector_store_ids or ())),
        rapid.filters,
        places,
    )
    return names if names.file_ids or names.store_ids else None


def _without_vllms_all(top_k: object) -> object:
    """Return `top_k` with vLLM's spellings of "all tokens", 0 and -1, as None."""
    is_number = isinstance(top_k, int) and not isinstance(top_k, bool)
    return None if is_number and top_k in (0, -1) else top_k


class StreamedFields(SamplingFields):
    """The fields of chats and completions that say how an answer is sampled and streamed."""

    top_k: Annotated[int | None, BeforeValidator(_without_vllms_all)] = Field(None, ge=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_progress: bool | None = None  # llama.cpp's
    cache_salt: Text | None = Field(None, min_length=1, max_length=MAX_NAME)
    priority: int | None = Field(None, ge=-(2**31), le=2**31 - 1)  # vLLM's

    @field_validator("stream_options", "return_progress")
    @classmethod
    def _is_streamed(cls, given: StreamOptions | bool | None, info: ValidationInfo) -> object:
        if given and not info.data.get("stream"):
            refuse("switch", "needs stream to be true")
        return given

    @property
    def includes_usage(self) -> bool:
        """Whether the last chunk of a streamed answer counts its tokens."""
        return bool(self.stream_options and self.stream_options.include_usage)


class ChatRequest(StreamedFields, ToolSettings, ThinkingFields):
    """The body of ``POST /v1/chat/completions``."""

    model_config = ConfigDict(extra="ignore")

    model: Text = Field(max_length=MAX_NAME)
    messages: Annotated[
        list[ChatMessage],
        Field(min_length=1),
        AfterValidator(someone_asks),
        AfterValidator(check_calls),
    ]
    max_completion_tokens: int | None = Field(None, ge=1)
    n: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    guided_json: SchemaOrText = None  # vLLM's older names of `structured_outputs`
    guided_regex: Pattern = None
    guided_choice: Choices = None
    guided_grammar: Rules = None
    rapid: RapidOptions | None = None
    _ignored: tuple[str, ...] = PrivateAttr(())

    @field_validator("top_logprobs")
    @classmethod
    def _has_its_switch(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value and not info.data.get("logprobs"):
            refuse("switch", "needs logprobs to be true")
        return value

    @field_validator("max_completion_tokens")
    @classmethod
    def _one_limit(cls, value: int | None, info: ValidationInfo) -> int | None:
        older = info.data.get("max_tokens")
        if value is not None and older is not None and value != older:
            refuse("max_completion_tokens", "differs from max_tokens: send one of them")
        return value

    @field_validator("rapid")
    @classmethod
    def _documents_have_their_messages(
        cls, given: RapidOptions | None, info: ValidationInfo
    ) -> RapidOptions | None:
        roles = [each.role for each in info.data.get("messages", ())]
        for each in (given.documents if given is not None else None) or ():
            if each.message is not None and roles[each.message : each.message + 1] != ["user"]:
                what = f"has a document with message {each.message}, which is none of the user's"
                refuse("message", f"{what}: count all messages from 0")
        return given

    @field_validator(*_GUIDED)
    @classmethod
    def _one_name(cls, given: str | None, info: ValidationInfo) -> str | None:
        others = ("response_format", "structured_outputs", *_GUIDED)
        older = next((name for name in others if info.data.get(name) is not None), None)
        if given is not None and older is not None:
            refuse("grammar", f"says the same as {older}: send one of them")
        return given

    @property
    def grammar(self) -> str | None:
        """The grammar of the answer; None for any text."""
        return next(
            (given for name in _GUIDED if (given := getattr(self, name)) is not None),
            super().grammar,
        )

    @property
    def says_progress(self) -> bool:
        """Whether a stream has comments that say how far the server is."""
        return bool(self.rapid and self.rapid.progress)

    @property
    def stored(self) -> StoredNames | None:
        """The stored documents that the request names; None for none."""
        return names_in(self.messages, self.rapid)

    @property
    def num_chars(self) -> tuple[int, int]:
        """The characters of all messages, and those of all documents."""
        documents = (self.rapid and self.rapid.documents) or ()
        messages = [each.as_message() for each in self.messages]
        said = sum(len(each.text) + len(each.thinking) for each in messages)
        said += sum(len(str(call)) for each in messages for call in each.tool_calls)
        return said, sum(len(each.text) for each in documents)

    def field_of(self, param: str | None) -> str | None:
        """Return the field of this body that a refusal by the orchestrator is about.

        The orchestrator knows one length of the answer and one prompt; a client has two names for
        the length, and most of its prompt may be documents.
        """
        if param == "max_tokens" and self.max_completion_tokens is not None:
            return "max_completion_tokens"
        said, attached = self.num_chars
        if param in ("reasoning_effort", "thinking_token_budget"):
            return self.name_thinking(param)
        if param == "response_format" and self.tools and self.grammar is None:
            return "tools"
        if param == "messages" and attached > said:
            return "rapid.documents"
        return param

    def ignore(self, names: Iterable[str]) -> ChatRequest:
        """Return the request with the names of more fields of its body that change nothing."""
        told = self.model_copy()
        told._ignored = (*self._ignored, *names)
        return told

    def as_generate_request(
        self, request_id: str, tenant: str, default_temperature: float | None = None
    ) -> GenerateRequest:
        """Convert the body to a `GenerateRequest`; without another default its temperature is 1."""
        sampling = self.as_sampling(1.0 if default_temperature is None else default_temperature)
        if self.max_completion_tokens is not None:
            sampling["max_tokens"] = self.max_completion_tokens
        rapid = self.rapid or RapidOptions()
        came: dict[int | None, list[str]] = {}
        for document in rapid.documents or ():
            came.setdefault(document.message, []).append(document.name)
        return GenerateRequest(
            request_id=request_id,
            tenant=tenant,
            messages=tuple(
                replace(each.as_message(), documents=tuple(came.get(number, ())))
                for number, each in enumerate(self.messages)
            ),
            documents=tuple(each.as_document() for each in rapid.documents or ()),
            query=rapid.query,
            retrieval_tokens=rapid.retrieval_tokens,
            num_choices=self.n or 1,
            num_logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            is_streamed=bool(self.stream),
            speculation=rapid.as_speculation(),
            **rapid.as_explanation(),
            citations=bool(rapid.citations),
            ignored=self._ignored,
            penalize_documents=bool(rapid.penalize_documents),
            date=rapid.date or utc_day(),
            cache_salt=self.cache_salt or "",
            priority=self.priority or 0,
            model=self.model,
            tools=self.read_tools(sampling),
            thinking=self.read_thinking(),
            **sampling,
        )

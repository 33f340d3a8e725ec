"""The body of ``POST /v1/responses``, as a request and as the chat that it is.

What is not the route's own (`temperature`, `seed`, `rapid`, ...) means what it means in a chat, and
is validated there. An error there is told by the name that the field has here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from deployments.api.dialects.chat.chat_request import ChatRequest
from deployments.api.dialects.chat.parsing import CHAT_FIELDS, refuse_misplaced
from deployments.api.dialects.renaming import Renaming
from deployments.api.dialects.responses.body.input_items import as_messages, check_told
from deployments.api.dialects.responses.body.response_tools import (
    TOOLS,
    FileSearch,
    allow,
    choose,
    read_tools,
)
from deployments.api.files.bodies_of_files import Metadata
from deployments.api.http.dialect import StoredNames
from deployments.api.http.field_table import FieldTable
from deployments.config.api_config import ApiConfig
from rapid.requests.refusing import validate_fields
from rapid.requests.request_fields import MAX_NAME, MAX_QUERY, OpenFields, Text, refuse

Json = dict[str, Any]
Include = Literal[
    "file_search_call.results",
    "message.output_text.logprobs",
    # Of tools that this server has not, so that there is nothing to include.
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]

_UNSUPPORTED: dict[str, tuple[Any, ...]] = {  # with the values that ask for nothing
    "access_programs": ({},),
    "background_options": ({}, {"completion_window": "soonest"}),
    "context_management": ([],),
    "image": ({},),
    "logprobs": (False,),
    "n": (1,),
    "prompt": (),
}
_NAMES_HERE = {
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "thinking_token_budget": "reasoning.max_tokens",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "verbosity": "text.verbosity",
}


class TextOptions(OpenFields):
    """The ``text`` of a request."""

    format: dict[str, Any] | None = None
    verbosity: Text | None = None


class ConversationName(OpenFields):
    """A conversation as an object."""

    id: Text


class ReasoningSettings(OpenFields):
    """The ``reasoning`` of a request; a summary of it is never made.

    Attributes:
        max_tokens: Most tokens of it.
    """

    effort: Text | None = None
    max_tokens: int | None = Field(None, ge=0)


def _as_id(given: object) -> object:
    return given.get("id") if isinstance(given, dict) else given


def _is_text_or(kind: type, what: str) -> BeforeValidator:
    def check(given: object) -> object:
        if given is not None and not isinstance(given, str | kind):
            refuse("kind", f"must be a string or {what}")
        return given

    items = dict[str, Any] if kind is dict else list[dict[str, Any]]
    return BeforeValidator(check, json_schema_input_type=str | items | None)


Input = Annotated[Any, _is_text_or(list, "a list of items")]


class ResponsesRequest(OpenFields):
    """The fields of ``POST /v1/responses`` that a chat has not, or by another name."""

    model: Text = Field(max_length=MAX_NAME)
    input: Input = None
    instructions: Text | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    max_tool_calls: int | None = Field(None, ge=1)
    metadata: Metadata | None = None
    store: bool | None = None
    previous_response_id: Text | None = None
    conversation: Annotated[
        Text | None,
        BeforeValidator(_as_id, json_schema_input_type=str | ConversationName | None),
    ] = None
    stream: bool | None = None
    background: bool | None = None
    include: list[Include] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Annotated[Any, _is_text_or(dict, "an object")] = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningSettings | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    user: Text | None = None
    prompt_cache_key: Text | None = None
    safety_identifier: Text | None = None
    truncation: Literal["auto", "disabled"] | None = None

    @model_validator(mode="after")
    def _has_one_history(self) -> ResponsesRequest:
        if self.conversation is not None and self.previous_response_id is not None:
            refuse("history", "must have previous_response_id or conversation, not both")
        return self


_RENAMED = {name: here for name, here in _NAMES_HERE.items() if "." not in name}
RESPONSES_FIELDS = CHAT_FIELDS.derive(
    ResponsesRequest.model_fields,
    _UNSUPPORTED,
    ("return_progress", "stream_options"),
    _RENAMED,
    {
        "reasoning": FieldTable(
            ReasoningSettings.model_fields,
            {"context": ("auto",), "mode": ("standard",)},
            {"generate_summary", "summary"},
        ),
        "text": FieldTable(TextOptions.model_fields, {}),
        "tools": TOOLS,
    },
)


@dataclass(frozen=True)
class Past:
    """What came before a request.

    Attributes:
        items: The items, oldest first.
        param: The field that named it.
        rapid: The stored documents that it named, as fields of ``rapid``.
    """

    items: Sequence[Json] = ()
    param: str = "previous_response_id"
    rapid: Json = field(default_factory=dict)


@dataclass(frozen=True)
class ResponsesQuestion:
    """A request with the chat that it is.

    Attributes:
        items: Its own items.
        tenant: Who asks.
        search: Its tool for stored documents, if it has one that may be used.
        renaming: The names that the fields of the chat have here.
        temperature: Of the answer.
        is_kept: Whether the response is to be kept.
        past: What came before it.
    """

    body: ResponsesRequest
    chat: ChatRequest
    items: Sequence[Json]
    tenant: str
    search: FileSearch | None
    renaming: Renaming
    temperature: float
    is_kept: bool
    past: Past

    @property
    def stored(self) -> StoredNames | None:
        """The stored documents that it names; None for none."""
        return self.chat.stored

    @property
    def query(self) -> str:
        """What is searched for, at its longest."""
        rapid = self.chat.rapid
        if rapid is not None and rapid.query:
            return rapid.query
        asked = next(each for each in reversed(self.chat.messages) if each.role == "user")
        return asked.content[-MAX_QUERY:]

    @property
    def shows_results(self) -> bool:
        """Whether the response lists what a search found."""
        return "file_search_call.results" in (self.body.include or ())

    def field_of(self, param: str | None) -> str | None:
        """Return the caller's name for a field of the `GenerateRequest`."""
        param = self.chat.field_of(param)
        return param and self.renaming.name(param)


def read_body(fields: Json) -> tuple[ResponsesRequest, Sequence[str]]:
    """Validate the fields of a body that are the route's own.

    Returns:
        These fields, and the names of those that change nothing.

    Raises:
        BadRequest: One is invalid or not supported; it is named.
    """
    refuse_misplaced(fields, ResponsesRequest)
    ignored = RESPONSES_FIELDS.list_ignored(fields)  # which refuses those that are not supported
    for name in ("tools", "tool_choice", "text"):  # which the response repeats as they are
        check_told(fields.get(name), name)
    return validate_fields(ResponsesRequest, fields), ignored


def ask(
    fields: Json,
    body: ResponsesRequest,
    ignored: Sequence[str],
    items: Sequence[Json],
    past: Past,
    config: ApiConfig,
) -> tuple[ChatRequest, FileSearch | None, Renaming]:
    """Return the chat that a body is after what came before, its search, and its names."""
    named = [("instructions", _system(body.instructions))] if body.instructions else []
    named += [(past.param, message) for _, message in as_messages(past.items)]
    named += [(f"input[{place}]", message) for place, message in as_messages(items)]
    places = [place for place, _ in named]
    search, functions = read_tools(body.tools or (), body.tool_choice)
    choice = body.tool_choice
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        search, functions, choice = allow(choice, search, functions)
    rapid = fields.get("rapid")
    if rapid is None or isinstance(rapid, dict):
        own = {} if body.truncation is None else {"truncation": body.truncation}
        rapid = _attach(past.rapid, search, body.tools or (), own | (rapid or {}))
    in_chats = {*RESPONSES_FIELDS.honoured} - {*ResponsesRequest.model_fields}
    chat: Json = {name: value for name, value in fields.items() if name in in_chats}
    chat |= {
        "model": body.model,
        "messages": [message for _, message in named],
        "stream": body.stream or body.background,  # which goes on where it was, as a stream does
        "max_completion_tokens": body.max_output_tokens,
        "logprobs": _has_logprobs(body),
        "top_logprobs": body.top_logprobs if _has_logprobs(body) else None,
        "rapid": rapid,
        **_format(body.text),
    }
    reasoning = body.reasoning or ReasoningSettings()
    for name, given in (
        ("reasoning_effort", reasoning.effort),
        ("thinking_token_budget", reasoning.max_tokens),
    ):
        chat[name] = fields.get(name) if given is None else given
    if functions:
        chat |= {"tools": list(functions.values()), "tool_choice": choose(choice)}
        if body.parallel_tool_calls is not None:
            chat["parallel_tool_calls"] = body.parallel_tool_calls
    renaming = Renaming(_NAMES_HERE, places, list(functions))
    asked = renaming.check(chat, config).ignore(tuple(ignored))
    return asked, search, renaming


def _has_logprobs(body: ResponsesRequest) -> bool:
    return "message.output_text.logprobs" in (body.include or ()) or bool(body.top_logprobs)


def _system(text: str) -> Json:
    return {"role": "system", "content": text}


def _attach(past: Json, search: FileSearch | None, tools: Sequence[Json], given: Json) -> Json:
    """Return the ``rapid`` of a request, to which belongs what was attached before.

    Files are added to those before; vector stores take the place of those before.
    """
    found = dict(past)
    if search is not None:
        filters = next(each.get("filters") for each in tools if each.get("type") == "file_search")
        found |= {"vector_store_ids": search.vector_store_ids, "filters": filters}
    rapid = found | given
    if isinstance(given.get("file_ids"), list):
        rapid["file_ids"] = [*past.get("file_ids", ()), *given["file_ids"]]
    return rapid


def _format(text: TextOptions | None) -> Json:
    chat: Json = {} if text is None else {"verbosity": text.verbosity}
    if text is not None and text.format is not None:
        form = chat["response_format"] = {"type": text.format.get("type")}
        if form["type"] == "json_schema":
            form["json_schema"] = {k: v for k, v in text.format.items() if k != "type"}
    return chat

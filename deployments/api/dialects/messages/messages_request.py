"""The body of ``POST /v1/messages``, as a request and as the chat that it is.

What is not the route's own (`temperature`, `top_k`, `rapid`, ...) means what it means in a chat.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import Field, model_validator

from deployments.api.dialects.chat.chat_request import ChatRequest
from deployments.api.dialects.chat.parsing import CHAT_FIELDS, refuse_misplaced
from deployments.api.dialects.renaming import Renaming, read_text, refuse_field
from deployments.api.http.dialect import StoredNames
from deployments.api.http.field_table import FieldTable
from deployments.config.api_config import ApiConfig
from rapid.requests.refusing import validate_fields
from rapid.requests.request_fields import MAX_NAME, OpenFields, Text, refuse

Json = dict[str, Any]

# What Claude Code asks for: that no thinking is taken out of the chat, as none is here.
_KEEP_ALL: list[Json] = [
    {"type": "clear_thinking_20251015", "keep": all_turns} for all_turns in ("all", {"type": "all"})
]
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {  # with the values that ask for nothing
    "container": (),
    "context_management": ({}, {"edits": []}, *({"edits": [each]} for each in _KEEP_ALL)),
    "inference_geo": (),
    "logprobs": (False,),
    "mcp_servers": ([],),
    "n": (1,),
    "speed": ("standard",),
    "top_logprobs": (0,),
}
_IGNORED = {  # which change no answer: names of callers, and hints to caches and logs
    "cache_control",
    "diagnostics",
    "metadata",
    "return_progress",
    "service_tier",
    "stream_options",
    "user_profile_id",
    "workspace_id",
}
_NAMES_HERE = {
    "max_completion_tokens": "max_tokens",
    "reasoning_effort": "output_config.effort",
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
    "thinking_token_budget": "thinking.budget_tokens",
    "chat_template_kwargs.enable_thinking": "thinking.type",
}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class AnthropicTurn(OpenFields):
    """A message: a text, or blocks."""

    role: Literal["user", "assistant"]
    content: Any


class ThinkingSettings(OpenFields):
    """The ``thinking`` of a request; without it the model does as it is used to.

    Attributes:
        display: Whether the answer has what was thought.
    """

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = Field(None, ge=1)
    display: Literal["summarized", "omitted"] | None = None

    @model_validator(mode="after")
    def _has_a_budget(self) -> ThinkingSettings:
        if (self.budget_tokens is not None) != (self.type == "enabled"):
            refuse("budget", "must have budget_tokens with type 'enabled', and only then")
        return self


class MessagesRequest(OpenFields):
    """The fields of ``POST /v1/messages`` that a chat has not, or by another name."""

    model: Text = Field(max_length=MAX_NAME)
    max_tokens: int = Field(ge=1)
    messages: list[AnthropicTurn] = Field(min_length=1)
    system: Any = None
    stop_sequences: list[Text] | None = None
    stream: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    thinking: ThinkingSettings | None = None


_RENAMED = {name: here for name, here in _NAMES_HERE.items() if "." not in name}
del _RENAMED["thinking_token_budget"]  # vLLM's, which may stand beside an adaptive thinking
_BLOCKS = FieldTable(  # of all kinds
    {"type", "text", "source", "title", "citations", "context", "id", "name", "input", "thinking"}
    | {"tool_use_id", "content", "is_error"},
    {},
    {"cache_control", "caller", "data", "signature", "toolset_name"},
)
_TOOLS = FieldTable(
    {"type", "name", "description", "input_schema", "strict"},
    {"allowed_callers": (["direct"],), "input_examples": ([],)},
    {"cache_control", "defer_loading", "eager_input_streaming"},
)
MESSAGES_FIELDS = CHAT_FIELDS.derive(
    MessagesRequest.model_fields,
    _UNSUPPORTED,
    _IGNORED,
    _RENAMED,
    {
        "messages": FieldTable(AnthropicTurn.model_fields, {}, nested={"content": _BLOCKS}),
        "output_config": FieldTable({"effort", "format"}, {"task_budget": ()}),
        "system": _BLOCKS,
        "thinking": FieldTable(ThinkingSettings.model_fields, {}),
        "tool_choice": FieldTable({"type", "name", "disable_parallel_tool_use"}, {}),
        "tools": _TOOLS,
    },
)


@dataclass
class _Gathered:
    """What the blocks of a request are gathered into.

    Attributes:
        names: The names of its documents, each with the last number that was put behind it.
    """

    max_documents: int
    messages: list[tuple[str, Json]] = field(default_factory=list)
    documents: list[Json] = field(default_factory=list)
    titles: list[str | None] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    names: dict[str, int] = field(default_factory=dict)
    has_citations: bool = False


@dataclass(frozen=True)
class MessagesQuestion:
    """A request with the chat that it is.

    Attributes:
        sources: Of each document block, in their order, the document's name or the file's id.
        titles: Their titles.
    """

    body: MessagesRequest
    chat: ChatRequest
    renaming: Renaming
    sources: Sequence[str]
    titles: Sequence[str | None]

    @property
    def stored(self) -> StoredNames | None:
        """The stored documents that it names; None for none."""
        return self.chat.stored

    def field_of(self, param: str | None) -> str | None:
        """Return the caller's name for a field of the `GenerateRequest`."""
        param = self.chat.field_of(param)
        return param and self.renaming.name(param)


def read_messages(fields: Json, config: ApiConfig) -> MessagesQuestion:
    """Validate the fields of a body.

    Raises:
        BadRequest: One is invalid or not supported; it is named.
    """
    refuse_misplaced(fields, MessagesRequest)
    ignored = MESSAGES_FIELDS.list_ignored(fields)
    body = validate_fields(MessagesRequest, fields)
    gathered = _Gathered(config.max_documents)
    if body.system is not None:
        text = "".join(part["text"] for part in _read_texts(body.system, "system"))
        gathered.messages.append(("system", {"role": "system", "content": text}))
    for index, turn in enumerate(body.messages):
        _gather(gathered, turn, f"messages[{index}]")
    in_chats = {*MESSAGES_FIELDS.honoured} - {*MessagesRequest.model_fields}
    chat: Json = {name: value for name, value in fields.items() if name in in_chats}
    chat |= {
        "model": body.model,
        "messages": [message for _, message in gathered.messages],
        "max_tokens": body.max_tokens,
        "stop": body.stop_sequences or None,
        "stream": body.stream,
        "rapid": _attach(fields.get("rapid"), gathered),
        **_read_tools(body),
        **_read_form(body.output_config or {}),
        **_read_thinking(body),
    }
    renaming = Renaming(
        _NAMES_HERE, [place for place, _ in gathered.messages], schema="input_schema"
    )
    asked = renaming.check(chat, config).ignore(ignored)
    return MessagesQuestion(body, asked, renaming, gathered.sources, gathered.titles)


def _attach(rapid: Any, gathered: _Gathered) -> Any:
    """Return the ``rapid`` of a request with the documents of its blocks."""
    if rapid is not None and not isinstance(rapid, dict):
        return rapid  # which is refused
    rapid = {} if rapid is None else dict(rapid)
    if gathered.documents:
        given = rapid.get("documents")
        rapid["documents"] = [*gathered.documents, *(given if isinstance(given, list) else ())]
    if gathered.has_citations:
        rapid.setdefault("citations", True)
    return rapid or None


def _gather(gathered: _Gathered, turn: AnthropicTurn, where: str) -> None:
    """Add the messages and documents of a turn."""
    content = turn.content
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list):
        refuse_field(f"{where}.content", "must be a string or a list of blocks")
    num_before = len(gathered.documents)
    parts: list[Json] = []
    calls: list[Json] = []
    thoughts: list[str] = []
    for index, block in enumerate(content):
        place = f"{where}.content[{index}]"
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "text":
            parts.append({"type": "text", "text": read_text(block, "text", place)})
        elif kind == "document":
            parts += _read_document(gathered, block, place)
        elif kind == "tool_use":
            arguments = json.dumps(block.get("input") or {})
            function = {"name": read_text(block, "name", place), "arguments": arguments}
            call_id = read_text(block, "id", place)
            calls.append({"id": call_id, "type": "function", "function": function})
        elif kind == "tool_result":
            result = {
                "role": "tool",
                "tool_call_id": read_text(block, "tool_use_id", place),
                "content": [
                    *_read_failure(block.get("is_error"), f"{place}.is_error"),
                    *_read_texts(block.get("content", ""), f"{place}.content"),
                ],
            }
            gathered.messages.append((where, result))
        elif kind == "thinking":
            thoughts.append(read_text(block, "thinking", place))
        elif kind != "redacted_thinking":
            known = "a block is text, document, tool_use or tool_result"
            refuse_field(f"{place}.type", f"{kind!r} is not supported: {known}", "unsupported")
    thinking = {"reasoning_content": "".join(thoughts)} if thoughts else {}
    if calls:
        message = {"role": "assistant", "content": parts or None, "tool_calls": calls}
        gathered.messages.append((where, message | thinking))
    elif parts or not content:
        gathered.messages.append((where, {"role": turn.role, "content": parts} | thinking))
    if parts and turn.role == "user":  # else they stand in the first message of the user
        for document in gathered.documents[num_before:]:
            document["message"] = len(gathered.messages) - 1


def _read_document(gathered: _Gathered, block: Mapping[str, Any], place: str) -> list[Json]:
    """Add a document, and return the parts that name it if it is stored."""
    source, title = block.get("source"), block.get("title")
    source = source if isinstance(source, Mapping) else {}
    kind = source.get("type")
    if block.get("context") is not None:
        refuse_field(f"{place}.context", "is not supported: write it into the text", "unsupported")
    if isinstance(block.get("citations"), Mapping) and block["citations"].get("enabled") is True:
        gathered.has_citations = True
    gathered.titles.append(title if isinstance(title, str) else None)
    if kind == "file":
        file_id = read_text(source, "file_id", f"{place}.source")
        gathered.sources.append(file_id)
        return [{"type": "file", "file": {"file_id": file_id}}]
    if kind == "text":
        text = read_text(source, "data", f"{place}.source")
    elif kind == "content":
        found = _read_texts(source.get("content"), f"{place}.source.content")
        text = "".join(each["text"] for each in found)
    else:
        advice = "send a text, or upload it to /v1/files and send its file_id"
        refuse_field(f"{place}.source.type", f"{kind!r} is not supported: {advice}", "unsupported")
    if len(gathered.documents) == gathered.max_documents:
        most = f"this server takes {gathered.max_documents} documents at most"
        refuse_field(place, f"is one document too many, as {most}: send fewer")
    base = title if isinstance(title, str) and title else "document"
    name, names = base, gathered.names
    while name in names:
        names[base] += 1
        name = f"{base} ({names[base]})"
    names[name] = 1
    gathered.sources.append(name)
    gathered.documents.append({"name": name, "text": text})
    return []


def _read_failure(is_error: Any, where: str) -> Iterator[Json]:
    """Yield what tells a model that a call failed, for which chat templates have no field."""
    if not isinstance(is_error, bool | None):
        refuse_field(where, "must be true or false")
    if is_error:
        yield {"type": "text", "text": "The call failed.\n"}


def _read_texts(content: Any, where: str) -> Iterator[Json]:
    """Yield the parts of a text, or of blocks that are texts."""
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list):
        refuse_field(where, "must be a string or a list of blocks")
    for index, block in enumerate(content):
        if not isinstance(block, Mapping) or block.get("type") != "text":
            refuse_field(f"{where}[{index}].type", "must be 'text'", "unsupported")
        yield {"type": "text", "text": read_text(block, "text", f"{where}[{index}]")}


def _read_tools(body: MessagesRequest) -> Json:
    if not body.tools:
        return {}
    tools = []
    for index, tool in enumerate(body.tools):
        if tool.get("type", "custom") not in ("custom", None):
            what = f"{tool['type']!r} is not supported: a tool is one that you run"
            refuse_field(f"tools[{index}].type", what, "unsupported")
        function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
        function |= {name: tool[name] for name in ("description", "strict") if name in tool}
        tools.append({"type": "function", "function": function})
    chat: Json = {"tools": tools}
    choice = body.tool_choice or {"type": "auto"}
    kind = choice.get("type")
    if kind == "tool":
        function = {"name": choice.get("name")}
        chat["tool_choice"] = {"type": "function", "function": function}
    elif isinstance(kind, str) and kind in _CHOICES:
        chat["tool_choice"] = _CHOICES[kind]
    else:
        refuse_field("tool_choice.type", "must be 'auto', 'any', 'tool' or 'none'")
    if choice.get("disable_parallel_tool_use"):
        chat["parallel_tool_calls"] = False
    return chat


def _read_thinking(body: MessagesRequest) -> Json:
    if (given := body.thinking) is None:
        return {}
    if given.budget_tokens is not None and given.budget_tokens >= body.max_tokens:
        refuse_field(
            "thinking.budget_tokens", "must be below max_tokens, as the answer comes after it"
        )
    chat: Json = {
        "chat_template_kwargs": {"enable_thinking": given.type != "disabled"},
        "include_reasoning": given.display != "omitted",
    }
    if given.budget_tokens is not None:
        chat["thinking_token_budget"] = given.budget_tokens
    # An effort is one of thinking here; Anthropic's may stand beside none.
    return chat | ({"reasoning_effort": None} if given.type == "disabled" else {})


def _read_form(given: Json) -> Json:
    chat: Json = {"reasoning_effort": given.get("effort")}
    form = given.get("format")
    if isinstance(form, dict):
        if form.get("type") != "json_schema":
            refuse_field("output_config.format.type", "must be 'json_schema'")
        schema = {"name": "answer", "schema": form.get("schema")}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    return chat

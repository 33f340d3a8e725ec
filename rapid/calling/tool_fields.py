"""The fields of a request about tools, as OpenAI's chat completions have them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    field_validator,
    model_validator,
)

from rapid.calling.call_forms import read_schema
from rapid.chat_messages import (
    Message,
    Tool,
    ToolCall,
    Tools,
)
from rapid.constraints.schemas.schema_checks import TOO_DEEP, UnusableGrammar, is_too_deep
from rapid.constraints.structured_outputs import check_schemas
from rapid.errors import BadRequest
from rapid.requests.chat_fields import Turn
from rapid.requests.request_fields import MAX_NAME, Fields, OpenFields, Text, refuse

MOST_TOOLS = 128  # as in the API of OpenAI
_NAME = re.compile("[a-zA-Z0-9_-]{1,64}")  # as in the API of OpenAI; templates quote it bare
_CHOICES = ("none", "auto", "required")


def _check_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        refuse("name", "must be 1 to 64 letters, digits, underscores and hyphens")
    return name


def _check_json(given: object, what: str) -> None:
    """Refuse what templates could not write as text, and what is nested too deeply."""
    try:
        json.dumps(given, ensure_ascii=False).encode()
        is_deep = is_too_deep(given)
    except RecursionError:
        is_deep = True
    except ValueError:
        refuse("json", what)
    if is_deep:
        refuse("json", TOO_DEEP)


class FunctionFields(OpenFields):
    """The ``function`` of a tool."""

    name: Annotated[str, AfterValidator(_check_name)]
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @field_validator("parameters")
    @classmethod
    def _is_of_an_object(cls, given: dict[str, Any] | None) -> dict[str, Any] | None:
        if given and given.get("type", "object") != "object":
            refuse("parameters", "must be a JSON schema of type 'object'")
        _check_json(given, "must have no lone surrogates")
        return given


class ToolFields(OpenFields):
    """An entry of ``tools``."""

    type: Literal["function"]
    function: FunctionFields

    def as_tool(self) -> Tool:
        """Return the tool as the orchestrator gets it."""
        given = self.function
        parameters = json.dumps(given.parameters or {})
        return Tool(given.name, parameters, given.description or "", bool(given.strict))


class CalledFields(OpenFields):
    """The ``function`` of a call in the history; arguments that were cut are no JSON."""

    name: Annotated[str, AfterValidator(_check_name)]
    arguments: Text

    @field_validator("arguments")
    @classmethod
    def _can_be_rendered(cls, arguments: str) -> str:
        try:
            given = json.loads(arguments or "{}")
        except ValueError:
            return arguments
        except RecursionError:
            refuse("arguments", TOO_DEEP)
        _check_json(given, "must have no lone surrogates")
        return arguments or "{}"


class CallFields(OpenFields):
    """An entry of ``tool_calls`` of a message."""

    id: Text = Field(min_length=1, max_length=MAX_NAME)
    type: Literal["function"] = "function"
    function: CalledFields

    def as_call(self) -> ToolCall:
        """Return the call as the orchestrator gets it."""
        return ToolCall(self.id, self.function.name, self.function.arguments)


class CallingTurn(Turn):
    """A message of a conversation that may call tools."""

    tool_calls: list[CallFields] | None = None
    tool_call_id: Text | None = Field(None, max_length=MAX_NAME)

    @model_validator(mode="after")
    def _has_its_calls(self) -> Self:
        if self.tool_calls and self.role != "assistant":
            refuse("tool_calls", f"has tool_calls with role {self.role!r}, not 'assistant'")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            refuse("tool_call_id", "must have a tool_call_id with role 'tool', and only then")
        return self

    def as_message(self) -> Message:
        """Return the message with its calls."""
        calls = tuple(each.as_call() for each in self.tool_calls or ())
        return replace(super().as_message(), tool_calls=calls, tool_call_id=self.tool_call_id)


AnyCallingTurn = TypeVar("AnyCallingTurn", bound=CallingTurn)


def check_calls(turns: list[AnyCallingTurn]) -> list[AnyCallingTurn]:
    """Return the messages of a conversation whose calls have results, and refuse others."""
    messages = (each.as_message() for each in turns)
    check_turns([(each.role, each.tool_calls, each.tool_call_id) for each in messages])
    return turns


def _as_choice(given: object) -> object:
    """Return the choice as a string: one of OpenAI's, or ``=`` and the name of a function."""
    if given is None or (isinstance(given, str) and given in _CHOICES):
        return given
    function = given.get("function") if isinstance(given, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not (isinstance(given, dict) and given.get("type") == "function" and isinstance(name, str)):
        what = "{'type': 'function', 'function': {'name': ...}}"
        refuse("tool_choice", f"must be 'none', 'auto', 'required' or {what}")
    return f"={name}"


ToolChoice = Annotated[
    str | None,
    BeforeValidator(
        _as_choice, json_schema_input_type=Literal["none", "auto", "required"] | dict[str, Any]
    ),
]


class ToolSettings(Fields):
    """What a request says about tools."""

    tools: Annotated[list[ToolFields], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None

    def read_tools(self, sampling: Mapping[str, Any]) -> Tools | None:
        """Return the tools of a request with some sampling fields; None if none may be called.

        Raises:
            BadRequest: As for `as_tools`, or the fields contradict calls that are enforced.
        """
        is_parallel = self.parallel_tool_calls is not False
        tools = as_tools(self.tools, self.tool_choice, is_parallel=is_parallel)
        if tools is None:
            return None
        is_strict = any(each.is_strict for each in tools.callable_ones)
        what = "tool_choice" if tools.must_call else "'strict' of a tool" if is_strict else ""
        for name in ("min_tokens", "allowed_token_ids", "bad_words", "ignore_eos"):
            if what and sampling.get(name):
                # Where the call must end and this must go on, no token would be left.
                raise BadRequest(f"{name} contradicts {what}: leave one out", name)
        return tools


def as_tools(
    given: Sequence[ToolFields] | None, choice: str | None, *, is_parallel: bool
) -> Tools | None:
    """Return the tools of a request; None for none that may be called.

    Raises:
        BadRequest: Two have one name, the choice is none of them, or arguments cannot be enforced.
    """
    tools = [each.as_tool() for each in given or ()]
    for index, tool in enumerate(tools):
        if tool.name in {each.name for each in tools[:index]}:
            param = f"tools[{index}].function.name"
            raise BadRequest(f"{param} is that of another tool: rename one", param, "invalid_value")
    if choice in (None, "none", "auto"):
        must_call, only = False, None
    else:
        must_call, only = True, choice[1:] if choice[0] == "=" else None
        if not tools:
            raise _choose_otherwise("needs tools, and there are none")
    if only is not None and only not in {each.name for each in tools}:
        raise _choose_otherwise(f"names {only!r}, which is none of the tools")
    if not tools or choice == "none":
        return None
    _check_schemas(tools, must_call=must_call)
    # Who names a function wants one call of it (vLLM does the same).
    return Tools(tuple(tools), must_call, only, is_parallel and only is None)


def _choose_otherwise(why: str) -> BadRequest:
    return BadRequest(f"tool_choice {why}", "tool_choice", "invalid_value")


def _check_schemas(tools: Sequence[Tool], *, must_call: bool) -> None:
    enforced = [index for index, tool in enumerate(tools) if must_call or tool.is_strict]
    index: int | None = None
    try:
        schemas = []
        for index in enforced:
            schemas.append(read_schema(tools[index]))
        index = None
        check_schemas(schemas)
    except UnusableGrammar as error:
        if error.index is not None:
            index = enforced[error.index]
        param = "tools" if index is None else f"tools[{index}].function.parameters"
        raise BadRequest(f"{param} {error}", param, "invalid_value") from None


def check_turns(turns: Sequence[tuple[str, Sequence[ToolCall], str | None]]) -> None:
    """Check that results follow their calls, and calls have results, as chat templates expect.

    Args:
        turns: For each message its role, its calls, and the id of the call whose result it is.

    Raises:
        BadRequest: A result has no call before it, or a call has no result.
    """
    waiting: dict[str, str] = {}  # the field of each call that has no result yet, by id
    for index, (role, calls, call_id) in enumerate(turns):
        if role == "tool":
            if waiting.pop(call_id or "", None) is None:
                param = f"messages[{index}].tool_call_id"
                message = f"{param} is the id of no call in the assistant's message before it"
                raise BadRequest(message, param, "invalid_value")
            continue
        _refuse_waiting(waiting)
        for number, call in enumerate(calls):
            param = f"messages[{index}].tool_calls[{number}]"
            if call.id in waiting:
                raise BadRequest(f"{param}.id is that of another call", f"{param}.id")
            waiting[call.id] = param
    _refuse_waiting(waiting)


def _refuse_waiting(waiting: dict[str, str]) -> None:
    for param in waiting.values():
        raise BadRequest(
            f"{param} has no result: a message with role 'tool' must follow for each call",
            param,
            "invalid_value",
        )

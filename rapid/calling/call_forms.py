"""The forms in which models write calls, found by what their chat templates write.

Sources: the chat templates of Qwen 2.5 and Hermes 2 Pro, of Llama 3.1, of Mistral 7B v0.3 and
Mistral Small 3.2, of Qwen3-Coder, of GLM 4.5 and 4.6, and of gpt-oss.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from rapid.calling.tagged_arguments import (
    ArgumentTags,
    spell_text,
    write_any_rules,
    write_rules,
)
from rapid.chat_messages import Tool, ToolCall, Tools
from rapid.constraints.schemas.schema_checks import (
    MAX_GRAMMAR,
    TOO_LONG,
    UnusableGrammar,
    prepare_schema,
)
from rapid.constraints.structured_outputs import check_grammar, check_schemas
from rapid.errors import BadRequest

# What models are trained on, as `json.dumps` and templates write it.
_SPACED: Any = {
    "x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
}
_NO_PARAMETERS: Any = {"type": "object", "properties": {}, "additionalProperties": False}
_MOST_COMPILED = 64  # grammars that are kept, for requests that have the same tools again
_ANY_TEXT = r"/(.|\n)*/"
_NO_OBJECT = r'& ~/[ \n]*\{[ \n]*"name"(.|\n)*/'  # for a form whose calls begin like JSON


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a model writes its calls: ``opening first CALL (between CALL)* end``.

    A call is ``head ARGUMENTS tail``, where the arguments are a JSON object, or stand between tags.

    Attributes:
        opening: What begins calls behind any text; empty where an answer is a call or a text.
        head: The part with the tool's name, ``%s``.
        marks: The parts that may be special tokens, which are not shown otherwise.
        is_single: Whether an answer has one call at most.
        has_short_ids: Whether templates take ids of nine letters and digits only.
        tags: Those around each argument; None where arguments are JSON.
        is_in_channels: Whether an answer is messages in channels, of which a call is one.
    """

    opening: str
    head: str
    tail: str
    first: str = ""
    between: str = ""
    end: str = ""
    marks: tuple[str, ...] = ()
    is_single: bool = False
    has_short_ids: bool = False
    tags: ArgumentTags | None = None
    is_in_channels: bool = False

    def write(self, calls: Sequence[ToolCall]) -> str:
        """Return the text that makes some calls."""

        def spell(arguments: str) -> str:
            return arguments if self.tags is None else self.tags.write(arguments)

        written = (self.head % each.name + spell(each.arguments) + self.tail for each in calls)
        return self.opening + self.first + self.between.join(written) + self.end


PYTHON_TAG = "<|python_tag|>"  # which Llama may write before a call
HERMES = CallForm(
    "<tool_call>",
    '\n{"name": "%s", "arguments": ',
    "}\n</tool_call>",
    between="\n<tool_call>",
    marks=("<tool_call>", "</tool_call>"),
)
LLAMA = CallForm("", '{"name": "%s", "parameters": ', "}", marks=(PYTHON_TAG,), is_single=True)
MISTRAL = CallForm(
    "[TOOL_CALLS]",
    '{"name": "%s", "arguments": ',
    "}",
    first=" [",
    between=", ",
    end="]",
    marks=("[TOOL_CALLS]",),
    has_short_ids=True,
)
NEW_MISTRAL = CallForm(
    "[TOOL_CALLS]",
    "%s[ARGS]",
    "",
    between="[TOOL_CALLS]",
    marks=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    has_short_ids=True,
)
QWEN_CODER = CallForm(
    "<tool_call>",
    "\n<function=%s>\n",
    "</function>\n</tool_call>",
    between="\n<tool_call>",
    marks=("<tool_call>", "</tool_call>"),
    tags=ArgumentTags("<parameter=%s>\n", "\n</parameter>\n"),
)
GLM = CallForm(
    "<tool_call>",
    "%s\n",
    "</tool_call>",
    between="\n<tool_call>",
    marks=tuple(
        f"<{end}{tag}>" for tag in ("tool_call", "arg_key", "arg_value") for end in ("", "/")
    ),
    tags=ArgumentTags("<arg_key>%s</arg_key>\n<arg_value>", "</arg_value>\n"),
)
GPT_OSS = CallForm(
    "<|channel|>commentary",
    " to=functions.%s <|constrain|>json<|message|>",
    "",
    marks=tuple(f"<|{each}|>" for each in ("start", "channel", "constrain", "message", "end")),
    is_single=True,  # the token behind a call ends the answer
    is_in_channels=True,
)


@dataclass(frozen=True, slots=True)
class CallTokens:
    """The tokens of a vocabulary that grammars know by id only: those that were added to it.

    Attributes:
        marks: Those that are a mark of the form of calls, as pairs of text and id.
        others: Ids of the others, without those that end an answer.
    """

    marks: tuple[tuple[str, int], ...] = ()
    others: tuple[int, ...] = ()


def find_form(template: str) -> CallForm | None:
    """Return the form of calls that a chat template writes; None if it is none of ours."""
    if not re.search(r"\btools\b", template):
        return None
    if GPT_OSS.opening in template and "functions." in template:
        return GPT_OSS
    if MISTRAL.opening in template:
        return NEW_MISTRAL if "[ARGS]" in template else MISTRAL
    # A tokenizer's `response_template`, which transformers reads answers by, is not asked: it does
    # not say how a call is to be written, so that none could be made to follow its tool's schema.
    if "<function=" in template and "<parameter=" in template and HERMES.opening in template:
        return QWEN_CODER
    if "<arg_key>" in template and "<arg_value>" in template and HERMES.opening in template:
        return GLM
    if HERMES.opening in template:  # in which other models write no JSON, or other keys
        is_other = re.search("<function=|<arg_key>|<parameter=", template)
        return None if is_other or '"arguments"' not in template else HERMES
    return LLAMA if re.search(r'\{"name": .*"parameters": ', template, re.DOTALL) else None


def read_schema(tool: Tool) -> Any:
    """Return the schema by which a tool's arguments are enforced.

    Raises:
        UnusableGrammar: As for `prepare_schema`.
    """
    given = json.loads(tool.parameters)
    return {"type": "object"} | (prepare_schema(given) if given else _NO_PARAMETERS) | _SPACED


def _read_schemas(tools: Sequence[Tool]) -> list[Any]:
    """Return the schemas of tools, or refuse them as soon as they are too long together."""
    schemas, num_left = list[Any](), MAX_GRAMMAR
    for tool in tools:
        schemas.append(read_schema(tool))
        num_left -= len(json.dumps(schemas[-1]))
        if num_left < 0:
            raise UnusableGrammar(TOO_LONG)
    return schemas


@lru_cache(_MOST_COMPILED)
def compile_calls(
    tools: Tools, form: CallForm, tokens: CallTokens, given: str | None = None
) -> str:
    """Return the grammar of answers that call tools.

    Where no call must be made, an answer is text, or ends with calls. Arguments follow the schema
    of their tool; where the model chooses, and no tool is strict, ones that cannot be enforced are
    any object.

    Args:
        form: How the model writes calls.
        tokens: What its vocabulary has for that.
        given: Grammar of answers that are text; None for any text.

    Raises:
        BadRequest: The grammar is too long, or `given` cannot be told from calls.
    """
    parts = _name_form(form, given) if given is not None and not tools.must_call else []
    is_enforced = tools.must_call or any(each.is_strict for each in tools.tools)
    try:
        try:
            return _write(tools, form, tokens, parts, is_any=False)
        except UnusableGrammar:
            if is_enforced:
                raise
            return _write(tools, form, tokens, parts, is_any=True)
    except UnusableGrammar as error:
        raise BadRequest(f"tools {error}", "tools", "invalid_value") from None


def _name_form(form: CallForm, given: str) -> list[dict[str, Any]]:
    """Return a grammar that other rules may name ``@form``."""
    part = json.loads(given)["grammars"][0] if given.startswith("{") else {}
    if not form.opening or part.get("json_schema") is None:
        raise BadRequest(
            "Only a JSON schema can be asked for beside tools, and of a model whose calls begin "
            "with a mark: leave out tools or response_format, or set tool_choice.",
            "response_format",
            "unsupported",
        )
    return [part | {"name": "form"}]


def _write(
    tools: Tools,
    form: CallForm,
    tokens: CallTokens,
    parts: Sequence[Mapping[str, Any]],
    *,
    is_any: bool,
) -> str:
    """Return the grammar of calls, and of text or the one of `parts` where none must be made."""
    schemas = None if is_any else _read_schemas(tools.callable_ones)
    if schemas is not None and form.tags is not None:
        check_schemas(schemas)  # so that the rules are written of what is sure

    def join(tokens: CallTokens) -> str:
        rules = _write_rules(tools, form, tokens, "@form" if parts else None, schemas)
        return json.dumps({"grammars": [{"lark_grammar": rules}, *parts]})

    # Tokens cannot be checked without their vocabulary; their texts have the same places.
    check_grammar(join(CallTokens()))
    return join(tokens)


def _write_rules(
    tools: Tools, form: CallForm, tokens: CallTokens, text: str | None, schemas: list[Any] | None
) -> str:
    """Return the rules of answers; arguments are any object where there are no `schemas`."""
    special = dict(tokens.marks)
    opening, first, between, end = (
        spell_text(each, special) for each in (form.opening, form.first, form.between, form.end)
    )
    more = f"({between} call)*" if tools.is_parallel and not form.is_single else ""
    calls = f"{first} call {more} {end}"
    # Added tokens are no text, but may stand in it, as the marks of thinking.
    other = f"<[{_list_ranges(tokens.others)}]>"
    behind, before = (f"({other} TEXT)*", f"(TEXT {other})*") if tokens.others else ("", "")
    if form.is_in_channels:
        said = None if tools.must_call else text or "TEXT"
        rules = [_write_channels(special, said, f"{opening} {calls}")]
    elif tools.must_call:
        rules = [f"start: {opening} {calls}"]
    elif text is not None:
        rules = [f"start: {text} | {opening} {calls}"]
    elif not form.opening:
        tag = f"<[{special[PYTHON_TAG]}]>? " if PYTHON_TAG in special else ""
        rules = [f"start: NO_CALL {behind} | {tag}{calls}"]
        rules += [f"NO_CALL: {_ANY_TEXT} {_NO_OBJECT}"]
    elif form.opening in special:
        rules = [f"start: text | text {opening} {calls}", f"text: TEXT {behind}"]
    else:
        rules = [f"start: TEXT {behind} | {before} lead {calls}"]
        rules += [f"lead[lazy]: TEXT {opening}"]
    rules.append(f"TEXT: {_ANY_TEXT}")
    heads = [spell_text(form.head % each.name, special) for each in tools.callable_ones]
    tail = spell_text(form.tail, special)
    if schemas is None:  # which has to be short
        rules.append(f"call: ({' | '.join(heads)}) arguments {tail}")
        if form.tags is not None:
            return "\n".join([*rules, *write_any_rules(form.tags, special)])
        rules.append(f"arguments: %json {json.dumps({'type': 'object', **_SPACED})}")
        return "\n".join(rules)
    rules.append(f"call: {' | '.join(f'call_{each}' for each in range(len(heads)))}")
    for index, (head, schema) in enumerate(zip(heads, schemas, strict=True)):
        rules.append(f"call_{index}: {head} arguments_{index} {tail}")
        if form.tags is not None:
            rules += write_rules(index, schema, form.tags, special)
        else:
            rules.append(f"arguments_{index}: %json {json.dumps(schema)}")
    return "\n".join(rules)


def _write_channels(special: Mapping[str, int], text: str | None, calls: str) -> str:
    """Return the rule of an answer that may think, then speak, and ends with a call or a text."""

    def begin(channel: str) -> str:
        return spell_text(f"<|channel|>{channel}<|message|>", special)

    more = spell_text("<|end|><|start|>assistant", special)
    last = calls if text is None else f"({calls} | {begin('final')} {text})"
    thoughts, words = (f"({begin(each)} TEXT {more})?" for each in ("analysis", "commentary"))
    return f"start: {thoughts} {words} {last}"


def _list_ranges(ids: Sequence[int]) -> str:
    ranges = list[list[int]]()
    for each in sorted(ids):
        if ranges and each == ranges[-1][1] + 1:
            ranges[-1][1] = each
        else:
            ranges.append([each, each])
    return ",".join(f"{first}-{last}" for first, last in ranges)

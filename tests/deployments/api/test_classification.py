"""Every field of other servers that changes the answer is honoured or refused by its name."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from anthropic import types as anthropics
from anthropic.types.beta import BetaOutputConfigParam, BetaToolParam
from anthropic.types.message_count_tokens_params import MessageCountTokensParams
from anthropic.types.message_create_params import MessageCreateParamsBase
from openai.types import chat as of_chats
from openai.types import responses as of_responses
from openai.types import shared_params
from openai.types.chat import chat_completion_content_part_param as of_parts
from openai.types.chat import chat_completion_message_function_tool_call_param as of_calls
from openai.types.chat.completion_create_params import CompletionCreateParamsBase
from openai.types.completion_create_params import CompletionCreateParamsBase as OlderParams
from openai.types.embedding_create_params import EmbeddingCreateParams
from openai.types.responses.file_search_tool_param import RankingOptions
from openai.types.responses.input_token_count_params import InputTokenCountParams
from openai.types.responses.response_create_params import ResponseCreateParamsBase

from deployments.api.dialects.chat.chat_request import ChatRequest, RapidOptions
from deployments.api.dialects.chat.parsing import CHAT_FIELDS, parse_chat_request, parse_question
from deployments.api.dialects.completions.completion_dialect import COMPLETION_FIELDS
from deployments.api.dialects.messages.messages_request import MESSAGES_FIELDS, read_messages
from deployments.api.dialects.responses.body.responses_request import RESPONSES_FIELDS, read_body
from deployments.api.http.field_table import FieldTable
from deployments.api.models.model_bodies import (
    Detokenization,
    EmbeddingQuestion,
    RerankQuestion,
    Tokenization,
)
from deployments.config.api_config import ApiConfig
from rapid.constraints.structured_outputs import compile_schema
from rapid.errors import BadRequest
from tests.deployments.api.peer_fields import CHAT_PEERS, MODEL_PEERS

REFUSED: dict[str, Any] = {
    "add_generation_prompt": False,
    "add_special_tokens": True,
    "audio": {"voice": "alloy", "format": "wav"},
    "detokenize": False,
    "ebnf": "root ::= 'a'",
    "function_call": {"name": "f"},
    "functions": [{"name": "f"}],
    "grammar": "root ::= 'a'",
    "guided_decoding_backend": "xgrammar",
    "guided_whitespace_pattern": " ",
    "json_schema": {"type": "object"},
    "logits_processors": ["a.b"],
    "logprob_token_ids": [1],
    "mirostat": 2,
    "modalities": ["text", "audio"],
    "moderation": {"model": "omni"},
    "n_predict": 5,
    "prediction": {"type": "content", "content": "a"},
    "regex": "a",
    "repeat_penalty": 1.1,
    "repetition_detection": {"max_pattern_size": 3},
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    "service_tier": "flex",
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "stop_regex": ["a"],
    "store": True,
    "truncation_side": "left",
    "verbosity": "low",
    "vllm_xargs": {"a": 1},
    "watermarking": True,
    "web_search_options": {},
}
VLLM_DUMPED = {  # vLLM's `StructuredOutputsParams`, whose other fields are null
    **dict.fromkeys(("json", "regex", "choice", "grammar", "json_object", "structural_tag")),
    "disable_fallback": False,
    "disable_any_whitespace": False,
    "disable_additional_properties": False,
    "whitespace_pattern": None,
}
NEUTRAL: dict[str, Any] = {
    "add_generation_prompt": True,
    "add_special_tokens": False,
    "guided_choice": None,
    "guided_json": None,
    "allowed_token_ids": [],
    "bad_words": [],
    "stop_token_ids": [],
    "regex": None,
    "return_token_ids": False,
    "service_tier": "auto",
    "skip_special_tokens": True,
    "store": False,
    "top_k": 0,
    "vllm_xargs": {},
}


def parse(fields: dict[str, Any]) -> ChatRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]} | fields
    return parse_chat_request(json.dumps(body).encode())


@pytest.mark.parametrize(("name", "value"), REFUSED.items())
def test_what_would_change_the_answer_is_refused_by_its_name(name: str, value: Any) -> None:
    with pytest.raises(BadRequest, match=f"{name} is not supported yet") as refused:
        parse({name: value})
    assert (refused.value.param, refused.value.code) == (name, "unsupported")


def test_values_that_ask_for_nothing_pass() -> None:
    assert parse(NEUTRAL) == parse({})


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"json": {"type": "object"}}},
        {"structured_outputs": VLLM_DUMPED | {"json": {"type": "object"}}},
        {"structured_outputs": {"json": '{"type": "object"}', "disable_any_whitespace": True}},
        {"guided_json": {"type": "object"}},
        {"guided_json": '{"type": "object"}'},
    ],
)
def test_every_name_of_a_form_arrives_as_one_grammar(fields: dict[str, Any]) -> None:
    grammar = parse(fields).as_generate_request("1", "a").grammar
    assert grammar == compile_schema({"type": "object"})
    assert parse({"response_format": {"type": "text"}}).grammar is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_grammar": "root ::= 'a'"}, "guided_grammar"),
        ({"guided_json": {"not": {}}}, "guided_json"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "[" * 100_000}, "guided_json"),
        ({"guided_json": f'"{"a" * 2**20}"'}, "guided_json"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"ebnf": "a"}}, "structured_outputs.ebnf"),
        ({"structured_outputs": VLLM_DUMPED}, "structured_outputs"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
            "response_format.json_schema.schema",
        ),
    ],
)
def test_a_form_that_cannot_be_kept_is_refused_by_its_name(
    fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(BadRequest) as refused:
        parse(fields)
    assert refused.value.param == param


KNOWN = {"OpenAI": frozenset(CompletionCreateParamsBase.__annotations__)} | CHAT_PEERS


@pytest.mark.parametrize("server", KNOWN)
def test_every_field_of_other_servers_is_classified(server: str) -> None:
    """A new one must be honoured, refused or named among those that change no answer."""
    elsewhere = RapidOptions.model_fields  # refused, with the object they belong into
    unknown = {name for name in KNOWN[server] if CHAT_FIELDS.find_class(name) is None}
    assert unknown <= elsewhere.keys()


@pytest.mark.parametrize(
    ("table", "fields"),
    [
        (RESPONSES_FIELDS, ResponseCreateParamsBase),
        (RESPONSES_FIELDS, InputTokenCountParams),
        (MESSAGES_FIELDS, MessageCreateParamsBase),
        (MESSAGES_FIELDS, MessageCountTokensParams),
        (COMPLETION_FIELDS, OlderParams),
        (EmbeddingQuestion.table(), EmbeddingCreateParams),
    ],
)
def test_every_field_of_the_sdks_is_classified_in_other_dialects(
    table: FieldTable, fields: Any
) -> None:
    names = {*fields.__annotations__} - {"personality"}  # a beta of OpenAI's own prompts
    assert {name for name in names if table.find_class(name) is None} == set()
    assert not {*table.honoured} & {*table.refused, *table.ignored, *table.renamed}
    assert not {*table.refused} & {*table.ignored, *table.renamed}


@pytest.mark.parametrize(
    ("table", "path", "fields"),
    [
        (CHAT_FIELDS, "messages", of_chats.ChatCompletionDeveloperMessageParam),
        (CHAT_FIELDS, "messages", of_chats.ChatCompletionSystemMessageParam),
        (CHAT_FIELDS, "messages", of_chats.ChatCompletionUserMessageParam),
        (CHAT_FIELDS, "messages", of_chats.ChatCompletionAssistantMessageParam),
        (CHAT_FIELDS, "messages", of_chats.ChatCompletionToolMessageParam),
        (CHAT_FIELDS, "messages.content", of_chats.ChatCompletionContentPartTextParam),
        (CHAT_FIELDS, "messages.content", of_chats.ChatCompletionContentPartRefusalParam),
        (CHAT_FIELDS, "messages.content", of_parts.File),
        (CHAT_FIELDS, "messages.content.file", of_parts.FileFile),
        (CHAT_FIELDS, "messages.tool_calls", of_chats.ChatCompletionMessageFunctionToolCallParam),
        (CHAT_FIELDS, "messages.tool_calls.function", of_calls.Function),
        (CHAT_FIELDS, "stream_options", of_chats.ChatCompletionStreamOptionsParam),
        (COMPLETION_FIELDS, "stream_options", of_chats.ChatCompletionStreamOptionsParam),
        (CHAT_FIELDS, "tools", of_chats.ChatCompletionFunctionToolParam),
        (CHAT_FIELDS, "tools.function", shared_params.FunctionDefinition),
        (RESPONSES_FIELDS, "tools", of_responses.FileSearchToolParam),
        (RESPONSES_FIELDS, "tools", of_responses.FunctionToolParam),
        (RESPONSES_FIELDS, "tools.ranking_options", RankingOptions),
        (RESPONSES_FIELDS, "reasoning", shared_params.Reasoning),
        (RESPONSES_FIELDS, "text", of_responses.ResponseTextConfigParam),
        (MESSAGES_FIELDS, "messages.content", anthropics.TextBlockParam),
        (MESSAGES_FIELDS, "messages.content", anthropics.DocumentBlockParam),
        (MESSAGES_FIELDS, "messages.content", anthropics.ToolUseBlockParam),
        (MESSAGES_FIELDS, "messages.content", anthropics.ToolResultBlockParam),
        (MESSAGES_FIELDS, "messages.content", anthropics.ThinkingBlockParam),
        (MESSAGES_FIELDS, "messages.content", anthropics.RedactedThinkingBlockParam),
        (MESSAGES_FIELDS, "output_config", BetaOutputConfigParam),
        (MESSAGES_FIELDS, "system", anthropics.TextBlockParam),
        (MESSAGES_FIELDS, "thinking", anthropics.ThinkingConfigAdaptiveParam),
        (MESSAGES_FIELDS, "thinking", anthropics.ThinkingConfigEnabledParam),
        (MESSAGES_FIELDS, "tool_choice", anthropics.ToolChoiceAnyParam),
        (MESSAGES_FIELDS, "tool_choice", anthropics.ToolChoiceToolParam),
        (MESSAGES_FIELDS, "tools", BetaToolParam),
    ],
)
def test_every_field_within_a_field_is_classified(
    table: FieldTable, path: str, fields: Any
) -> None:
    for name in path.split("."):
        table = table.nested[name]
    assert {name for name in fields.__annotations__ if table.find_class(name) is None} == set()
    assert not {*table.honoured} & {*table.refused, *table.ignored}
    assert not {*table.refused} & {*table.ignored}


@pytest.mark.parametrize(
    ("path", "table"),
    [
        ("/tokenize", Tokenization.table()),
        ("/detokenize", Detokenization.table()),
        ("/v1/embeddings", EmbeddingQuestion.table()),
        ("/v1/rerank", RerankQuestion.table()),
    ],
)
def test_every_field_of_other_servers_is_classified_where_nothing_is_generated(
    path: str, table: FieldTable
) -> None:
    assert {name for name in MODEL_PEERS[path] if table.find_class(name) is None} == set()
    assert not {*table.honoured} & {*table.refused, *table.ignored}
    assert not {*table.refused} & {*table.ignored}


def test_what_is_ignored_within_parts_and_calls_of_messages_is_named() -> None:
    part = {"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}, "x": 1}
    function = {"name": "f", "arguments": "{}", "parsed_arguments": {}}
    call = {"id": "1", "index": 0, "type": "function", "function": function}
    called = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "1", "content": [part]}
    asked = parse({"messages": [{"role": "user", "content": [part]}, called, result]})
    assert asked.as_generate_request("r", "t").ignored == (
        "messages[].content[].cache_control", "messages[].content[].x",
        "messages[].tool_calls[].index", "messages[].tool_calls[].function.parsed_arguments",
    )  # fmt: skip


def test_what_is_ignored_within_a_field_is_named_once_and_what_is_refused_by_its_place() -> None:
    messages = [{"role": "user", "content": "Hi", "name": "Ann", "x": 1}] * 2
    tools = [{"type": "function", "function": {"name": "f", "cache": True}}]
    asked = parse({"messages": messages, "tools": tools})
    assert asked.as_generate_request("r", "t").ignored == (
        "messages[].name", "messages[].x", "tools[].function.cache",
    )  # fmt: skip
    said = [*messages, {"role": "assistant", "content": "{", "prefix": True}]
    with pytest.raises(BadRequest, match="is not supported yet: leave it out") as refused:
        parse({"messages": said})
    assert refused.value.param == "messages[2].prefix"
    said[-1] |= {"prefix": False, "audio": None}
    assert parse({"messages": said}) == parse({"messages": said})


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
        ({"reasoning": {"context": "all_turns"}}, "reasoning.context"),
        ({"tools": [{"type": "function", "name": "f", "async": True}]}, "tools[0].async"),
        (
            {"tools": [{"type": "file_search", "ranking_options": {"hybrid_search": {}}}]},
            "tools[0].ranking_options.hybrid_search",
        ),
    ],
)
def test_what_a_response_cannot_have_is_refused_by_its_place(fields: Any, param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        read_body({"model": "m", "input": "Hi"} | fields)
    assert (refused.value.param, refused.value.code) == (param, "unsupported")


def test_a_response_names_what_it_ignores_within_fields() -> None:
    given = {"reasoning": {"summary": "auto"}, "text": {"verbosity": "medium", "tone": "warm"}}
    given |= {"tools": [{"type": "function", "name": "f", "defer_loading": True}]}
    _, ignored = read_body({"model": "m", "input": "Hi"} | given)
    assert ignored == ("reasoning.summary", "text.tone", "tools[].defer_loading")


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("max_tokens", 5, "max_tokens is called max_output_tokens here."),
        ("logprobs", True, "logprobs is not supported yet: leave it out."),
        ("mode", "plain", "mode belongs into the object 'rapid'"),
    ],
)
def test_a_field_that_would_do_nothing_is_refused_by_its_name(
    name: str, value: Any, told: str
) -> None:
    with pytest.raises(BadRequest, match=re.escape(told)) as refused:
        read_body({"model": "m", "input": "Hi", name: value})
    assert refused.value.param == name


@pytest.mark.parametrize("name", ["documents", "mode"])
def test_a_null_belongs_nowhere(name: str) -> None:
    """A whole dump of another server's request has one for each field that it leaves out."""
    usual: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
    assert parse({name: None}) == parse({})
    read_messages(usual | {"max_tokens": 5, name: None}, ApiConfig(model="m"))
    assert read_body({"model": "m", "input": "Hi", name: None})[1] == ()


def test_only_an_edit_that_keeps_all_asks_for_nothing() -> None:
    """Claude Code sends one that does."""

    def read(keep: Any) -> ChatRequest:
        edit = {"type": "clear_thinking_20251015", "keep": keep}
        given = {"max_tokens": 5, "context_management": {"edits": [edit]}}
        said = [{"role": "user", "content": "Hi"}]
        return read_messages({"model": "m", "messages": said} | given, ApiConfig(model="m")).chat

    for keep in ("all", {"type": "all"}):
        assert read(keep).as_generate_request("r", "t").ignored == ()
    with pytest.raises(BadRequest, match="not supported yet") as refused:
        read({"type": "thinking_turns", "value": 1})
    assert refused.value.param == "context_management"


def test_no_field_has_two_classes_and_none_is_listed_for_nobody() -> None:
    table = CHAT_FIELDS
    assert not {*table.refused, *table.ignored} & {*table.honoured}
    assert not {*table.refused} & {*table.ignored}
    named = set().union(*KNOWN.values())
    assert {*table.ignored} <= named
    assert {*table.refused} - {"modalities"} <= named | {*REFUSED}


@pytest.mark.parametrize("name", sorted(CHAT_FIELDS.refused))
def test_each_refused_field_has_its_neutral_values(name: str) -> None:
    for usual in CHAT_FIELDS.refused[name]:
        assert parse({name: usual}) == parse({})
    for value in ({"not": "neutral"}, -7, "x y"):
        with pytest.raises(BadRequest, match=f"^{name} is not supported yet"):
            parse({name: value})


def test_what_is_ignored_is_named_for_the_receipt() -> None:
    given = {"user": "u", "metadata": {"a": "b"}, "never_heard_of": 1, "store": False, "rid": None}
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "stream": True} | given
    body["stream_options"] = {"include_usage": True, "include_obfuscation": False}
    config = ApiConfig(model="m")
    _, sent = parse_question(json.dumps(body).encode(), config, "r", "t")
    assert sent.ignored == (
        "user", "metadata", "never_heard_of", "stream_options.include_obfuscation",
    )  # fmt: skip


def test_many_and_long_names_are_not_echoed_whole() -> None:
    table = FieldTable((), {})
    assert table.list_ignored({"x" * 100: 1}) == ("x" * 64,)
    assert len(table.list_ignored({str(each): 1 for each in range(1000)})) == 64


def test_other_dialects_name_what_they_ignore_as_well() -> None:
    said = [{"role": "user", "content": "Hi"}]
    own = {"metadata": {"user_id": "u"}, "never_heard_of": 1}
    fields = {"model": "m", "max_tokens": 5, "messages": said} | own
    asked = read_messages(fields, ApiConfig(model="m")).chat
    assert {*asked.as_generate_request("r", "t").ignored} == own.keys()

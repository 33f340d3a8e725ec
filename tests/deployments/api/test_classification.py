"""Every field of other servers that changes the answer is honoured or refused by its name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsBase

from deployments.api.chat.chat_request import ChatRequest
from deployments.api.chat.parsing import parse_chat_request
from rapid.errors import BadRequest

IGNORED = {  # for accounts, caches and routes of OpenAI, which change no answer
    "metadata",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "safety_identifier",
    "user",
}
REFUSED: dict[str, Any] = {
    "add_generation_prompt": False,
    "add_special_tokens": True,
    "allowed_token_ids": [1],
    "audio": {"voice": "alloy", "format": "wav"},
    "bad_words": ["a"],
    "detokenize": False,
    "ebnf": "root ::= 'a'",
    "frequency_penalty": 1,
    "function_call": {"name": "f"},
    "functions": [{"name": "f"}],
    "grammar": "root ::= 'a'",
    "guided_choice": ["yes", "no"],
    "guided_decoding_backend": "xgrammar",
    "guided_grammar": "root ::= 'a'",
    "guided_json": {},
    "guided_regex": "a",
    "guided_whitespace_pattern": " ",
    "include_reasoning": False,
    "json_schema": {"type": "object"},
    "logits_processors": ["a.b"],
    "logprob_token_ids": [1],
    "min_p": 0.1,
    "mirostat": 2,
    "modalities": ["text", "audio"],
    "moderation": {"model": "omni"},
    "n_predict": 5,
    "prediction": {"type": "content", "content": "a"},
    "presence_penalty": 1,
    "reasoning_effort": "low",
    "regex": "a",
    "repeat_penalty": 1.1,
    "repetition_detection": {"max_pattern_size": 3},
    "response_format": {"type": "json_object"},
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    "service_tier": "flex",
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "stop_regex": ["a"],
    "store": True,
    "thinking_token_budget": 5,
    "tool_choice": "required",
    "tools": [{"type": "function"}],
    "truncation_side": "left",
    "verbosity": "low",
    "vllm_xargs": {"a": 1},
    "watermarking": True,
    "web_search_options": {},
}
NEUTRAL: dict[str, Any] = {
    "add_generation_prompt": True,
    "add_special_tokens": False,
    "guided_choice": None,
    "include_reasoning": True,
    "parallel_tool_calls": True,
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


def test_every_field_of_openais_sdk_is_classified() -> None:
    """A new one must be honoured, refused or named here among those that change no answer."""
    known = {*ChatRequest.model_fields, *REFUSED, *NEUTRAL, *IGNORED}
    assert CompletionCreateParamsBase.__annotations__.keys() - known == set()
    assert CompletionCreateParamsBase.__annotations__.keys() >= IGNORED
    assert not IGNORED & ChatRequest.model_fields.keys()

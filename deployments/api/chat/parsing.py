"""The reading of request bodies: JSON, fields and sizes; errors name the field.

Unknown OpenAI fields are ignored, as clients send many. Known fields that the server cannot honour
are refused, since an answer that silently ignores an option is worse than an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from deployments.api.chat.chat_request import ChatRequest, RapidOptions
from deployments.api.http.json_bodies import parse_object
from deployments.config.api_config import ApiConfig
from rapid.errors import BadRequest
from rapid.messages import GenerateRequest
from rapid.requests import bad_request

_USUAL = ApiConfig()
_MAX_KEYS = 64  # of objects that refuse unknown keys: each would be an error of its own
_KEY_OF_A_MESSAGE = b'"role"'

# Fields of OpenAI, vLLM, SGLang and llama.cpp that change the answer and are not supported, each
# with its values that have no effect.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "allowed_token_ids": ([],),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "custom_logit_processor": (),
    "custom_params": ({},),
    "detokenize": (True,),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "ebnf": (),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "grammar": ("",),
    "guided_choice": ([],),
    "guided_decoding_backend": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_whitespace_pattern": (),
    "ignore_eos": (False,),
    "include_reasoning": (True,),
    "include_stop_str_in_output": (False,),
    "json_schema": ({},),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "lora_path": (),
    "min_p": (0,),
    "min_tokens": (0,),
    "mirostat": (0,),
    "modalities": (["text"],),
    "moderation": (),
    "n_predict": (-1,),
    "n_probs": (0,),
    "no_stop_trim": (False,),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "presence_penalty": (0,),
    "priority": (0,),
    "prompt_logprobs": (0,),
    "reasoning_effort": ("none",),
    "regex": (),
    "repeat_penalty": (1,),
    "repetition_detection": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "return_hidden_states": (False,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "samplers": (),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stop_regex": ([],),
    "stop_token_ids": ([],),
    "store": (False,),
    "structured_outputs": (),
    "suffix": ("",),
    "thinking_token_budget": (),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_n_sigma": (-1,),
    "truncate_prompt_tokens": (),
    "truncation_side": (),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "vllm_xargs": ({},),
    "watermarking": (),
    "web_search_options": (),
    "xtc_probability": (0,),
}


def parse_question(
    body: bytes, config: ApiConfig, request_id: str, tenant: str
) -> tuple[ChatRequest, GenerateRequest]:
    """Return what a body asks, and the request that it makes of a model.

    Raises:
        BadRequest: As for `parse_chat_request`, or the model is unknown.
    """
    asked = parse_chat_request(body, config)
    temperature = config.card_of(asked.model).default_temperature
    return asked, asked.as_generate_request(request_id, tenant, temperature)


def parse_chat_request(body: bytes, config: ApiConfig = _USUAL) -> ChatRequest:
    """Parse and validate a request body; what can be counted is counted before it is looked at.

    Args:
        body: The body's bytes.
        config: The largest allowed numbers.

    Raises:
        BadRequest: If the body is invalid; it names the first invalid field.
    """
    _check_number_of_messages(body, config.max_messages)
    fields = parse_object(body)
    for name, value in fields.items():
        if name in RapidOptions.model_fields and name not in ChatRequest.model_fields:
            raise BadRequest(
                f"{name} belongs into the object 'rapid' (with the OpenAI SDK: "
                f"extra_body={{'rapid': {{'{name}': ...}}}}).",
                name,
                "unknown_parameter",
            )
        usual = _UNSUPPORTED.get(name)
        if usual is not None and value is not None and not _asks_for_nothing(value, usual):
            raise BadRequest(f"{name} is not supported yet: leave it out.", name, "unsupported")
    for name, entries, most in _count(fields, config):
        if len(entries) > most:
            raise _too_many(name, len(entries), most)
    _check_no_tools(fields.get("messages"))
    try:
        request = ChatRequest.model_validate(fields)
    except ValidationError as error:
        raise bad_request(error, RapidOptions) from None
    _check_sizes(request, config)
    return request


def _check_number_of_messages(body: bytes, max_messages: int) -> None:
    """Check a body before it is parsed, by how often it has the key that every message has.

    Quotes within a text are escaped and do not count.
    """
    num_messages = body.count(_KEY_OF_A_MESSAGE)
    if num_messages > max_messages:
        raise _too_many("messages", num_messages, max_messages)


def _count(
    fields: Mapping[str, Any], config: ApiConfig
) -> Iterator[tuple[str, list[Any] | dict[str, Any], int]]:
    """Yield what validation would look at entry by entry: its name, entries and largest number."""
    messages, rapid = fields.get("messages"), fields.get("rapid")
    if isinstance(messages, list):
        yield "messages", messages, config.max_messages
    if not isinstance(rapid, dict):
        return
    yield "rapid", rapid, _MAX_KEYS
    documents = rapid.get("documents")
    if isinstance(documents, list):
        yield "rapid.documents", documents, config.max_documents
        for index, document in enumerate(documents):
            if isinstance(document, dict):
                yield f"rapid.documents[{index}]", document, _MAX_KEYS


def _check_sizes(request: ChatRequest, config: ApiConfig) -> None:
    if (request.n or 1) > config.max_choices:
        raise BadRequest(f"n must be at most {config.max_choices}", "n", "invalid_value")
    said, attached = request.num_chars
    if config.max_characters is not None and said + attached > config.max_characters:
        raise BadRequest(
            f"messages and documents have {said + attached} characters together, and this "
            f"server takes {config.max_characters} at most",
            "rapid.documents" if attached > said else "messages",
            "context_length_exceeded",
        )


def _too_many(name: str, number: int, most: int) -> BadRequest:
    message = f"{name} has {number} entries, and this server takes {most} at most"
    return BadRequest(message, name, "invalid_value")


def _check_no_tools(messages: object) -> None:
    """Refuse the turns of a conversation that calls tools, whose contents look odd without them."""
    for index, message in enumerate(messages if isinstance(messages, list) else ()):
        if not isinstance(message, dict):
            continue
        role = message.get("role")
        for name in ("tool_calls", "function_call"):
            if message.get(name):
                raise _no_tools(f"messages[{index}].{name}")
        if role in ("tool", "function"):
            raise _no_tools(f"messages[{index}].role", f" {role!r}")


def _no_tools(param: str, value: str = "") -> BadRequest:
    return BadRequest(
        f"{param}{value} is not supported yet: a conversation may not call tools.",
        param,
        "unsupported",
    )


def _asks_for_nothing(value: object, usual: tuple[Any, ...]) -> bool:
    """Return whether a value is one of the usual ones; to Python, False is equal to 0."""
    return any(
        value == each and isinstance(value, bool) == isinstance(each, bool) for each in usual
    )

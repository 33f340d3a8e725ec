"""The reading of request bodies: JSON, fields and sizes; errors name the field.

Unknown fields are ignored, as clients send many, and the receipt names them. Known fields that the
server cannot honour are refused, since an answer that ignores an option is worse than an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from deployments.api.dialects.chat.chat_request import (
    ChatMessage,
    ChatRequest,
    RapidOptions,
    StreamOptions,
)
from deployments.api.http.field_table import FieldTable
from deployments.api.http.json_bodies import parse_object
from deployments.config.api_config import ApiConfig
from rapid.calling.tool_fields import CalledFields, CallFields, FunctionFields, ToolFields
from rapid.errors import BadRequest
from rapid.messages import GenerateRequest
from rapid.requests.refusing import validate_fields

_USUAL = ApiConfig()
_MAX_KEYS = 64  # of objects that refuse unknown keys: each would be an error of its own
_KEY_OF_A_MESSAGE = b'"role"'

# Fields of OpenAI, vLLM, SGLang and llama.cpp that change the answer and are not supported, each
# with its values that have no effect.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "adaptive_target": (-1,),
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "audio": (),
    "best_of": (1,),
    "chat_format": (),
    "chat_parser": ("",),
    "chat_template": (),
    "continue_final_message": (False,),
    "custom_logit_processor": (),
    "custom_params": ({},),
    "detokenize": (True,),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "ebnf": (),
    "echo": (False,),
    "extra_key": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "generation_prompt": ("",),
    "grammar": ("",),
    "grammar_lazy": (False,),
    "grammar_triggers": ([],),
    "grammar_type": ("",),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "input_ids": ([],),
    "json_schema": ({},),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "lora": ([],),
    "lora_path": (),
    "min_keep": (0,),
    "mirostat": (0,),
    "modalities": (["text"],),
    "moderation": (),
    "n_cmpl": (1,),
    "n_discard": (0,),
    "n_indent": (0,),
    "n_keep": (0, -1),
    "n_predict": (-1,),
    "n_probs": (0,),
    "no_stop_trim": (False,),
    "parse_tool_calls": (True,),
    "post_sampling_probs": (False,),
    "prediction": (),
    "preserved_tokens": ([],),
    "prompt_logprobs": (0,),
    "reasoning_budget_end_tag": ("",),
    "reasoning_budget_end_tags": ([],),
    "reasoning_budget_message": ("",),
    "reasoning_budget_start_tag": ("",),
    "reasoning_control": (False,),
    "reasoning_format": ("auto", "deepseek"),
    "regex": (),
    "repeat_last_n": (-1,),
    "repeat_penalty": (1,),
    "repetition_detection": (),
    "response_fields": ([],),
    "return_cached_tokens_details": (False,),
    "return_hidden_states": (False,),
    "return_meta_info": (False,),
    "return_prompt_text": (False,),
    "return_prompt_token_ids": (False,),
    "return_routed_experts": (False,),
    "return_token_ids": (False,),
    "return_tokens": (False,),
    "return_tokens_as_token_ids": (False,),
    "samplers": (),
    "separate_reasoning": (True,),
    "service_tier": ("auto", "default"),
    "session_params": ({},),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stop_regex": ([],),
    "store": (False,),
    "stream_reasoning": (True,),
    "suffix": ("",),
    "t_max_predict_ms": (-1,),
    "task": (),
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

# Fields of theirs that change no answer here: names of requests and users, hints to caches and
# routers, forms of images, and numbers of samplers that are off.
_IGNORED = {
    "adaptive_decay", "backend_sampling", "bootstrap_host", "bootstrap_port", "bootstrap_room",
    "cache_prompt", "data_parallel_rank", "disagg_prefill_dp_rank",
    "dry_allowed_length", "dry_base", "dry_penalty_last_n", "dry_sequence_breakers",
    "dynatemp_exponent", "ec_transfer_params", "images_config", "kv_transfer_params",
    "max_dynamic_patch", "media_io_kwargs", "metadata", "min_dynamic_patch", "mirostat_eta",
    "mirostat_tau", "mm_processor_kwargs", "n_cache_reuse", "ngram_corpus_id", "prompt_cache_key",
    "prompt_cache_options", "prompt_cache_retention", "request_id", "return_mm_kwargs",
    "return_token_offsets", "rid", "routed_dp_rank",
    "routed_experts_prompt_start", "routed_experts_start_len", "safety_identifier", "session_id",
    "sse_ping_interval", "stream_interval", "timings_per_token", "use_audio_in_video", "user",
    "verbose", "xtc_threshold",
}  # fmt: skip

_PARTS = FieldTable(
    {"type", "text", "refusal", "file"},
    {},
    {"cache_control", "prompt_cache_breakpoint"},
    # A file without an id is refused, with what to do with its data.
    nested={"file": FieldTable({"file_id"}, {}, {"file_data", "filename"})},
)
_CALLS = FieldTable(
    CallFields.model_fields,
    {},
    {"index"},  # of a stream's deltas, from which clients put calls together
    nested={"function": FieldTable(CalledFields.model_fields, {})},
)
MESSAGES_OF_CHATS = FieldTable(
    {*ChatMessage.model_fields, "refusal"} - {"file_ids"},
    # Other servers go on from a message with a `prefix`; an `audio` is of an answer in sounds.
    {"audio": (), "function_call": ({}, ""), "prefix": (False,)},
    {"name"},  # of who says it, which chat templates leave out
    nested={"content": _PARTS, "tool_calls": _CALLS},
)
TOOLS_OF_CHATS = FieldTable(
    ToolFields.model_fields, {}, nested={"function": FieldTable(FunctionFields.model_fields, {})}
)
CHAT_FIELDS = FieldTable(
    ChatRequest.model_fields,
    _UNSUPPORTED,
    _IGNORED,
    nested={
        "messages": MESSAGES_OF_CHATS,
        "stream_options": FieldTable(StreamOptions.model_fields, {}, {"include_obfuscation"}),
        "tools": TOOLS_OF_CHATS,
    },
)


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
    return check_chat_request(parse_object(body), config)


def check_chat_request(fields: Mapping[str, Any], config: ApiConfig) -> ChatRequest:
    """Validate the fields of a request; errors are those of `parse_chat_request`."""
    refuse_misplaced(fields, ChatRequest)
    for name, entries, most in _count(fields, config):
        if len(entries) > most:
            raise _too_many(name, len(entries), most)
    _check_no_functions(fields.get("messages"))
    ignored = CHAT_FIELDS.list_ignored(fields)
    request = validate_fields(ChatRequest, fields, RapidOptions)
    _check_sizes(request, config)
    return request.ignore(ignored)


def refuse_misplaced(fields: Mapping[str, Any], model: type[BaseModel]) -> None:
    """Raise BadRequest for a field that a model of bodies lacks and the object 'rapid' may have.

    A null is no field: whole dumps of other servers' requests have ``"documents": null``.
    """
    for name, value in fields.items():
        if value is None or name in model.model_fields:
            continue
        if name in RapidOptions.model_fields:
            raise BadRequest(
                f"{name} belongs into the object 'rapid' (with the OpenAI SDK: "
                f"extra_body={{'rapid': {{'{name}': ...}}}}).",
                name,
                "unknown_parameter",
            )


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
    param = "rapid.documents" if attached > said else "messages"
    config.check_characters(said + attached, request.model, param)


def _too_many(name: str, number: int, most: int) -> BadRequest:
    message = f"{name} has {number} entries, and this server takes {most} at most"
    return BadRequest(message, name, "invalid_value")


def _check_no_functions(messages: object) -> None:
    """Refuse the turns of conversations from before tools, whose contents look odd without them."""
    for index, message in enumerate(messages if isinstance(messages, list) else ()):
        is_call = isinstance(message, dict) and message.get("function_call")
        if is_call or (isinstance(message, dict) and message.get("role") == "function"):
            param = f"messages[{index}].{'function_call' if is_call else 'role'}"
            what = "is of OpenAI's older functions: send tool_calls and role 'tool'"
            raise BadRequest(f"{param} {what}", param, "unsupported")

"""The questions of `rapid.open`: what a caller may pass, and its refusal in one sentence."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypedDict

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError

from rapid.calling.tool_fields import CallingTurn, ToolSettings, check_calls
from rapid.chat_messages import Document, Message
from rapid.config import Coupling, Mode, TooLong
from rapid.errors import BadRequest
from rapid.messages import GenerateRequest
from rapid.requests.chat_fields import Documents, someone_asks
from rapid.requests.method_fields import Explained, MethodFields
from rapid.requests.refusing import bad_request
from rapid.requests.request_fields import encodable, refuse
from rapid.requests.sampling_fields import SamplingFields

_TENANT = "local"
_CHAT = "must be a text or a list of rapid.Message(role, text)"
_TEXTS = "must be a list of texts, paths or rapid.Document(name, text)"


class AskSettings(TypedDict, total=False):
    """Optional settings of a question, with the names, types and defaults of the HTTP API.

    ``docs/api.md`` describes each of them. As there, None leaves a setting to its default, except
    `draft_top_k`, where it means no cut.
    """

    mode: Mode | None
    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    seed: int | None
    stop: str | Sequence[str] | None
    logit_bias: Mapping[int, float] | None
    presence_penalty: float | None
    frequency_penalty: float | None
    min_tokens: int | None
    allowed_token_ids: Sequence[int] | None
    repetition_penalty: float | None
    min_p: float | None
    bad_words: Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    include_stop_str_in_output: bool | None
    response_format: Mapping[str, Any] | None
    structured_outputs: Mapping[str, Any] | None
    query: str | None
    retrieval_tokens: int | None
    transfer: str | None
    eta: float | None
    max_draft: int | None
    coupling: Coupling | None
    plausibility: float | None
    draft_top_k: int | None
    refresh: bool | None
    citations: bool | None
    explain: Explained | None
    penalize_documents: bool | None
    too_long: TooLong | None
    truncation: Literal["auto", "disabled"] | None
    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: str | Mapping[str, Any] | None
    parallel_tool_calls: bool | None


def _as_turns(question: object) -> object:
    if isinstance(question, str):
        return [{"role": "user", "content": encodable(question)}]
    return [
        {
            "role": each.role,
            "content": each.text if isinstance(each.content, tuple) else each.content,
            "tool_calls": [
                {"id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
                for call in each.tool_calls
            ],
            "tool_call_id": each.tool_call_id,
        }
        for each in _entries(question, Message, _CHAT)
    ]


def _as_attached(documents: object) -> object:
    """Give every unnamed text a distinct name, because the prompts state the names."""
    if isinstance(documents, str):
        refuse("documents", "is one text: put it into a list")
    entries: list[Any] = _entries(documents, str | Document, _TEXTS)
    names = {each.name for each in entries if isinstance(each, Document)}
    numbered = (f"document {number}" for number in itertools.count(1))
    fresh = iter(["document"]) if len(entries) == 1 else (n for n in numbered if n not in names)
    return [
        {"name": each.name, "text": each.text}
        if isinstance(each, Document)
        else {"name": next(fresh), "text": each}
        for each in entries
    ]


def _entries(given: object, kind: Any, what: str) -> list[Any]:
    if isinstance(given, bytes) or not isinstance(given, Sequence):
        refuse("type", f"{what}; it is of type {type(given).__name__}")
    for each in given:
        if not isinstance(each, kind):
            refuse("type", f"{what}; it has an entry of type {type(each).__name__}")
    return list(given)


class QuestionFields(SamplingFields, MethodFields, ToolSettings):
    """A question with its documents and settings."""

    question: Annotated[
        list[CallingTurn],
        BeforeValidator(_as_turns),
        Field(min_length=1),
        AfterValidator(someone_asks),
        AfterValidator(check_calls),
    ]
    documents: Annotated[Documents, BeforeValidator(_as_attached)]


def as_request(
    request_id: str,
    question: str | Sequence[Message],
    documents: Sequence[str | Document],
    settings: Mapping[str, Any],
    *,
    is_streamed: bool,
    default_temperature: float = 1.0,
) -> GenerateRequest:
    """Return a question as the orchestrator gets it.

    Raises:
        BadRequest: Something is not what it must be; ``param`` names it.
    """
    try:
        asked = QuestionFields.model_validate(
            {**settings, "question": question, "documents": documents}
        )
    except ValidationError as error:
        raise bad_request(error, QuestionFields) from None
    except BadRequest as refused:
        raise in_own_words(refused) from None
    sampling = asked.as_sampling(default_temperature)
    return GenerateRequest(
        request_id=request_id,
        tenant=_TENANT,
        messages=tuple(turn.as_message() for turn in asked.question),
        documents=tuple(each.as_document() for each in asked.documents),
        query=asked.query,
        retrieval_tokens=asked.retrieval_tokens,
        is_streamed=is_streamed,
        speculation=asked.as_speculation(),
        citations=bool(asked.citations),
        **asked.as_explanation(),
        penalize_documents=bool(asked.penalize_documents),
        tools=asked.read_tools(sampling),
        **sampling,
    )


def in_own_words(refused: BadRequest) -> BadRequest:
    """Return a refusal with the names of `AskSettings`, which HTTP has in an object ``rapid``."""
    param = (refused.param or "").removeprefix("rapid.")
    param = re.sub(r"^messages\b", "question", param)
    said = re.sub(r"^messages\[", "question[", str(refused).replace("rapid.", ""))
    return type(refused)(said, param or None, refused.code)

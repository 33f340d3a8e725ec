"""OpenAI's completions as a dialect: raw prompts, and answers as text."""

from __future__ import annotations

from dataclasses import replace

from deployments.api.backend.continuing import Cursor
from deployments.api.dialects.chat.chat_dialect import ChatReply
from deployments.api.dialects.chat.parsing import CHAT_FIELDS, refuse_misplaced
from deployments.api.dialects.chat.wire import Timing
from deployments.api.dialects.completions.completion_request import (
    CompletionOptions,
    CompletionRequest,
)
from deployments.api.dialects.completions.text_wire import TextFrame
from deployments.api.http.dialect import Dialect
from deployments.api.http.json_bodies import parse_aside, parse_object
from deployments.config.api_config import ApiConfig
from rapid.errors import BadRequest
from rapid.messages import GenerateRequest
from rapid.ports import Clock
from rapid.requests.refusing import validate_fields

_OWN = CompletionRequest.model_fields
COMPLETION_FIELDS = CHAT_FIELDS.derive(_OWN, dict.fromkeys({*CHAT_FIELDS.honoured} - {*_OWN}, ()))


class CompletionDialect(Dialect):
    """The dialect of ``/v1/completions``."""

    async def parse(
        self, body: bytes, config: ApiConfig, request_id: str, tenant: str
    ) -> tuple[CompletionRequest, GenerateRequest]:
        """Return the question and its request; a long body is parsed in a thread."""
        return await parse_aside(_parse, body, config, request_id, tenant)

    def reply(
        self, asked: CompletionRequest, cursor: Cursor, fingerprint: str, began: float, clock: Clock
    ) -> CompletionReply:
        """Return the renderer of the answers."""
        return CompletionReply(asked, cursor, fingerprint, Timing(began), clock)


class CompletionReply(ChatReply):
    """An `AnswerRenderer` of OpenAI's text completions and their chunks; no chunk has a role."""

    def __init__(
        self,
        asked: CompletionRequest,
        cursor: Cursor,
        fingerprint: str,
        timing: Timing,
        clock: Clock,
    ) -> None:
        cursor = replace(cursor, num_roles=len(cursor.marks))
        super().__init__(asked, cursor, fingerprint, timing, clock)
        self.id = f"cmpl-{cursor.unique.hex()}"
        self._frame = TextFrame(
            id=self.id,
            created=cursor.created,
            model=asked.model,
            fingerprint=fingerprint,
            has_logprobs=asked.logprobs is not None,
            includes_usage=asked.includes_usage,
            offsets=[mark.num_chars for mark in cursor.marks],
        )


def _parse(
    body: bytes, config: ApiConfig, request_id: str, tenant: str
) -> tuple[CompletionRequest, GenerateRequest]:
    fields = parse_object(body)
    refuse_misplaced(fields, CompletionRequest)
    ignored = COMPLETION_FIELDS.list_ignored(fields)
    asked = validate_fields(CompletionRequest, fields, CompletionOptions)
    if (asked.n or 1) > config.max_choices:
        raise BadRequest(f"n must be at most {config.max_choices}", "n", "invalid_value")
    config.check_characters(asked.num_chars, asked.model, "prompt")
    temperature = config.card_of(asked.model).default_temperature
    sent = asked.as_generate_request(request_id, tenant, temperature)
    return asked, replace(sent, ignored=ignored)

"""``POST /v1/responses/compact``: what was said, as the model sums it up, to go on from.

What the user said stays as it is; one item, a compaction, takes the place of the rest.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pydantic import Field

from deployments.api.backend.continuing import Cursor
from deployments.api.dialects.responses.body.input_items import Json, name_items, seal
from deployments.api.dialects.responses.body.responses_request import (
    Input,
    Past,
    ResponsesQuestion,
    ResponsesRequest,
)
from deployments.api.dialects.responses.responses_dialect import ResponsesDialect
from deployments.api.dialects.responses.responses_reply import ResponsesReply
from deployments.api.http.dialect import Events
from deployments.api.http.json_bodies import parse_object
from deployments.config.api_config import ApiConfig
from rapid.errors import BadRequest
from rapid.messages import GenerateRequest
from rapid.ports import Clock
from rapid.requests.refusing import validate_fields
from rapid.requests.request_fields import MAX_NAME, Fields, Text

_ASK = (
    "Sum up what was said so far for somebody who has not read it: what was asked, found, agreed "
    "and left open, with every name, number and date. Write the summary only."
)


class CompactRequest(Fields):
    """The body of ``POST /v1/responses/compact``."""

    model: Text = Field(max_length=MAX_NAME)
    input: Input = None
    previous_response_id: Text | None = None
    instructions: Text | None = None
    # For caches and prices of OpenAI, which change no answer.
    prompt_cache_key: Text | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: Text | None = None
    service_tier: Text | None = None


class CompactDialect(ResponsesDialect):
    """The dialect of ``/v1/responses/compact``: a request for a summary, which is not kept."""

    async def parse(
        self, body: bytes, config: ApiConfig, request_id: str, tenant: str
    ) -> tuple[ResponsesQuestion, GenerateRequest]:
        """Return the question for a summary, and its request."""
        asked, sent = await super().parse(body, config, request_id, tenant)
        if len(asked.items) == 1 and not asked.past.items:
            raise BadRequest("Nothing was said: send input or previous_response_id.", "input")
        return asked, sent

    def _fields(self, body: bytes) -> Json:
        given = validate_fields(CompactRequest, parse_object(body))
        said = given.input or []
        said = [{"role": "user", "content": said}] if isinstance(said, str) else said
        names = ("model", "previous_response_id", "instructions", "service_tier")
        fields: Json = {name: getattr(given, name) for name in names}
        return fields | {
            "input": [*said, {"role": "user", "content": _ASK}],
            "store": False,
            "temperature": 0,
        }

    async def _recall(self, tenant: str, asked: ResponsesRequest, config: ApiConfig) -> Past:
        """Return what came before, whose documents need not be read for what was said of them."""
        return replace(await super()._recall(tenant, asked, config), rapid={})

    def reply(
        self, asked: ResponsesQuestion, cursor: Cursor, fingerprint: str, began: float, clock: Clock
    ) -> CompactReply:
        """Return the renderer of the summary."""
        return CompactReply(asked, cursor, began, clock, self._memory)


class CompactReply(ResponsesReply):
    """The renderer of a summary."""

    async def render_whole(self, events: Events) -> Json:
        """Return what takes the place of what was said.

        Raises:
            BadRequest: The summary was cut: what it lacks would be lost with the rest.
        """
        response = await super().render_whole(events)
        if response["incomplete_details"] is not None:
            reason = response["incomplete_details"]["reason"]
            most = response["usage"]["output_tokens"]
            message = f"The summary does not end within {most} tokens: compact fewer items at once."
            raise BadRequest(message, "input", reason)
        said = [*self._asked.past.items, *self._asked.items[:-1]]
        told = [each for each in said if each.get("role") == "user"]
        answered = [each for each in response["output"] if each["type"] == "message"]
        text = "".join(each["content"][0]["text"] for each in answered)
        told.append({"type": "compaction", "encrypted_content": seal(text)})
        kept = ("id", "created_at", "usage", "metrics", "rapid")
        return {
            "object": "response.compaction",
            "output": name_items(told, self._unique),
            **{name: response[name] for name in kept},
        }

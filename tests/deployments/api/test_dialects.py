"""A second dialect is a folder and an entry in the table."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from deployments.api.ingress import DIALECTS, Ingress
from deployments.config.api_config import ApiConfig
from rapid.errors import BadRequest, OrchestratorLost
from rapid.messages import GenerateRequest, Message, TextDelta
from tests.deployments.scripted import STARTED, ScriptedOrchestrator


@dataclass
class PlainQuestion:
    text: str
    model: str = "rapid"

    def as_generate_request(self, request_id: str, tenant: str, _: Any) -> GenerateRequest:
        messages = (Message("user", self.text),)
        return GenerateRequest(request_id, tenant, messages, is_streamed=True)

    def field_of(self, param: str | None) -> str | None:
        return param


class PlainReply:
    id, media_type = "plain", "text/plain"

    async def render_whole(self, events: Any) -> dict[str, Any]:
        raise NotImplementedError

    async def render(self, events: Any) -> AsyncIterator[bytes]:
        async for event in events:
            if isinstance(event, TextDelta):
                yield event.text.encode()

    def render_error(self, body: dict[str, Any]) -> bytes:
        return f"\n{body['error']['message']}".encode()


class PlainText:
    """A string of JSON is answered by plain text."""

    async def parse(self, body: bytes, limits: Any) -> PlainQuestion:
        text = json.loads(body)
        if not isinstance(text, str):
            raise BadRequest("The question is no string.", "body")
        return PlainQuestion(text)

    def reply(self, *_: Any) -> PlainReply:
        return PlainReply()


async def ask(monkeypatch: pytest.MonkeyPatch, body: Any, *steps: Any) -> httpx.Response:
    monkeypatch.setitem(DIALECTS, "/plain", PlainText())
    app = Ingress(ScriptedOrchestrator(*steps), ApiConfig(model="rapid"))
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://127.0.0.1"
    ) as http:
        return await http.post("/plain", json=body)


async def test_another_dialect_is_answered_in_its_own_form(monkeypatch: pytest.MonkeyPatch) -> None:
    response = await ask(monkeypatch, "Hi")
    assert response.text == "Hello, wörld!"
    assert response.headers["content-type"] == "text/plain; charset=utf-8"
    assert response.headers["x-request-id"].startswith("req_")


async def test_its_refusals_have_the_form_and_the_status_of_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    response = await ask(monkeypatch, 5)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "body")


async def test_an_error_in_its_stream_is_rendered_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = OrchestratorLost("Lost.")
    response = await ask(monkeypatch, "Hi", STARTED, TextDelta(0, "Hel"), lost)
    assert response.text == "Hel\nLost."

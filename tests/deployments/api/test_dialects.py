"""A second dialect is a folder and an entry in the table."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from deployments.api.ingress import DIALECTS, Ingress
from deployments.config.api_config import ApiConfig
from rapid.chat_messages import Message
from rapid.errors import BadRequest, OrchestratorLost, Overloaded
from rapid.events import TextDelta
from rapid.messages import GenerateRequest
from tests.deployments.scripted import STARTED, ScriptedOrchestrator


class PlainQuestion:
    stored = None

    def field_of(self, param: str | None) -> str | None:
        return param


class PlainReply:
    id, media_type = "plain", "text/plain"

    async def render_whole(self, events: Any) -> dict[str, Any]:
        return {"said": b"".join([part async for part in self.render(events)]).decode()}

    async def render(self, events: Any) -> AsyncIterator[bytes]:
        async for event in events:
            if isinstance(event, TextDelta):
                yield event.text.encode()

    def render_error(self, body: dict[str, Any]) -> bytes:
        return f"\n{body['error']['message']}".encode()


class PlainText:
    """Plain text is answered by plain text, or by an object where it asks for a whole answer."""

    media_types = ("text/plain",)

    async def parse(
        self, body: bytes, config: ApiConfig, request_id: str, tenant: str
    ) -> tuple[PlainQuestion, GenerateRequest]:
        text = body.decode()
        if not text:
            raise BadRequest("There is no question.", "body")
        messages, is_streamed = (Message("user", text),), not text.startswith("Whole: ")
        request = GenerateRequest(
            request_id, tenant, messages, is_streamed=is_streamed, model=config.model
        )
        return PlainQuestion(), request

    def render_refusal(self, body: dict[str, Any]) -> dict[str, Any]:
        return {"problem": body["error"]["message"]}

    def reply(self, *_: Any) -> PlainReply:
        return PlainReply()


async def ask(
    monkeypatch: pytest.MonkeyPatch, body: str, *steps: Any, media_type: str = "text/plain"
) -> httpx.Response:
    monkeypatch.setitem(DIALECTS, "/plain", PlainText())
    app = Ingress(ScriptedOrchestrator(*steps), ApiConfig(model="rapid"))
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://127.0.0.1"
    ) as http:
        return await http.post("/plain", content=body, headers={"content-type": media_type})


async def test_another_dialect_is_answered_in_its_own_form(monkeypatch: pytest.MonkeyPatch) -> None:
    response = await ask(monkeypatch, "Hi")
    assert response.text == "Hello, wörld!"
    assert response.headers["content-type"] == "text/plain; charset=utf-8"
    assert response.headers["x-request-id"].startswith("req_")


async def test_its_whole_answers_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert (await ask(monkeypatch, "Whole: Hi")).json() == {"said": "Hello, wörld!"}


@pytest.mark.parametrize(
    ("body", "media_type", "step", "status", "problem"),
    [
        ("", "text/plain; charset=utf-8", None, 400, "There is no question."),
        ("Hi", "application/json", None, 400, "Send the body with 'Content-Type: text/plain'."),
        ("Hi", "text/plain", Overloaded("Full."), 503, "Full."),
        ("Whole: Hi", "text/plain", Overloaded("Full."), 503, "Full."),
    ],
)
async def test_its_refusals_have_its_form_and_the_status_of_all(
    body: str,
    media_type: str,
    step: Any,
    status: int,
    problem: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = () if step is None else (step,)
    response = await ask(monkeypatch, body, *steps, media_type=media_type)
    assert (response.status_code, response.json()) == (status, {"problem": problem})


async def test_an_error_in_its_stream_is_rendered_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = OrchestratorLost("Lost.")
    response = await ask(monkeypatch, "Hi", STARTED, TextDelta(0, "Hel"), lost)
    assert response.text == "Hel\nLost."

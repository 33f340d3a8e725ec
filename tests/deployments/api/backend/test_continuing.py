"""Requests whose orchestrator is lost, and streams whose connection breaks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import httpx
import openai
import pytest

from deployments.api.backend.service import Running, Tell
from deployments.api.ingress import Ingress
from deployments.config.api_config import ApiConfig, ApiKey
from deployments.config.tenants import hash_key
from rapid.errors import OrchestratorLost, Overloaded, TargetUnavailable
from rapid.events import Finished, GenerationEvent, TextDelta
from rapid.messages import GenerateRequest
from tests.deployments.scripted import (
    STARTED,
    ScriptedOrchestrator,
    Step,
    answer,
    receipt,
    token_texts,
)
from tests.deployments.serving import served

CHAT = "/v1/chat/completions"
ASK: dict[str, Any] = {"model": "rapid", "messages": [{"role": "user", "content": "Hi"}]}
STREAM = ASK | {"stream": True, "stream_options": {"include_usage": True}}
LOST = OrchestratorLost("The orchestrator was lost: ask again.")
TEXT = "Hello, wörld!"


class Orchestrators:
    """One scripted orchestrator for each attempt; the last takes all that follow."""

    def __init__(self, *scripts: Sequence[Step]) -> None:
        self.attempts = [ScriptedOrchestrator(*script) for script in scripts]
        self.requests: list[GenerateRequest] = []

    async def begin(self, request: GenerateRequest, tell: Tell) -> Running:
        self.requests.append(request)
        attempt = self.attempts[min(len(self.requests), len(self.attempts)) - 1]
        return await attempt.begin(request, tell)

    async def ready(self) -> dict[str, Any]:
        return {"ready": True}


def whole(*texts: str, num_choices: int = 1) -> list[GenerationEvent]:
    """The events of an answer in rounds of these texts, with log-probabilities."""
    request = GenerateRequest("r", "t", (), num_logprobs=0)
    events: list[GenerationEvent] = [STARTED]
    for index, text in enumerate(texts):
        finish = "stop" if index == len(texts) - 1 else None
        for choice in range(num_choices):
            events.append(TextDelta(choice, text, token_texts(request, text), finish))  # type: ignore[arg-type]
    return [*events, Finished(receipt(num_choices))]


def ingress(orchestrators: Any, **config: Any) -> Ingress:
    return Ingress(orchestrators, ApiConfig(model="rapid", **config))


async def post(app: Ingress, body: Any, **headers: str) -> httpx.Response:
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://127.0.0.1"
    ) as http:
        return await http.post(CHAT, json=body, headers=headers)


def events_of(response: httpx.Response) -> list[tuple[str, Any]]:
    """The ids and the data of a stream's events, without comments."""
    events = []
    for block in response.text.split("\n\n")[:-1]:
        if not block or block.startswith(":"):
            continue
        data = block.removeprefix("data: ")
        chunk = data if data == "[DONE]" else json.loads(data)
        events.append((chunk["rapid_event_id"] if "choices" in chunk else "", chunk))
    return events


def texts(events: Sequence[tuple[str, Any]], num_choices: int = 1) -> list[str]:
    said = [""] * num_choices
    for _, chunk in events:
        for choice in chunk["choices"] if isinstance(chunk, dict) and "choices" in chunk else ():
            said[choice["index"]] += choice["delta"].get("content", "")
    return said


class TestALostOrchestrator:
    @pytest.mark.parametrize("num_before", range(5))
    @pytest.mark.parametrize(
        "again",
        [("Hello", ", wörld", "!"), ("Hel", "lo, w", "örld!"), (TEXT,), (*TEXT, "")],
        ids=["the same rounds", "other rounds", "one round", "letters"],
    )
    async def test_a_stream_goes_on_where_it_was(self, num_before: int, again: tuple[str, ...]):
        first = [*whole("Hello", ", wörld", "!")[:num_before], LOST]
        orchestrators = Orchestrators(first, whole(*again))
        events = events_of(await post(ingress(orchestrators), STREAM | {"logprobs": True}))
        assert texts(events) == [TEXT]
        *chunks, usage, done = [data for _, data in events]
        assert done == "[DONE]"
        assert usage["usage"]["total_tokens"] == 108
        assert len({chunk["id"] for chunk in chunks}) == 1
        assert sum("role" in chunk["choices"][0]["delta"] for chunk in chunks) == 1
        ends = [chunk for chunk in chunks if chunk["choices"][0]["finish_reason"]]
        assert ends == chunks[-1:]
        assert ends[0]["rapid"]["failovers"] == ["orchestrator lost"]

    async def test_every_log_probability_is_sent_once(self):
        first = [*whole("a", "b", "c")[:3], LOST]
        orchestrators = Orchestrators(first, whole("a", "b", "c"))
        events = events_of(await post(ingress(orchestrators), STREAM | {"logprobs": True}))
        tokens = [
            token["token"]
            for _, chunk in events[:-2]
            for token in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
        ]
        assert tokens == ["a", "b", "c"]

    async def test_several_choices_go_on_each_from_its_own_place(self):
        first = [
            STARTED,
            TextDelta(1, "Hello, wörld!", (), "stop"),
            TextDelta(0, "Hel"),
            LOST,
        ]
        orchestrators = Orchestrators(first, whole("Hello", ", wörld", "!", num_choices=2))
        events = events_of(await post(ingress(orchestrators), STREAM | {"n": 2}))
        assert texts(events, 2) == [TEXT, TEXT]
        assert events[-1][1] == "[DONE]"

    async def test_a_whole_answer_is_made_again_and_given_once(self):
        first = [STARTED, TextDelta(0, "Hello, wö"), LOST]
        orchestrators = Orchestrators(first, whole("Another", " text"))
        response = await post(ingress(orchestrators), ASK)
        assert response.status_code == 200
        body = response.json()
        assert body["choices"][0]["message"]["content"] == "Another text"
        assert body["rapid"]["failovers"] == ["orchestrator lost"]
        assert len(orchestrators.requests) == 2

    @pytest.mark.parametrize("seed", [None, 5])
    @pytest.mark.parametrize("is_stream", [True, False])
    async def test_both_attempts_have_one_seed_and_one_day(self, is_stream: bool, seed: int | None):
        orchestrators = Orchestrators([STARTED, LOST], whole(TEXT))
        await post(ingress(orchestrators), ASK | {"stream": is_stream, "seed": seed})
        first, second = orchestrators.requests
        assert first == second
        assert first.seed == seed
        assert first.drawn_seed is not None

    @pytest.mark.parametrize("is_stream", [True, False])
    async def test_the_second_loss_is_told_as_one_that_may_be_retried(self, is_stream: bool):
        orchestrators = Orchestrators([STARTED, LOST], [STARTED, TextDelta(0, "Hel"), LOST])
        response = await post(ingress(orchestrators), ASK | {"stream": is_stream})
        body = events_of(response)[-1][1] if is_stream else response.json()
        assert (body["error"]["code"], body["error"]["retryable"]) == ("orchestrator_lost", True)
        assert response.status_code == (200 if is_stream else 503)
        assert len(orchestrators.requests) == 2

    @pytest.mark.parametrize("error", [TargetUnavailable("Gone."), Overloaded("Full.")])
    async def test_what_an_orchestrator_refuses_is_not_asked_again(self, error: Exception):
        orchestrators = Orchestrators([STARTED, error], whole(TEXT))
        assert (await post(ingress(orchestrators), ASK)).status_code == 503
        assert len(orchestrators.requests) == 1

    @pytest.mark.parametrize(
        "again",
        [
            ("Hallo", ", wörld!"),  # other letters
            ("Hel",),  # the end comes earlier
        ],
    )
    async def test_another_text_ends_the_stream_with_an_error(self, again: tuple[str, ...]):
        first = [*whole("Hello", ", wörld", "!")[:2], LOST]
        events = events_of(await post(ingress(Orchestrators(first, whole(*again))), STREAM))
        assert texts(events) == ["Hello"]
        error = events[-1][1]["error"]
        assert (error["code"], error["retryable"]) == ("cannot_continue", True)

    async def test_a_choice_that_had_ended_and_now_goes_on_is_another_text(self):
        first = [STARTED, TextDelta(1, "Hello", (), "stop"), LOST]
        again = whole("Hello", ", wörld", "!", num_choices=2)
        events = events_of(await post(ingress(Orchestrators(first, again)), STREAM | {"n": 2}))
        assert events[-1][1]["error"]["code"] == "cannot_continue"


class TestLastEventId:
    @pytest.mark.parametrize("num_choices", [1, 3])
    async def test_after_every_event_the_rest_is_exactly_the_rest(self, num_choices: int):
        asked = STREAM | {"n": num_choices, "logprobs": True}
        app = ingress(ScriptedOrchestrator())
        events = events_of(await post(app, asked))
        ids = [event_id for event_id, _ in events[:-1]]
        assert len(set(ids)) == len(ids)
        assert events[-1] == ("", "[DONE]")
        for index, event_id in enumerate(ids):
            response = await post(app, asked, last_event_id=event_id)
            assert response.status_code == 200
            rest = events_of(response)
            assert [i for i, _ in rest] == [i for i, _ in events[index + 1 :]]
            expected = [data for _, data in events[index + 1 :]]
            for (_, data), before in zip(rest, expected, strict=True):
                if isinstance(data, dict) and "metrics" in data:  # times, which differ
                    data, before = data | {"metrics": None}, before | {"metrics": None}
                assert data == before

    async def test_the_drawn_seed_comes_back_with_the_id(self):
        orchestrator = ScriptedOrchestrator()
        app = ingress(orchestrator)
        events = events_of(await post(app, STREAM))
        await post(app, STREAM, last_event_id=events[2][0])
        await post(app, STREAM)
        first, second, other = orchestrator.requests
        assert first.drawn_seed == second.drawn_seed != other.drawn_seed
        assert first.date == second.date
        assert first.request_id != second.request_id

    async def test_it_goes_on_in_other_rounds_and_past_a_lost_orchestrator(self):
        """The id is of a process that no longer exists."""
        first = Orchestrators(whole("Hello", ", wör", "ld!"))
        events = events_of(await post(ingress(first), STREAM))[:3]
        assert texts(events) == ["Hello, wör"]
        second = Orchestrators([*whole("He", "llo", ", wörl", "d!")[:4], LOST], whole(TEXT))
        rest = events_of(await post(ingress(second), STREAM, last_event_id=events[-1][0]))
        assert texts(events + rest) == [TEXT]
        assert rest[-1][1] == "[DONE]"

    async def test_another_text_is_told(self):
        events = events_of(await post(ingress(Orchestrators(whole("Hello", "!"))), STREAM))
        app = ingress(Orchestrators(whole("Hallo", "!")))
        rest = events_of(await post(app, STREAM, last_event_id=events[1][0]))
        assert texts(rest) == [""]
        assert rest[-1][1]["error"]["code"] == "cannot_continue"

    @pytest.mark.parametrize(
        "wrong", ["x", "ä", "é=", "AAAA", "A" * 400, "1", "\t", "$$$$", "A" * 76]
    )
    async def test_what_is_no_id_is_refused(self, wrong: str):
        orchestrator = ScriptedOrchestrator()
        app = ingress(orchestrator)
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://127.0.0.1"
        ) as http:
            headers = {"last-event-id": wrong.encode()}
            response = await http.post(CHAT, json=STREAM, headers=headers)
        assert response.status_code == 400
        error = response.json()["error"]
        assert (error["param"], error["code"]) == ("Last-Event-ID", "invalid_event_id")
        assert not orchestrator.requests

    @pytest.mark.parametrize("change", [{"n": 2}, {"seed": 1}, {"max_tokens": 9}])
    async def test_the_id_of_another_request_is_refused(self, change: dict[str, Any]):
        app = ingress(ScriptedOrchestrator())
        events = events_of(await post(app, STREAM))
        response = await post(app, STREAM | change, last_event_id=events[1][0])
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "foreign_event_id"

    async def test_a_document_of_another_text_makes_it_another_request(self):
        app = ingress(ScriptedOrchestrator())

        def about(text: str) -> dict[str, Any]:
            return STREAM | {"rapid": {"documents": [{"name": "notes", "text": text}]}}

        events = events_of(await post(app, about("one")))
        for text, status in (("one", 200), ("two", 400)):
            response = await post(app, about(text), last_event_id=events[1][0])
            assert response.status_code == status

    async def test_the_id_of_another_tenant_is_refused(self):
        keys = [ApiKey(tenant=name, sha256=hash_key(f"sk-{name}")) for name in ("a", "b")]
        app = ingress(ScriptedOrchestrator(), keys=tuple(keys))
        events = events_of(await post(app, STREAM, authorization="Bearer sk-a"))
        for name, status in (("a", 200), ("b", 400)):
            response = await post(
                app, STREAM, authorization=f"Bearer sk-{name}", last_event_id=events[1][0]
            )
            assert response.status_code == status

    async def test_an_answer_that_is_not_streamed_has_no_place_to_go_on_from(self):
        app = ingress(ScriptedOrchestrator())
        events = events_of(await post(app, STREAM))
        response = await post(app, ASK, last_event_id=events[1][0])
        assert response.status_code == 400
        assert "stream: true" in response.json()["error"]["message"]

    async def test_the_id_says_nothing_about_tenant_or_text(self):
        keys = (ApiKey(tenant="acme-corporation", sha256=hash_key("sk-1")),)
        app = ingress(ScriptedOrchestrator(), keys=keys)
        response = await post(app, STREAM, authorization="Bearer sk-1")
        for event_id, _ in events_of(response):
            for secret in ("acme", "sk-1", "Hello"):
                assert secret not in event_id

    async def test_the_sdk_streams_past_the_ids(self):
        app = ingress(ScriptedOrchestrator())
        async with (
            served(app) as url,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="local", max_retries=0) as sdk,
        ):
            stream = await sdk.chat.completions.create(**STREAM)
            said = [chunk.choices[0].delta.content async for chunk in stream if chunk.choices]
            assert "".join(said) == TEXT


def test_the_script_is_the_text() -> None:
    deltas = [event for event in answer(GenerateRequest("r", "t", ())) if hasattr(event, "text")]
    assert "".join(delta.text for delta in deltas) == TEXT  # type: ignore[union-attr]

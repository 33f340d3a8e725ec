"""The HTTP API over a scripted orchestrator, in process and through a real server."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest

from cluster.placement import RequestPoolConfig
from deployments.api.ingress import Ingress
from deployments.config.api_config import ApiConfig, ApiKey, ModelCard
from deployments.config.tenants import hash_key
from rapid.errors import (
    BadRequest,
    DrafterUnavailable,
    EngineFailed,
    LeaseNotFound,
    OutOfStep,
    Overloaded,
    PromptTooLong,
    TargetUnavailable,
)
from rapid.events import Finished, Reading, TextDelta
from tests.deployments.scripted import STARTED, ScriptedOrchestrator, receipt
from tests.deployments.serving import served

MODEL = "rapid-test"
ASK: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
CHAT = "/v1/chat/completions"


def ingress(orchestrator: ScriptedOrchestrator, **config: Any) -> Ingress:
    return Ingress(orchestrator, ApiConfig(model=MODEL, **config))


def client(app: Ingress, **options: Any) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app)
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", **options)


async def post(app: Ingress, body: object = ASK, **options: Any) -> httpx.Response:
    async with client(app) as http:
        return await http.post(CHAT, json=body, **options)


def events(response: httpx.Response) -> list[Any]:
    """The stream's events; comments as ':'."""
    found: list[Any] = []
    assert response.text.endswith("\n\n")
    for line in response.text.splitlines():
        name, _, value = line.partition(": ")
        if name == "data":
            found.append(parsed(value))
        elif line.startswith(":"):
            found.append(":")
        else:
            assert not line
    return found


def parsed(data: str) -> Any:
    return data if data == "[DONE]" else json.loads(data)


class TestWhole:
    async def test_a_temperature_that_is_left_out_is_the_server_s(self):
        for default, given, expected in ((None, {}, 1), (0, {}, 0), (0, {"temperature": 0.7}, 0.7)):
            orchestrator = ScriptedOrchestrator()
            app = ingress(orchestrator, default_temperature=default)
            assert (await post(app, ASK | given)).status_code == 200
            assert orchestrator.requests[0].temperature == expected

    async def test_an_empty_question_is_refused(self):
        for content in ("", " \n", [{"type": "text", "text": ""}]):
            body = ASK | {"messages": [{"role": "user", "content": content}]}
            response = await post(ingress(ScriptedOrchestrator()), body)
            assert response.status_code == 400
            assert "there is no question" in response.json()["error"]["message"]

    async def test_shape(self):
        response = await post(ingress(ScriptedOrchestrator()), headers={"x-request-id": "mine"})
        assert response.status_code == 200
        assert response.headers["x-request-id"] == "mine"
        body = response.json()
        assert body["id"].startswith("chatcmpl-")
        assert (body["object"], body["model"]) == ("chat.completion", MODEL)
        assert body["system_fingerprint"].startswith("fp_")
        assert body["choices"] == [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello, wörld!", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ]
        assert body["usage"] == {
            "prompt_tokens": 100,
            "completion_tokens": 8,
            "total_tokens": 108,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0},
        }
        assert body["metrics"]["speculative_decoding"] == {
            "mean_acceptance_length": 8 / 3,
            "draft_acceptance_rate": 6 / 9,
            "acceptance_histogram": [0, 1, 1, 1],
            "acceptance_histogram_by_draft_length": {"3": [0, 1, 1, 1]},
            "num_spec_steps": 3,
            "num_accepted_draft_tokens": 6,
            "num_draft_tokens": 9,
            "num_spec_tokens": 10,
        }
        assert body["rapid"] == {
            "mode": "fused",
            "reason": "retrieval found evidence",
            "contract": "fused",
            "seed": 7,
            "date": "2026-01-31",
            "coupling": "shared_noise",
            "transfer": "boost",
            "eta": 10.0,
            "max_draft": 10,
            "plausibility": 0.1,
            "draft_top_k": 64,
            "transfer_temperature": 1.0,
            "rounds": 3,
            "plain_rounds": 0,
            "mean_draft_length": 3.0,
            "drafted": 9,
            "accepted": 6,
            "forced": 0,
            "bonus": 0,
            "refreshes": 0,
            "witness_tokens": 0,
            "is_fallback": False,
            "plain_from": [None],
            "failovers": [],
            "chunks": [{"id": "doc:0", "document": "notes", "score": 1.5, "start": 0, "end": 40}],
            "timings_ms": {"queue": 1.0, "retrieval": 2.0},
        }

    async def test_a_server_that_tags_responses_itself(self):
        app = Ingress(ScriptedOrchestrator(), ApiConfig(model=MODEL), sends_request_id=False)
        assert "x-request-id" not in (await post(app)).headers

    async def test_the_request_reaches_the_orchestrator(self):
        orchestrator = ScriptedOrchestrator()
        await post(
            ingress(orchestrator),
            ASK | {"n": 2, "seed": 3, "rapid": {"explain": "tokens", "draft_top_k": None}},
        )
        (request,) = orchestrator.requests
        assert (request.tenant, request.num_choices, request.seed) == ("local", 2, 3)
        assert request.explain
        assert request.speculation.all_draft_tokens
        assert not request.is_streamed

    async def test_the_orchestrator_gets_the_callers_id_which_may_come_twice(self):
        orchestrator = ScriptedOrchestrator()
        headers = {"x-request-id": "mine"}
        answers = [(await post(ingress(orchestrator), headers=headers)).json() for _ in range(2)]
        assert [each.request_id for each in orchestrator.requests] == ["mine"] * 2
        assert answers[0]["id"] != answers[1]["id"]

    async def test_the_log_has_no_word_of_a_request(self, caplog):
        app, mine = ingress(ScriptedOrchestrator()), {"x-request-id": "mine"}
        with caplog.at_level(logging.INFO, "deployments"):
            answer = (await post(app, headers=mine)).json()
            await post(app, ASK | {"model": "secret"}, headers=mine)
        assert caplog.messages == [
            f"request mine is answered as {answer['id']}",
            "request mine: ok",
            "request mine: refused",
            "request mine: 404 UnknownModel",
        ]

    async def test_several_choices_are_counted_apart(self):
        body = (await post(ingress(ScriptedOrchestrator()), ASK | {"n": 2})).json()
        assert [choice["index"] for choice in body["choices"]] == [0, 1]
        assert body["usage"]["completion_tokens"] == 16
        speculation = body["metrics"]["speculative_decoding"]
        assert speculation["num_spec_steps"] == 6
        assert [each["num_spec_steps"] for each in speculation["choices"]] == [3, 3]

    @pytest.mark.parametrize("lost", [(), (STARTED, 0.01, TextDelta(0, "Hel"), 0.01)])
    async def test_the_times_are_those_of_the_answer_that_is_given(self, lost):
        """A second passes with every step, also of an answer whose orchestrator is lost."""
        now = 0.0

        class Ticking(ScriptedOrchestrator):
            async def generate(self, request):
                nonlocal now
                async for event in super().generate(request):
                    now += 1
                    yield event

        end = (TextDelta(0, "lo", (), "stop"), 0.01, Finished(receipt()))
        script = (*lost, STARTED, 0.01, TextDelta(0, "Hel"), 0.01, *end)
        app = Ingress(Ticking(*script), ApiConfig(model=MODEL), clock=lambda: now)
        metrics = (await post(app)).json()["metrics"]
        begins = 4 if lost else 2
        assert metrics["time_to_first_token_ms"] == 1000 * begins
        assert metrics["generation_time_ms"] == 2000

    async def test_explain(self):
        body = await post(ingress(ScriptedOrchestrator()), ASK | {"rapid": {"explain": "tokens"}})
        assert body.json()["rapid"]["explain"] == {
            "target_prompt_ids": [1, 2],
            "drafter_prompt_ids": [3],
            "witness_prompt_ids": [6],
            "token_ids": [[4, 5]],
            "origins": [["drafted", "corrected"]],
            "tokens": [
                [
                    {
                        "text": "Hello", "writer": "drafted", "target": 0.25, "drafter": 0.5,
                        "sampled": 0.4, "passage": "c1", "is_thinking": False,
                    },
                    {
                        "text": "", "writer": "corrected", "target": 1.0, "drafter": 0.0,
                        "sampled": 1.0, "passage": None, "is_thinking": False,
                    },
                ]
            ],
            "truncated": False,
        }  # fmt: skip

    async def test_prompts_of_an_explained_answer_are_left_out_if_they_are_not_asked_for(self):
        orchestrator = ScriptedOrchestrator()
        for explain in ("tokens", "writers", "none"):
            await post(ingress(orchestrator), ASK | {"rapid": {"explain": explain}})
        asked = [(each.explain, each.explains_prompts) for each in orchestrator.requests]
        assert asked == [(True, True), (True, False), (False, True)]


class TestStream:
    async def test_order_of_events(self):
        asked = ASK | {"stream": True, "stream_options": {"include_usage": True}}
        response = await post(ingress(ScriptedOrchestrator()), asked)
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        *chunks, done = events(response)
        assert done == "[DONE]"
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
        assert len({chunk["id"] for chunk in chunks}) == 1
        *growing, usage = chunks
        choices = [chunk["choices"][0] for chunk in growing]
        assert [choice["delta"] for choice in choices] == [
            {"role": "assistant", "content": ""},
            {"content": "Hello"},
            {"content": ", wörld"},
            {"content": "!"},
        ]
        assert [choice["finish_reason"] for choice in choices] == [None, None, None, "stop"]
        assert [chunk["usage"] for chunk in growing] == [None] * 4
        assert [("rapid" in chunk) for chunk in chunks] == [False, False, False, True, False]
        assert usage["choices"] == []
        assert usage["usage"]["total_tokens"] == 108
        assert usage["metrics"]["speculative_decoding"]["num_spec_steps"] == 3

    async def test_the_receipt_is_on_the_last_end_of_several(self):
        orchestrator = ScriptedOrchestrator()
        response = await post(ingress(orchestrator), ASK | {"stream": True, "n": 2})
        assert orchestrator.requests[0].is_streamed
        *chunks, _ = events(response)
        assert "usage" not in chunks[0]
        ends = [chunk for chunk in chunks if chunk["choices"][0]["finish_reason"]]
        assert [chunk["choices"][0]["index"] for chunk in ends] == [0, 1]
        assert [("rapid" in chunk) for chunk in ends] == [False, True]

    async def test_silence_is_filled(self):
        script = (STARTED, 1.0, TextDelta(0, "a", (), "length"), Finished(receipt()))
        app = ingress(ScriptedOrchestrator(*script), heartbeat_s=0.02)
        response = await post(app, ASK | {"stream": True})
        assert response.text.count("\n\n\n\n") >= 1
        assert ":" not in events(response)
        response = await post(app, ASK | {"stream": True, "rapid": {"progress": True}})
        assert response.text.count("\n\n: ping\n\n") >= 1
        assert events(response)[-1] == "[DONE]"

    async def test_how_far_the_document_is_read_is_a_comment_for_who_asks(self):
        script = (STARTED, Reading(512, 4000), TextDelta(0, "a", (), "length"), Finished(receipt()))
        app = ingress(ScriptedOrchestrator(*script))
        response = await post(app, ASK | {"stream": True, "rapid": {"progress": True}})
        assert "\n\n: reading 512 of 4000 tokens\n\n" in response.text
        assert (await post(app)).json()["choices"][0]["message"]["content"] == "a"

    async def test_how_much_of_the_prompt_is_read_is_a_chunk_of_llama_cpp(self):
        started = replace(STARTED, prompt_tokens=4000)
        text = TextDelta(0, "a", (), "length")
        readings = (Reading(512, 4000, num_cached=500), Reading(4000, 4000, num_cached=510))
        app = ingress(ScriptedOrchestrator(started, *readings, text, Finished(receipt())))
        asked = events(await post(app, ASK | {"stream": True, "return_progress": True}))
        told = [each for each in asked[:-1] if "prompt_progress" in each]
        counts = [(each["prompt_progress"]["processed"], each["choices"]) for each in told]
        delta = {"role": "assistant", "content": None}
        choices = [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}]
        assert counts == [(0, choices), (512, choices), (4000, choices)]
        assert [each["prompt_progress"]["cache"] for each in told] == [0, 500, 510]
        for each in told:
            assert each["prompt_progress"].keys() == {"total", "cache", "processed", "time_ms"}
            assert each["prompt_progress"]["total"] == 4000
            assert each["rapid_event_id"] == asked[0]["rapid_event_id"]
        silent = events(await post(app, ASK | {"stream": True, "return_progress": False}))
        assert all("prompt_progress" not in each for each in silent)
        whole = await post(app, ASK | {"return_progress": True})
        assert (whole.status_code, whole.json()["error"]["param"]) == (400, "return_progress")

    async def test_a_stream_begins_while_documents_are_embedded(self):
        go_on = asyncio.Event()
        embedding = (Reading(0, 0, "passages"), Reading(412, 1130, "passages"))
        text = TextDelta(0, "a", (), "length")
        app = ingress(ScriptedOrchestrator(*embedding, go_on, STARTED, text, Finished(receipt())))
        async with served(app) as url, httpx.AsyncClient(base_url=url) as http:
            body = ASK | {"stream": True, "rapid": {"progress": True}}
            async with http.stream("POST", "/v1/chat/completions", json=body) as response:
                assert response.status_code == 200
                lines = response.aiter_lines()
                said = []
                while ": embedding passages 412 of 1,130" not in said:
                    said.append(await anext(lines))
                assert any('"role":"assistant"' in line for line in said)
                assert ": embedding passages" in said
                go_on.set()
                assert "data: [DONE]" in [line async for line in lines]

    async def test_what_is_refused_after_that_is_an_event_and_before_it_a_status(self):
        refused = PromptTooLong("Too long.", "max_tokens")
        body = ASK | {"stream": True, "max_completion_tokens": 9}
        late = await post(ingress(ScriptedOrchestrator(Reading(1, 2, "passages"), refused)), body)
        assert late.status_code == 200
        assert events(late)[-1]["error"]["param"] == "max_completion_tokens"
        assert (await post(ingress(ScriptedOrchestrator(refused)), body)).status_code == 400

    async def test_an_error_on_the_way_is_the_last_event(self):
        script = (STARTED, TextDelta(0, "Hel"), TargetUnavailable("The target was lost."))
        response = await post(ingress(ScriptedOrchestrator(*script)), ASK | {"stream": True})
        assert response.status_code == 200
        assert events(response)[-1]["error"]["message"] == "The target was lost."

    @pytest.mark.parametrize(
        ("error", "is_retryable"),
        [
            (TargetUnavailable("The target was lost."), True),
            (LeaseNotFound("The lease expired."), True),
            (Overloaded("Full."), True),
            (EngineFailed("a forward pass raised KeyError('secret')"), False),
            (OutOfStep("a block of secret"), False),
            (KeyError("secret"), False),
            (BadRequest("No.", "rapid.query"), False),
        ],
        ids=lambda value: type(value).__name__,
    )
    async def test_an_error_on_the_way_says_whether_to_ask_again_and_no_secrets(
        self, error, is_retryable, caplog
    ):
        app = ingress(ScriptedOrchestrator(STARTED, TextDelta(0, "Hel"), error))
        response = await post(app, ASK | {"stream": True})
        assert events(response)[-1]["error"]["retryable"] is is_retryable
        assert "secret" not in response.text
        assert ("secret" in caplog.text) == ("secret" in str(error))

    @pytest.mark.parametrize("error", [TimeoutError("inside"), ConnectionResetError("inside")])
    async def test_a_broken_connection_elsewhere_is_not_the_callers(self, error):
        script = (STARTED, TextDelta(0, "Hel"), error)
        response = await post(ingress(ScriptedOrchestrator(*script)), ASK | {"stream": True})
        assert events(response)[-1]["error"]["code"] == "internal_error"

    async def test_a_generation_that_is_cancelled_from_elsewhere_is_an_error(self):
        script = (STARTED, TextDelta(0, "Hel"), asyncio.CancelledError())
        for is_stream in (True, False):
            asked = ASK | {"stream": is_stream}
            request = post(ingress(ScriptedOrchestrator(*script)), asked)
            response = await asyncio.wait_for(request, 5)
            assert "engine_failed" in response.text

    async def test_an_answer_without_a_receipt_is_an_error(self):
        script = (STARTED, TextDelta(0, "Hello", (), "stop"))
        response = await post(ingress(ScriptedOrchestrator(*script)), ASK | {"stream": True})
        assert events(response)[-1]["error"]["code"] == "engine_failed"
        response = await post(ingress(ScriptedOrchestrator(*script)))
        assert response.status_code == 500


DOCUMENT = [{"name": "long", "text": "longer than the question"}]


@pytest.mark.parametrize("is_stream", [False, True])
class TestRefusal:
    @pytest.mark.parametrize(
        ("error", "status", "param", "code"),
        [
            (PromptTooLong("Too long by 5."), 400, "messages", "context_length_exceeded"),
            (BadRequest("No.", "rapid.query"), 400, "rapid.query", None),
            (Overloaded("Full.", 2.5), 503, None, "overloaded"),
            (DrafterUnavailable("No drafter."), 503, None, "drafter_unavailable"),
            (ValueError("secret"), 500, None, "internal_error"),
        ],
    )
    async def test_before_the_start_it_is_a_status(self, is_stream, error, status, param, code):
        app = ingress(ScriptedOrchestrator(error))
        response = await post(app, ASK | {"stream": is_stream})
        assert response.status_code == status
        body = response.json()["error"]
        assert (body["param"], body["code"]) == (param, code)
        assert body["retryable"] is (status == 503)
        assert "secret" not in response.text
        assert ("retry-after" in response.headers) == (status == 503)
        if isinstance(error, Overloaded):
            assert response.headers["retry-after"] == "3"

    @pytest.mark.parametrize(
        ("change", "param", "named"),
        [
            ({"max_tokens": 10}, "max_tokens", "max_tokens"),
            ({"max_completion_tokens": 10}, "max_tokens", "max_completion_tokens"),
            ({"max_completion_tokens": 10}, "messages", "messages"),
            ({"rapid": {"documents": DOCUMENT}}, "messages", "rapid.documents"),
            ({"rapid": {"documents": DOCUMENT}}, "n", "n"),
        ],
    )
    async def test_it_names_the_field_that_the_caller_wrote(self, is_stream, change, param, named):
        app = ingress(ScriptedOrchestrator(PromptTooLong("Too long.", param)))
        response = await post(app, ASK | change | {"stream": is_stream})
        assert response.json()["error"]["param"] == named


@pytest.mark.parametrize("is_stream", [False, True])
class TestLeaving:
    async def test_a_caller_who_leaves_gives_up_the_request(self, is_stream):
        orchestrator = ScriptedOrchestrator(STARTED, TextDelta(0, "Hel"), asyncio.Event())
        await self.ask_and_leave(orchestrator, is_stream)

    async def test_also_before_the_start(self, is_stream):
        await self.ask_and_leave(ScriptedOrchestrator(asyncio.Event()), is_stream)

    async def ask_and_leave(self, orchestrator, is_stream):
        async with served(ingress(orchestrator)) as url, httpx.AsyncClient(base_url=url) as http:
            asking = asyncio.create_task(http.post(CHAT, json=ASK | {"stream": is_stream}))
            await asyncio.wait_for(orchestrator.asked.wait(), 30)
            asking.cancel()  # which closes its connection
            await asyncio.wait_for(orchestrator.given_up.wait(), 30)

    async def test_a_cancelled_server_gives_up_the_request(self, is_stream):
        orchestrator = ScriptedOrchestrator(STARTED, TextDelta(0, "Hel"), asyncio.Event())
        task = asyncio.create_task(post(ingress(orchestrator), ASK | {"stream": is_stream}))
        await orchestrator.asked.wait()
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert orchestrator.given_up.is_set()


BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"model": 5}, "model"),
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": [{"role": "system", "content": "Hi"}]}, "messages"),
    ({"messages": [{"role": "tool", "content": "Hi"}]}, "messages[0]"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content",
    ),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": float("nan")}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": float("inf")}, "top_p"),
    ({"top_k": False}, "top_k"),
    ({"top_k": -2}, "top_k"),
    ({"priority": "first"}, "priority"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": "x" * 257}, "cache_salt"),
    ({"model": "x" * 257}, "model"),
    ({"top_k": 1.5}, "top_k"),
    ({"top_k": -1.0}, "top_k"),
    ({"seed": 2**63}, "seed"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
    ({"stop": [""]}, "stop[0]"),
    ({"stop": 5}, "stop"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens"),
    ({"n": 0}, "n"),
    ({"n": 9}, "n"),
    ({"logprobs": 1}, "logprobs"),
    ({"top_logprobs": 1}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"presence_penalty": False}, "presence_penalty"),
    ({"echo": 0}, "echo"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"min_tokens": 3, "max_tokens": 2}, "min_tokens"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids[0]"),
    ({"min_tokens": 3, "guided_regex": "a"}, "min_tokens"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"functions": [{}]}, "functions"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"rapid": "fused"}, "rapid"),
    ({"rapid": {"gamma": 5}}, "rapid.gamma"),
    ({"rapid": {"mode": "exact"}}, "rapid.mode"),
    ({"rapid": {"mode": "paper", "transfer": "boost"}}, "rapid.transfer"),
    ({"rapid": {"mode": "paper", "coupling": "shared_noise"}}, "rapid.coupling"),
    ({"rapid": {"mode": "paper", "draft_top_k": 64}}, "rapid.draft_top_k"),
    ({"rapid": {"transfer": "both"}}, "rapid.transfer"),
    ({"rapid": {"eta": -1}}, "rapid.eta"),
    ({"rapid": {"eta": float("nan")}}, "rapid.eta"),
    ({"rapid": {"max_draft": 65}}, "rapid.max_draft"),
    ({"rapid": {"coupling": 1}}, "rapid.coupling"),
    ({"rapid": {"plausibility": 2}}, "rapid.plausibility"),
    ({"rapid": {"draft_top_k": 0}}, "rapid.draft_top_k"),
    ({"rapid": {"retrieval_tokens": 0}}, "rapid.retrieval_tokens"),
    ({"rapid": {"query": " "}}, "rapid.query"),
    ({"rapid": {"query": "x" * 16_385}}, "rapid.query"),
    ({"rapid": {"date": 20260131}}, "rapid.date"),
    ({"rapid": {"date": "20260131"}}, "rapid.date"),
    ({"rapid": {"date": "2026-02-30"}}, "rapid.date"),
    ({"rapid": {"date": "31 Jan 2026"}}, "rapid.date"),
    ({"rapid": {"explain": True}}, "rapid.explain"),
    ({"rapid": {"documents": "text"}}, "rapid.documents"),
    ({"rapid": {"documents": [{"name": "a"}]}}, "rapid.documents[0].text"),
    ({"rapid": {"documents": [{"name": "a", "text": " "}]}}, "rapid.documents[0].text"),
    ({"rapid": {"documents": [{"name": "a\n", "text": "b"}]}}, "rapid.documents[0].name"),
    ({"rapid": {"documents": [{"name": "a", "text": "b", "c": 1}]}}, "rapid.documents[0].c"),
    ({"rapid": {"documents": [{"name": "a", "text": "b"}] * 2}}, "rapid.documents"),
]


class TestBadInput:
    @pytest.mark.parametrize(("change", "param"), BAD_FIELDS, ids=lambda value: str(value)[:60])
    async def test_a_bad_field_is_named(self, change, param):
        orchestrator = ScriptedOrchestrator()
        async with client(ingress(orchestrator)) as http:
            response = await http.post(
                CHAT,
                content=json.dumps(ASK | change),
                headers={"content-type": "application/json"},
            )
        assert response.status_code == 400
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code", "retryable"}
        assert (error["type"], error["param"]) == ("invalid_request_error", param)
        assert param in error["message"]
        assert not orchestrator.requests

    @pytest.mark.parametrize(
        ("content", "said"),
        [
            (b"\xff{}", "UTF-8"),
            (b"{", "not JSON"),
            (b"", "not JSON"),
            (b"[]", "object"),
            (b"[" * 100_000, "deeply"),
            (b'{"seed": ' + b"1" * 5000 + b"}", "digits"),
        ],
    )
    async def test_a_body_that_is_no_json_object(self, content, said):
        async with client(ingress(ScriptedOrchestrator())) as http:
            response = await http.post(
                CHAT, content=content, headers={"content-type": "application/json"}
            )
        assert response.status_code == 400
        assert said in response.json()["error"]["message"]

    async def test_a_form_is_no_json(self):
        async with client(ingress(ScriptedOrchestrator())) as http:
            response = await http.post(CHAT, content=json.dumps(ASK))
        assert response.status_code == 400
        assert "Content-Type" in response.json()["error"]["message"]

    async def test_unknown_fields_of_openai_are_ignored(self):
        change = {"user": "me", "metadata": {"a": "b"}, "store": False, "presence_penalty": 0.0}
        change |= {"echo": False, "logprobs": False, "top_logprobs": 0}
        assert (await post(ingress(ScriptedOrchestrator()), ASK | change)).status_code == 200

    async def test_an_unknown_key_gets_a_suggestion(self):
        response = await post(ingress(ScriptedOrchestrator()), ASK | {"rapid": {"max_drafts": 1}})
        assert "did you mean 'max_draft'" in response.json()["error"]["message"]

    async def test_an_unknown_model_is_not_found(self):
        response = await post(ingress(ScriptedOrchestrator()), ASK | {"model": "other"})
        assert response.status_code == 404
        error = response.json()["error"]
        assert (error["param"], error["code"]) == ("model", "model_not_found")

    @pytest.mark.parametrize("is_declared", [True, False])
    async def test_a_body_over_the_limit(self, is_declared):
        """Through a real server, which must not cut the client off before it reads the reason."""
        content = json.dumps(ASK | {"user": "x" * 3_000_000}).encode()

        async def parts() -> AsyncIterator[bytes]:
            yield content

        app = ingress(ScriptedOrchestrator(), max_body_bytes=1_000_000)
        async with served(app) as url, httpx.AsyncClient(base_url=url) as http:
            response = await http.post(
                CHAT,
                content=content if is_declared else parts(),
                headers={"content-type": "application/json"},
            )
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "request_too_large"


class TestRoutes:
    async def test_several_models(self):
        cards = {"small": ModelCard(default_temperature=0.0), "large": ModelCard(max_model_len=9)}
        orchestrator = ScriptedOrchestrator()
        app = Ingress(orchestrator, ApiConfig(models=cards))
        async with client(app) as http:
            listed = (await http.get("/v1/models")).json()["data"]
            assert [card["id"] for card in listed] == ["small", "large"]
            assert (await http.get("/v1/models/large")).json() == listed[1]
            assert (await http.get("/v1/models/medium")).status_code == 404
        assert [card.get("max_model_len") for card in listed] == [None, 9]
        for model in cards:
            assert (await post(app, ASK | {"model": model})).json()["model"] == model
        asked = [(each.model, each.temperature) for each in orchestrator.requests]
        assert asked == [("small", 0.0), ("large", 1.0)]
        unknown = (await post(app, ASK | {"model": "medium"})).json()["error"]
        assert unknown["code"] == "model_not_found"
        assert unknown["message"].endswith("this server has 'small', 'large'.")

    async def test_models(self):
        async with client(ingress(ScriptedOrchestrator())) as http:
            (card,) = (await http.get("/v1/models")).json()["data"]
            assert (await http.get(f"/v1/models/{MODEL}")).json() == card
            assert (card["id"], card["object"]) == (MODEL, "model")
            limits = {"max_body_bytes": 16 * 2**20, "max_documents": 1024}
            assert card["rapid"] == {"embedded": False} | limits
            assert "max_model_len" not in card
            missing = await http.get("/v1/models/org/other")
        assert missing.status_code == 404
        assert missing.json()["error"]["code"] == "model_not_found"

    async def test_a_path_may_end_with_a_slash(self):
        async with client(ingress(ScriptedOrchestrator())) as http:
            for path in ("/v1/models", f"/v1/models/{MODEL}", "/ready"):
                assert (await http.get(f"{path}/")).json() == (await http.get(path)).json()
            assert (await http.post(f"{CHAT}/", json=ASK)).status_code == 200
            assert (await http.get("/nothing/")).status_code == 404

    async def test_an_answer_after_its_deadline_is_of_no_use(self):
        never = ScriptedOrchestrator(STARTED, asyncio.Event())
        async with client(ingress(never)) as http:
            late = await http.post(CHAT, json=ASK, headers={"x-request-deadline": "0"})
            wrong = await http.post(CHAT, json=ASK, headers={"x-request-deadline": "soon"})
        error = late.json()["error"]
        assert (late.status_code, error["code"]) == (504, "deadline_passed")
        assert late.headers["x-should-retry"] == "false"
        assert not error["retryable"]
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "x-request-deadline")
        assert never.given_up.is_set()

    async def test_the_card_tells_the_context_that_is_configured(self):
        limits = {"max_model_len": 4096, "max_characters": 9000}
        async with client(ingress(ScriptedOrchestrator(), **limits)) as http:
            (card,) = (await http.get("/v1/models")).json()["data"]
        assert card["max_model_len"] == 4096
        assert card["rapid"]["max_characters"] == 9000

    async def test_chats_take_a_limited_number_of_slots_and_leave_the_rest_to_others(self):
        """A stream keeps its slot to its end, and a refusal takes none."""
        go_on = asyncio.Event()
        script = (STARTED, TextDelta(0, "a"), go_on, TextDelta(0, "", (), "stop"))
        orchestrator = ScriptedOrchestrator(*script, Finished(receipt()))
        app = ingress(orchestrator, pool=RequestPoolConfig(max_ongoing_requests=3))
        async with served(app) as url, httpx.AsyncClient(base_url=url, timeout=30) as http:
            streamed = asyncio.create_task(http.post(CHAT, json=ASK | {"stream": True}))
            whole = asyncio.create_task(http.post(CHAT, json=ASK))
            while len(orchestrator.requests) < 2:  # noqa: ASYNC110 (two of the same event)
                await asyncio.sleep(0.01)
            refused = [await http.post(CHAT, json=ASK) for _ in range(3)]
            for path in ("/ready", "/health", "/v1/models"):
                assert (await http.get(path)).status_code == 200
            go_on.set()
            assert [(await each).status_code for each in (streamed, whole)] == [200, 200]
            assert (await http.post(CHAT, json=ASK)).status_code == 200
        for response in refused:
            assert response.status_code == 429
            assert response.headers["retry-after"] == "1"

    async def test_ready(self):
        orchestrator = ScriptedOrchestrator()
        async with client(ingress(orchestrator)) as http:
            assert (await http.get("/ready")).json() == orchestrator.state
            orchestrator.state = {"ready": False, "pools": {"target": {"replicas": 0}}}
            not_yet = await http.get("/ready")
            orchestrator.state = RuntimeError("lost")
            failed = await http.get("/ready")
            assert (await http.get("/health")).status_code == 200
        assert not_yet.status_code == 503
        assert not_yet.json()["pools"] == {"target": {"replicas": 0}}
        assert not_yet.headers["retry-after"] == "1"
        assert failed.status_code == 503
        assert failed.json()["error"]["code"] == "target_unavailable"

    @pytest.mark.parametrize(
        ("method", "path", "status"),
        [
            ("GET", "/nothing", 404),
            ("GET", "/v1/files", 404),
            ("POST", "/v1/moderations", 404),
            ("GET", CHAT, 405),
            ("DELETE", "/v1/models", 405),
            ("POST", "/health", 405),
        ],
    )
    async def test_other_routes_answer_in_the_same_form(self, method, path, status):
        async with client(ingress(ScriptedOrchestrator())) as http:
            response = await http.request(method, path)
        assert response.status_code == status
        assert response.json()["error"]["type"] == "invalid_request_error"
        assert "x-request-id" in response.headers
        assert int(response.headers["openai-processing-ms"]) >= 0
        assert ("allow" in response.headers) == (status == 405)


class TestKeys:
    KEYS = (ApiKey(tenant="acme", sha256=hash_key("sk-1")),)

    @pytest.mark.parametrize(
        ("path", "headers"),
        [
            (path, headers)
            for path in (CHAT, "/v1/models", f"/v1/models/{MODEL}", "/ready")
            for headers in ({}, {"authorization": "Bearer sk-2"})
            if (path, headers) != ("/ready", {})  # which every prober may ask
        ],
    )
    async def test_no_key_no_answer(self, path, headers):
        orchestrator = ScriptedOrchestrator()
        async with client(ingress(orchestrator, keys=self.KEYS)) as http:
            method = "POST" if path == CHAT else "GET"
            response = await http.request(method, path, headers=headers, json=ASK)
        assert response.status_code == 401
        assert response.json()["error"]["code"] == "invalid_api_key"
        assert not orchestrator.requests

    async def test_a_key_is_a_tenant(self):
        orchestrator = ScriptedOrchestrator()
        app = ingress(orchestrator, keys=self.KEYS)
        response = await post(app, headers={"authorization": "Bearer sk-1"})
        assert response.status_code == 200
        assert orchestrator.requests[0].tenant == "acme"

    @pytest.mark.parametrize("is_ready", [True, False])
    async def test_only_an_operator_sees_more_than_whether_it_is_ready(self, is_ready):
        operator = ApiKey(tenant="ops", sha256=hash_key("sk-op"), operator=True)
        orchestrator = ScriptedOrchestrator()
        orchestrator.state = {"ready": is_ready, "pools": {"target": {"replicas": 2}}}
        app = ingress(orchestrator, keys=(*self.KEYS, operator))
        async with client(app) as http:
            for key, shown in (
                (None, {"ready": is_ready}),
                ("sk-1", {"ready": is_ready}),
                ("sk-op", orchestrator.state),
            ):
                headers = {"authorization": f"Bearer {key}"} if key else {}
                response = await http.get("/ready", headers=headers)
                assert response.json() == shown
                assert response.status_code == (200 if is_ready else 503)

    async def test_without_keys_others_see_only_whether_it_is_ready(self):
        transport = httpx.ASGITransport(ingress(ScriptedOrchestrator()), client=("10.0.0.7", 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
            assert (await http.get("/ready")).json() == {"ready": True}

    async def test_health_needs_none(self):
        async with client(ingress(ScriptedOrchestrator(), keys=self.KEYS)) as http:
            assert (await http.get("/health")).status_code == 200

    async def test_without_keys_others_are_refused(self):
        transport = httpx.ASGITransport(ingress(ScriptedOrchestrator()), client=("10.0.0.7", 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
            assert (await http.post(CHAT, json=ASK)).status_code == 401


class TestOpenAISDK:
    @pytest.fixture
    async def sdk(self) -> AsyncIterator[openai.AsyncOpenAI]:
        async with (
            served(ingress(ScriptedOrchestrator())) as url,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="local", max_retries=0) as sdk,
        ):
            yield sdk

    async def test_whole(self, sdk):
        answer = await sdk.chat.completions.create(
            **ASK, n=2, logprobs=True, top_logprobs=2, extra_body={"rapid": {"mode": "fused"}}
        )
        assert [choice.message.content for choice in answer.choices] == ["Hello, wörld!"] * 2
        tokens = answer.choices[0].logprobs.content
        assert [token.token for token in tokens] == ["Hello", ", wörld", "!"]
        assert bytes(tokens[1].bytes).decode() == ", wörld"
        assert [top.token for top in tokens[0].top_logprobs] == ["Hello", "other"]
        assert answer.usage.prompt_tokens_details.cached_tokens == 0
        assert answer.rapid["contract"] == "fused"

    async def test_a_bias_of_logits_arrives(self):
        orchestrator = ScriptedOrchestrator()
        transport = httpx.ASGITransport(ingress(orchestrator), client=("127.0.0.1", 1))
        async with (
            httpx.AsyncClient(transport=transport) as http,
            openai.AsyncOpenAI(
                base_url="http://127.0.0.1/v1", api_key="local", http_client=http
            ) as sdk,
        ):
            await sdk.chat.completions.create(**ASK, logit_bias={"50256": -100})
        assert orchestrator.requests[-1].logit_bias == ((50256, -100.0),)

    async def test_streamed(self, sdk):
        stream = await sdk.chat.completions.create(
            **ASK, stream=True, logprobs=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == "Hello, wörld!"
        assert chunks[1].choices[0].logprobs.content[0].token == "Hello"
        assert chunks[-2].rapid["accepted"] == 6
        assert chunks[-1].usage.total_tokens == 108

    async def test_comments_between_the_chunks_are_not_seen(self):
        script = (STARTED, Reading(512, 4000), TextDelta(0, "a", (), "stop"), Finished(receipt()))
        async with (
            served(ingress(ScriptedOrchestrator(*script))) as url,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="local", max_retries=0) as sdk,
        ):
            for extra in ({}, {"rapid": {"progress": True}}):
                stream = await sdk.chat.completions.create(**ASK, stream=True, extra_body=extra)
                chunks = [chunk async for chunk in stream]
                assert [chunk.choices[0].delta.content for chunk in chunks] == ["", "a"]

    async def test_models(self, sdk):
        assert [model.id async for model in sdk.models.list()] == [MODEL]

    async def test_errors_have_types(self, sdk):
        with pytest.raises(openai.BadRequestError) as bad:
            await sdk.chat.completions.create(**ASK, temperature=3)
        assert bad.value.param == "temperature"
        with pytest.raises(openai.NotFoundError) as missing:
            await sdk.chat.completions.create(**(ASK | {"model": "other"}))
        assert missing.value.code == "model_not_found"

    async def test_errors_on_the_way_are_raised(self):
        script = (STARTED, TextDelta(0, "Hel"), TargetUnavailable("The target was lost."))
        async with (
            served(ingress(ScriptedOrchestrator(*script))) as url,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="local", max_retries=0) as sdk,
        ):
            stream = await sdk.chat.completions.create(**ASK, stream=True)
            with pytest.raises(openai.APIError, match="The target was lost") as lost:
                _ = [chunk async for chunk in stream]
            assert lost.value.body["retryable"] is True

    async def test_typed_refusals(self):
        keys = (ApiKey(tenant="acme", sha256=hash_key("sk-1")),)
        async with served(ingress(ScriptedOrchestrator(Overloaded("Full.")), keys=keys)) as url:
            for key, error in (
                ("sk-2", openai.AuthenticationError),
                ("sk-1", openai.APIStatusError),
            ):
                async with openai.AsyncOpenAI(
                    base_url=f"{url}/v1", api_key=key, max_retries=0
                ) as sdk:
                    with pytest.raises(error) as refused:
                        await sdk.chat.completions.create(**ASK)
            assert refused.value.status_code == 503

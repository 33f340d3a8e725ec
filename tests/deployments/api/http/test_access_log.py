"""The line of each request, and what it is counted as."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.api.http.access_log import CAUSES, cause_of
from deployments.api.ingress import Ingress
from deployments.config.api_config import ApiConfig, ApiKey, ModelCard
from deployments.config.tenants import hash_key
from rapid import errors
from rapid.events import Finished, TextDelta
from tests.deployments.scripted import STARTED, ScriptedOrchestrator, receipt
from tests.deployments.serving import served

PAGE = Path(__file__).parents[4] / "docs/operations.md"
KEY, WORD = "sk-secret", "zebra"
CONFIG = ApiConfig(model="m", keys=(ApiKey(tenant="acme", sha256=hash_key(KEY)),))
ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": WORD}]}
TIMES = {"queue": 20.04, "retrieval": 30.0, "target_prefill": 400.0, "draft": 5.0, "verify": 6.0}
ANSWER = (STARTED, TextDelta(0, "Hi", (), "stop"), Finished(replace(receipt(), timings_ms=TIMES)))


class Counts:
    """Stands for the metrics of an ingress."""

    def __init__(self) -> None:
        self.ends: list[tuple[str, str]] = []
        self.waits: list[float] = []
        self.models: list[str | None] = []

    def count_end(self, outcome: str, cause: str, model: str | None = None) -> None:
        self.ends.append((outcome, cause))
        self.models.append(model)

    def observe_wait(self, seconds: float, model: str | None = None) -> None:
        self.waits.append(seconds)


class Door:
    """An ingress over a script, on a clock that goes on by a second with every event."""

    def __init__(self, *script: Any, config: ApiConfig = CONFIG) -> None:
        self.now, self.counts = 0.0, Counts()
        door = self

        class Ticking(ScriptedOrchestrator):
            async def generate(self, request: Any) -> AsyncIterator[Any]:  # type: ignore[override]
                async for event in super().generate(request):
                    door.now += 1
                    yield event

        self.app = Ingress(
            Ticking(*script),
            config,
            metrics=self.counts,  # type: ignore[arg-type]
            clock=lambda: self.now,
        )

    async def ask(self, key: str = KEY, route: str = "chat/completions", **body: Any) -> int:
        transport = httpx.ASGITransport(self.app)
        headers = {"authorization": f"Bearer {key}", "x-request-id": "mine"}
        async with httpx.AsyncClient(transport=transport, base_url="http://10.0.0.1") as http:
            response = await http.post(f"/v1/{route}", json=ASK | body, headers=headers)
        return response.status_code


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """The fields of the lines, without those of any line."""
    usual = logging.makeLogRecord({}).__dict__.keys() | {"message", "asctime"}
    found = [r for r in caplog.records if r.name == "deployments.api.http.access_log"]
    for each in found:
        text = json.dumps(each.__dict__, default=str)
        assert KEY not in text
        assert hash_key(KEY) not in text
        assert WORD not in text
    return [{k: v for k, v in each.__dict__.items() if k not in usual} for each in found]


@pytest.fixture(autouse=True)
def _all_levels(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


async def test_of_several_models_the_line_and_the_count_name_the_one_that_is_asked(
    caplog: pytest.LogCaptureFixture,
) -> None:
    models = {"m": ModelCard(), "other": ModelCard()}
    door = Door(*ANSWER, config=ApiConfig(keys=CONFIG.keys, models=models))
    assert await door.ask(model="other") == 200
    assert await door.ask(model="unknown") == 404
    known, unknown = lines(caplog)
    assert known["model"] == "other"
    assert "model" not in unknown
    assert door.counts.models == ["other", None]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_s_line_has_its_tokens_and_stages(
    stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    door = Door(*ANSWER)
    assert await door.ask(stream=stream) == 200
    (line,) = lines(caplog)
    assert line == {
        "request_id": "mine",
        "serve_access_log": True,
        "tenant": "acme",
        "key_id": f"configured-{hash_key(KEY)[:8]}",
        "model": "m",
        "outcome": "ok",
        "mode": "fused",
        "prompt_tokens": 100,
        "completion_tokens": 8,
        "queue_ms": 20.0,
        "retrieval_ms": 30.0,
        "target_prefill_ms": 400.0,
        "draft_ms": 5.0,
        "verify_ms": 6.0,
        "admission_ms": 0.0,
        "first_text_ms": 2000.0,
        "total_ms": 3000.0,
    }
    assert (door.counts.ends, door.counts.waits) == ([("ok", "")], [0.0])


@pytest.mark.parametrize(
    ("error", "outcome", "cause"),
    [
        (errors.BadRequest("no"), "refused", "bad request"),
        (errors.PromptTooLong("no"), "refused", "prompt too long"),
        (errors.Overloaded("no", 1.0), "refused", "server full"),
        (errors.TargetHangs("no"), "refused", "no target"),
        (errors.EngineFailed("no"), "failed", "engine failed"),
        (KeyError(WORD), "failed", "other"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_s_line_names_its_cause(
    error: Exception, outcome: str, cause: str, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    door = Door(error)
    assert await door.ask(stream=stream) >= 400
    (line,) = lines(caplog)
    assert (line["tenant"], line["outcome"], line["cause"]) == ("acme", outcome, cause)
    assert "prompt_tokens" not in line
    assert door.counts.ends == [(outcome, cause)]


async def test_what_is_refused_before_it_is_read_has_a_line_too(
    caplog: pytest.LogCaptureFixture,
) -> None:
    door = Door(*ANSWER)
    assert await door.ask(model="another") == 404
    assert await door.ask(n=0) == 400
    assert await door.ask(key="sk-guess") == 401
    found = [(line.get("tenant"), line["outcome"], line["cause"]) for line in lines(caplog)]
    assert found == [
        ("acme", "refused", "unknown model"),
        ("acme", "refused", "bad request"),
        (None, "refused", "no valid key"),
    ]
    assert door.counts.ends == [each[1:] for each in found]


async def test_who_finds_no_place_is_counted_with_its_wait(
    caplog: pytest.LogCaptureFixture,
) -> None:
    may_end = asyncio.Event()
    config = CONFIG.model_copy(update={"max_requests_per_tenant": 1})
    door = Door(STARTED, may_end, *ANSWER[1:], config=config)
    door.app._admission._wait_s = 0.0
    first = asyncio.create_task(door.ask())
    await door.app._service.asked.wait()  # type: ignore[attr-defined]
    assert await door.ask() == 429
    may_end.set()
    assert await first == 200
    assert [line["outcome"] for line in lines(caplog)] == ["refused", "ok"]
    assert door.counts.ends == [("refused", "tenant has its share"), ("ok", "")]
    assert len(door.counts.waits) == 2


async def test_an_answer_that_breaks_off_has_failed(caplog: pytest.LogCaptureFixture) -> None:
    door = Door(STARTED, TextDelta(0, "Hi"), errors.TargetUnavailable("gone"))
    assert await door.ask(stream=True) == 200
    (line,) = lines(caplog)
    assert (line["outcome"], line["cause"], line["mode"]) == ("failed", "no target", "fused")
    assert line["first_text_ms"] == 2000.0


@pytest.mark.parametrize("stream", [False, True])
async def test_who_leaves_is_no_failure(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    never = asyncio.Event()
    door = Door(STARTED, TextDelta(0, "Hi"), never)
    async with served(door.app) as url, httpx.AsyncClient(timeout=60.0) as http:
        headers = {"authorization": f"Bearer {KEY}"}
        url = f"{url}/v1/chat/completions"
        request = http.build_request("POST", url, json=ASK | {"stream": stream}, headers=headers)
        sending = asyncio.create_task(http.send(request, stream=True))
        await door.app._service.asked.wait()  # type: ignore[attr-defined]
        if stream:
            await (await sending).aclose()
        sending.cancel()
        await door.app._service.given_up.wait()  # type: ignore[attr-defined]
    (line,) = lines(caplog)
    assert line["outcome"] == "left"
    assert door.counts.ends == [("left", "")]


def test_the_causes_are_a_closed_set_that_the_page_lists() -> None:
    kinds = [each for each in vars(errors).values() if isinstance(each, type)]
    assert {cause_of(kind("x")) for kind in kinds} <= CAUSES
    assert cause_of(ValueError(WORD)) == "other"
    (row,) = [line for line in PAGE.read_text().splitlines() if "`request_end_total` |" in line]
    assert set(re.findall(r"`([a-z ]+)`", row)) >= CAUSES

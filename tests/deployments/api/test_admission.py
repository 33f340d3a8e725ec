"""Places for chat requests, by hand and through the API of a scripted orchestrator."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from deployments.api.admission import Admission
from deployments.api.ingress import Ingress
from deployments.config.serve_config import ApiConfig, ApiKey
from deployments.config.tenants import hash_key
from rapid.errors import Overloaded, TooManyRequests
from rapid.messages import Finished, GenerateRequest, GenerationEvent, TextDelta
from tests.deployments.scripted import STARTED, ScriptedOrchestrator, receipt
from tests.deployments.serving import served

CHAT = "/v1/chat/completions"
ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
CROWD, GUEST = {"authorization": "Bearer sk-crowd"}, {"authorization": "Bearer sk-guest"}
KEYS = tuple(ApiKey(tenant=name, sha256=hash_key(f"sk-{name}")) for name in ("crowd", "guest"))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class TestPlaces:
    def test_a_tenant_is_refused_while_there_is_room_for_others(self) -> None:
        clock = Clock()
        admission = Admission(clock=clock)
        admission.limit(4, 2)
        with admission.place("crowd"):
            clock.now = 30.0
        with admission.place("crowd"), admission.place("crowd"), admission.place("guest"):
            with pytest.raises(TooManyRequests) as refused, admission.place("crowd"):
                pass
            assert refused.value.retry_after_s == 15.0  # two places, each held for 30 s
            with admission.place("guest"):
                with pytest.raises(Overloaded, match="busy") as full, admission.place("third"):
                    pass
                assert type(full.value) is Overloaded
                assert full.value.retry_after_s == 7.5

    def test_a_crowd_is_told_one_place_after_the_other(self) -> None:
        """Two places, each held for 10 s: one becomes free every 5 s."""
        clock = Clock()
        admission = Admission(clock=clock)
        admission.limit(2, 2)

        def told() -> float | None:
            with pytest.raises(TooManyRequests) as refused, admission.place("crowd"):
                pass
            return refused.value.retry_after_s

        with admission.place("crowd"):
            clock.now = 10.0
        with admission.place("crowd"), admission.place("crowd"):
            assert [told() for _ in range(3)] == [5.0, 10.0, 15.0]
            clock.now = 16.0  # the first has come back, and is the third now
            assert told() == 15.0
            assert [told() for _ in range(20)][-1] == 60.0  # the longest wait that clients follow

    def test_limits_may_change_while_places_are_held(self) -> None:
        admission = Admission()
        admission.limit(4, 2)
        with admission.place("crowd"), admission.place("crowd"):
            admission.limit(4, 1)
            with pytest.raises(TooManyRequests), admission.place("crowd"):
                pass
            admission.limit(4, 3)
            with admission.place("crowd"):
                pass

    def test_a_place_is_given_back_however_the_request_ends(self) -> None:
        admission = Admission()
        admission.limit(1, 1)
        with pytest.raises(ZeroDivisionError), admission.place("crowd"):
            raise ZeroDivisionError
        with ExitStack() as stack:
            stack.enter_context(admission.place("crowd"))
        with admission.place("guest"):
            pass
        assert admission.next_place_s() is None


@pytest.mark.parametrize(("keys", "are_shared"), [(KEYS, True), (KEYS[:1], False), ((), False)])
def test_one_tenant_shares_with_nobody(keys: tuple[ApiKey, ...], are_shared: bool) -> None:
    app = Ingress(ScriptedOrchestrator(), ApiConfig(model="m", keys=keys, shared_requests=4))
    assert app.shares.are_shared == are_shared


class Busy:
    """Answers that end when they are told; counts those in progress by tenant."""

    def __init__(self) -> None:
        self.in_progress: list[str] = []
        self.changed = asyncio.Condition()
        self.go = asyncio.Event()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerationEvent]:
        self.in_progress.append(request.tenant)
        await self._tell()
        try:
            yield STARTED
            if request.tenant == "crowd":
                await self.go.wait()
            yield TextDelta(0, "Hello", (), "stop")
            yield Finished(receipt())
        finally:
            self.in_progress.remove(request.tenant)
            await self._tell()

    async def ready(self) -> dict[str, Any]:
        return {"ready": True}

    async def until(self, number: int) -> None:
        """Wait until so many answers are in progress."""
        async with asyncio.timeout(30), self.changed:
            await self.changed.wait_for(lambda: len(self.in_progress) == number)

    async def _tell(self) -> None:
        async with self.changed:
            self.changed.notify_all()


def client(app: Ingress) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1")


def app_of(service: Any, **config: Any) -> Ingress:
    return Ingress(service, ApiConfig(model="m", keys=KEYS, **config))


class TestCrowd:
    @pytest.mark.parametrize("is_streamed", [True, False])
    async def test_150_clients_of_one_tenant_leave_another_its_place(
        self, is_streamed: bool
    ) -> None:
        busy = Busy()
        app = app_of(busy, max_requests_per_tenant=12)
        asked = ASK | {"stream": is_streamed}
        async with client(app) as http:
            crowd = [
                asyncio.create_task(http.post(CHAT, json=asked, headers=CROWD)) for _ in range(150)
            ]
            await busy.until(12)
            answered = await http.post(CHAT, json=asked, headers=GUEST)
            assert answered.status_code == 200
            assert busy.in_progress == ["crowd"] * 12
            busy.go.set()
            replies = await asyncio.gather(*crowd)
            again = await http.post(CHAT, json=asked, headers=CROWD)
        assert again.status_code == 200
        refused = [reply for reply in replies if reply.status_code != 200]
        assert len(refused) == 138
        for reply in refused:
            assert reply.status_code == 429
            assert int(reply.headers["retry-after"]) >= 1
            error = reply.json()["error"]
            assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
            assert (error["param"], error["retryable"]) == (None, True)
            assert "crowd" not in reply.text

    async def test_a_full_ingress_refuses_everybody_and_answers_its_other_routes(self) -> None:
        busy = Busy()
        app = app_of(busy, pool={"max_ongoing_requests": 4})
        async with client(app) as http:
            crowd = [
                asyncio.create_task(http.post(CHAT, json=ASK, headers=CROWD)) for _ in range(3)
            ]
            await busy.until(3)
            refused = await http.post(CHAT, json=ASK, headers=GUEST)
            models = await http.get("/v1/models", headers=GUEST)
            busy.go.set()
            await asyncio.gather(*crowd)
        assert (refused.status_code, models.status_code) == (503, 200)
        assert refused.json()["error"]["code"] == "overloaded"
        assert "retry-after" in refused.headers

    async def test_who_leaves_gives_up_its_place(self) -> None:
        busy = Busy()
        app = app_of(busy, max_requests_per_tenant=1)
        async with served(app) as url, httpx.AsyncClient(base_url=url) as http:
            with pytest.raises(httpx.ReadTimeout):
                await http.post(CHAT, json=ASK, headers=CROWD, timeout=0.5)
            await busy.until(0)
            busy.go.set()
            assert (await http.post(CHAT, json=ASK, headers=CROWD)).status_code == 200

    async def test_a_bad_body_gives_up_its_place(self) -> None:
        app = app_of(ScriptedOrchestrator(), max_requests_per_tenant=1)
        async with client(app) as http:
            for _ in range(2):
                assert (await http.post(CHAT, json={}, headers=CROWD)).status_code == 400
            assert (await http.post(CHAT, json=ASK, headers=CROWD)).status_code == 200

    async def test_a_refusal_reaches_who_sends_a_long_body(self) -> None:
        """Through a real server, which must not cut the client off before it reads the reason."""
        busy = Busy()
        app = app_of(busy, max_requests_per_tenant=1)
        async with served(app) as url, httpx.AsyncClient(base_url=url) as http:
            first = asyncio.create_task(http.post(CHAT, json=ASK, headers=CROWD))
            await busy.until(1)
            long = ASK | {"user": "x" * 3_000_000}
            assert (await http.post(CHAT, json=long, headers=CROWD)).status_code == 429
            busy.go.set()
            assert (await first).status_code == 200

    async def test_a_refusal_from_behind_says_when_by_the_pace_here(self) -> None:
        """A queue of Ray Serve is full; how long answers take is known at the door."""
        clock = Clock()

        class Slow(ScriptedOrchestrator):
            async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerationEvent]:
                clock.now += 20.0
                async for event in super().generate(request):
                    yield event

        service = Slow()
        app = Ingress(service, ApiConfig(model="m", keys=KEYS), clock=clock)
        async with client(app) as http:
            await http.post(CHAT, json=ASK, headers=CROWD)
            service.script = (Overloaded("The server is busy."),)
            refused = await http.post(CHAT, json=ASK, headers=CROWD)
            service.script = (Overloaded("The pool is full.", 3.5),)
            measured = await http.post(CHAT, json=ASK, headers=CROWD)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "20")
        assert measured.headers["retry-after"] == "4"


class TestBodies:
    """The bodies with which one caller stopped an orchestrator; none of them reaches one."""

    async def test_forty_thousand_system_messages(self) -> None:
        crowd = [{"role": "system", "content": "a"}] * 40_000
        body = ASK | {"messages": [*crowd, *ASK["messages"]], "rapid": {"mode": "rag"}}
        content = json.dumps(body)
        assert len(content) > 1_400_000
        orchestrator = ScriptedOrchestrator()
        async with client(app_of(orchestrator)) as http:
            replies = await asyncio.gather(
                *(
                    http.post(
                        CHAT, content=content, headers=CROWD | {"content-type": "application/json"}
                    )
                    for _ in range(8)
                )
            )
        assert [reply.status_code for reply in replies] == [400] * 8
        error = replies[0].json()["error"]
        assert error["param"] == "messages"
        assert error["message"] == "messages has 40001 entries, and this server takes 2048 at most"
        assert not orchestrator.requests

    @pytest.mark.parametrize(
        ("change", "param"),
        [
            ({"messages": [{"role": "user", "content": "a" * 4_000_000}]}, "messages"),
            (
                {"rapid": {"documents": [{"name": "a", "text": "a" * 4_000_000}]}},
                "rapid.documents",
            ),
        ],
    )
    async def test_four_megabytes_for_a_short_context(
        self, change: dict[str, Any], param: str
    ) -> None:
        orchestrator = ScriptedOrchestrator()
        async with client(app_of(orchestrator, max_characters=2**20)) as http:
            reply = await http.post(CHAT, json=ASK | change, headers=GUEST)
        assert reply.status_code == 400
        error = reply.json()["error"]
        assert (error["param"], error["code"]) == (param, "context_length_exceeded")
        assert "4000002 characters" in error["message"] or "4000000 characters" in error["message"]
        assert not orchestrator.requests

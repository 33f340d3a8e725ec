"""Places for chat requests, by hand and through the API of a scripted orchestrator."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import openai
import pytest

from deployments.api.gate.admission import Admission, Ticket, Usage
from deployments.api.ingress import Ingress
from deployments.config.api_config import ApiConfig, ApiKey
from deployments.config.tenants import hash_key
from library.accounts.books import Accounts
from library.storage.database import Database
from rapid.errors import LibraryUnavailable, Overloaded, TooManyRequests
from rapid.events import Finished, GenerationEvent, TextDelta
from rapid.messages import GenerateRequest
from tests.deployments.scripted import STARTED, Generator, ScriptedOrchestrator, receipt
from tests.deployments.serving import served
from tests.virtual_time import VirtualLoop, virtual_loop

__all__ = ["virtual_loop"]

CHAT = "/v1/chat/completions"
ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
CROWD, GUEST = {"authorization": "Bearer sk-crowd"}, {"authorization": "Bearer sk-guest"}
KEYS = tuple(ApiKey(tenant=name, sha256=hash_key(f"sk-{name}")) for name in ("crowd", "guest"))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def places(
    most: int, most_per_tenant: int, wait_s: float = 0.0, shared: int | None = None
) -> tuple[Admission, Clock]:
    clock = Clock()
    admission = Admission(clock=clock, wait_s=wait_s)
    admission.limit(most, most_per_tenant, shared)
    return admission, clock


async def pass_through(admission: Admission, tenant: str) -> None:
    async with admission.place(tenant):
        pass


async def refused(admission: Admission, tenant: str) -> Overloaded:
    with pytest.raises(Overloaded) as refusal:
        await pass_through(admission, tenant)
    return refusal.value


class TestPlaces:
    async def test_a_ticket_is_settled_once_the_answer_is_complete(self, monkeypatch) -> None:
        tickets = []
        init = Ticket.__init__
        monkeypatch.setattr(Ticket, "__init__", lambda self: tickets.append(self) or init(self))
        app = Ingress(ScriptedOrchestrator(), ApiConfig(model="m"))
        async with served(app) as url, httpx.AsyncClient(base_url=url) as http:
            usage = (await http.post(CHAT, json=ASK)).json()["usage"]
        (ticket,) = tickets
        assert ticket.usage == Usage(usage["prompt_tokens"], usage["completion_tokens"])

    async def test_a_tenant_is_refused_while_there_is_room_for_others(self) -> None:
        admission, clock = places(4, 2)
        async with admission.place("crowd"):
            clock.now = 30.0
        async with admission.place("crowd"), admission.place("crowd"), admission.place("guest"):
            refusal = await refused(admission, "crowd")
            assert type(refusal) is TooManyRequests
            assert refusal.retry_after_s == 15.0  # two places, each held for 30 s
            async with admission.place("guest"):
                full = await refused(admission, "third")
                assert (type(full), str(full)) == (Overloaded, "The server is busy.")
                assert full.retry_after_s == 7.5

    async def test_a_crowd_is_told_one_place_after_the_other(self) -> None:
        """Two places, each held for 10 s: one becomes free every 5 s."""
        admission, clock = places(2, 2)

        async def told() -> float | None:
            return (await refused(admission, "crowd")).retry_after_s

        async with admission.place("crowd"):
            clock.now = 10.0
        async with admission.place("crowd"), admission.place("crowd"):
            assert [await told() for _ in range(3)] == [5.0, 10.0, 15.0]
            clock.now = 16.0  # the first has come back, and is the third now
            assert await told() == 15.0
            assert [await told() for _ in range(20)][-1] == 60.0  # the longest that clients follow

    async def test_who_comes_before_its_time_does_not_lengthen_the_line(self) -> None:
        """Three callers come every second, whatever they are told."""
        admission, clock = places(2, 2)
        async with admission.place("crowd"):
            clock.now = 10.0
        async with admission.place("crowd"), admission.place("crowd"):
            for _ in range(30):
                said = [(await refused(admission, "crowd")).retry_after_s for _ in range(3)]
                assert max(each or 0.0 for each in said) == 15.0
                clock.now += 1.0

    async def test_limits_may_change_while_places_are_held(self) -> None:
        admission, _ = places(4, 2)
        async with admission.place("crowd"), admission.place("crowd"):
            admission.limit(4, 1)
            await refused(admission, "crowd")
            admission.limit(4, 3)
            async with admission.place("crowd"):
                pass

    async def test_a_place_is_given_back_however_the_request_ends(self) -> None:
        admission, _ = places(1, 1)
        with pytest.raises(ZeroDivisionError):
            async with admission.place("crowd"):
                raise ZeroDivisionError
        async with admission.place("guest"):
            pass
        assert admission.next_place_s() is None


class TestLines:
    async def test_who_waits_gets_the_next_place_in_its_turn(self) -> None:
        admission, _ = places(8, 1, wait_s=60.0)
        order: list[int] = []

        async def ask(index: int) -> None:
            async with admission.place("crowd"):
                order.append(index)

        async with admission.place("crowd"):
            asking = [asyncio.create_task(ask(index)) for index in range(3)]
            await asyncio.sleep(0)
            asking[1].cancel()
            async with admission.place("guest"):  # which waits for nobody
                assert order == []
        await ask(3)  # who comes now waits behind them
        await asyncio.gather(*asking, return_exceptions=True)
        assert order == [0, 2, 3]

    async def test_a_line_is_no_longer_than_there_is_room_for_others(self) -> None:
        admission, _ = places(8, 1, wait_s=60.0)

        async def ask() -> None:
            async with admission.place("crowd"):
                pass

        async with admission.place("crowd"):
            asking = [asyncio.create_task(ask()) for _ in range(4)]
            await asyncio.sleep(0)
            assert isinstance(await refused(admission, "crowd"), TooManyRequests)
            async with admission.place("guest"):
                pass
        await asyncio.gather(*asking)

    async def test_who_has_had_less_than_its_share_of_work_waits_longer(self) -> None:
        admission, clock = places(8, 1, wait_s=0.01)

        async with admission.place("light"), admission.place("heavy"):
            waiting = [asyncio.create_task(pass_through(admission, "light"))]
            await asyncio.sleep(0)
            admission._work.charge("heavy", 1.0)
            clock.now = 30.0
            waiting.append(asyncio.create_task(pass_through(admission, "heavy")))
            await asyncio.sleep(0)
            clock.now += 0.01
            with pytest.raises(TooManyRequests):
                await waiting[1]
            assert not waiting[0].done()
        await waiting[0]

    async def test_who_has_fewer_requests_than_another_that_waits_is_not_refused(self) -> None:
        admission, clock = places(16, 1, wait_s=0.01)

        async with admission.place("light"), admission.place("heavy"):
            tenants = ["light", *["heavy"] * 3]
            light, *heavy = [asyncio.create_task(pass_through(admission, each)) for each in tenants]
            await asyncio.sleep(0)
            clock.now = 30.0
            for each in heavy:
                with pytest.raises(TooManyRequests):
                    await each
            assert not light.done()
        await light

    async def test_who_asks_alone_waits_longer_while_it_has_less_than_it_may(self) -> None:
        admission, clock = places(16, 2, shared=1, wait_s=0.01)

        async with admission.place("a"):
            waiting = asyncio.create_task(pass_through(admission, "a"))
            await asyncio.sleep(0)
            third = asyncio.create_task(
                pass_through(admission, "a")
            )  # beyond the two that it may have at most
            await asyncio.sleep(0)
            clock.now = 30.0
            with pytest.raises(TooManyRequests):
                await third
            assert not waiting.done()
            clock.now = 61.0  # there is an end to it
            with pytest.raises(TooManyRequests):
                await waiting

    @pytest.mark.parametrize(
        ("weights", "slow"),
        [
            ({"a": 1, "b": 1, "c": 2, "d": 4}, ()),  # half a place, one, and two
            ({"a": 1, "b": 2, "c": 3}, ()),
            (dict.fromkeys("abcdefghi", 1), ()),  # nine for four places
            (dict.fromkeys("abcdefghi", 1), "abc"),  # with answers that take three times as long
        ],
    )
    def test_tenants_that_never_pause_get_work_by_weight(
        self, virtual_loop: VirtualLoop, weights: dict[str, int], slow: str
    ) -> None:
        work = dict.fromkeys(weights, 0.0)
        random.seed(1)  # lines draw how long they wait, too

        async def ask(admission: Admission, tenant: str) -> None:
            while True:
                seconds = random.expovariate(1.0) * (3 if tenant in slow else 1)
                try:
                    async with admission.place(tenant) as ticket:
                        await asyncio.sleep(seconds)
                        ticket.settle(Usage(1, 1), seconds)
                        work[tenant] += seconds
                except TooManyRequests:
                    await asyncio.sleep(1.0)

        async def crowd() -> None:
            admission = Admission(clock=virtual_loop.time)
            admission.limit(1000, 20, 4, weights)
            asking = [ask(admission, tenant) for tenant in weights for _ in range(4)]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(600.0):
                    await asyncio.gather(*asking)

        with contextlib.closing(virtual_loop):
            virtual_loop.run_until_complete(crowd())
        shares = [each / weights[tenant] for tenant, each in work.items()]
        mean = sum(work.values()) / sum(weights.values())
        assert max(abs(each / mean - 1.0) for each in shares) < 0.05
        assert sum(work.values()) > 3.5 * 600.0  # hardly a place was empty

    def test_a_smaller_priority_waits_less_and_other_tenants_as_long(
        self, virtual_loop: VirtualLoop
    ) -> None:
        entered: list[tuple[str, float]] = []

        async def ask(admission: Admission, name: str, priority: int) -> None:
            async with admission.place(name[0], priority):
                entered.append((name, virtual_loop.time()))
                await asyncio.sleep(1.0)

        async def crowd(priorities: dict[str, int]) -> dict[str, float]:
            entered.clear()
            admission = Admission(clock=virtual_loop.time, wait_s=60.0)
            admission.limit(100, 1, 2)
            began = virtual_loop.time()
            names = ("a0", "b0", "a1", "b1", "a2", "b2", "a3")
            asking = [ask(admission, name, priorities.get(name, 0)) for name in names]
            await asyncio.gather(*asking)
            return {name: round(at - began, 3) for name, at in entered}

        with contextlib.closing(virtual_loop):
            usual = virtual_loop.run_until_complete(crowd({}))
            ranked = virtual_loop.run_until_complete(crowd({"a1": 5, "a3": -1}))
        assert [name for name in usual if name[0] == "a"] == ["a0", "a1", "a2", "a3"]
        assert [name for name in ranked if name[0] == "a"] == ["a0", "a3", "a2", "a1"]
        of_others = [{name: at for name, at in each.items() if name[0] == "b"} for each in
                     (usual, ranked)]  # fmt: skip
        assert of_others[0] == of_others[1]

    async def test_openais_sdk_gives_a_priority_before_its_question_is_read(self) -> None:
        service = ScriptedOrchestrator()
        app = Ingress(service, ApiConfig(model="m", max_requests_per_tenant=1))
        http = httpx.AsyncClient(transport=httpx.ASGITransport(app))
        sdk = openai.AsyncOpenAI(base_url="http://127.0.0.1/v1", api_key="k", http_client=http)
        waiting = app._admission._lines

        async def ask(text: str, **extra: Any) -> None:
            said: Any = [{"role": "user", "content": text}]
            await sdk.chat.completions.create(model="m", messages=said, extra_body=extra)

        async with app._admission.place("local"):
            tasks = []
            for number, extra in enumerate(({}, {"priority": 7}, {"priority": -3})):
                tasks.append(asyncio.create_task(ask(str(number), **extra)))
                while len(waiting.get("local", ())) <= number:  # noqa: ASYNC110 (no event tells it)
                    await asyncio.sleep(0.001)
        await asyncio.gather(*tasks)
        assert [sent.messages[0].text for sent in service.requests] == ["2", "0", "1"]
        assert [sent.priority for sent in service.requests] == [-3, 0, 7]

    async def test_what_answers_used_is_charged_and_of_those_without_an_end_their_time(
        self,
    ) -> None:
        admission, clock = places(8, 4)
        async with admission.place("watch"):
            async with admission.place("asks") as ticket:
                ticket.settle(Usage(1, 1), 2.5)
                clock.now += 10.0
            async with admission.place("leaves"):
                clock.now += 7.0
            levels = [admission._work.level(each) for each in ("watch", "asks", "leaves")]
        assert levels == [0.0, 2.5, 7.0]

    async def test_a_share_that_grows_by_itself_is_noticed(self) -> None:
        """The other ingress tells that its request has ended; nothing ends here."""
        admission, _ = places(8, 1, wait_s=60.0)
        admission.shares.learn({"crowd": (1, 1)})

        async def ask() -> None:
            async with admission.place("crowd"):
                pass

        asking = asyncio.create_task(ask())
        await asyncio.sleep(0)
        assert not asking.done()
        admission.shares.learn({})
        await asking


@pytest.mark.parametrize(("keys", "are_shared"), [(KEYS, True), (KEYS[:1], False), ((), False)])
def test_one_tenant_shares_with_nobody(keys: tuple[ApiKey, ...], are_shared: bool) -> None:
    app = Ingress(ScriptedOrchestrator(), ApiConfig(model="m", keys=keys, shared_requests=4))
    assert app.shares.are_shared == are_shared


@pytest.mark.parametrize("knows_keys", [True, False])
def test_where_the_library_has_no_keys_there_is_one_tenant(knows_keys: bool) -> None:
    async def away() -> Database:
        raise LibraryUnavailable("Away.")

    accounts = Accounts(away)
    accounts.knows_keys = knows_keys
    config = ApiConfig(model="m", shared_requests=4)
    app = Ingress(ScriptedOrchestrator(), config, accounts=accounts)
    assert app.shares.are_shared == knows_keys


class Busy(Generator):
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
        self, is_streamed: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(
            "deployments.api.gate.admission._WAIT_S", 600.0
        )  # nobody gives up waiting
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
        assert len(refused) == 48  # 90 of 180 other places are enough for one tenant's line
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
            asking = asyncio.create_task(http.post(CHAT, json=ASK, headers=CROWD))
            await busy.until(1)
            asking.cancel()  # which closes its connection
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
        app = app_of(busy, pool={"max_ongoing_requests": 2})  # one place, and no line
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
        async with client(app_of(orchestrator, max_characters=2**20, max_model_len=64)) as http:
            reply = await http.post(CHAT, json=ASK | change, headers=GUEST)
        assert reply.status_code == 400
        error = reply.json()["error"]
        assert (error["param"], error["code"]) == (param, "context_length_exceeded")
        assert "4000002 characters" in error["message"] or "4000000 characters" in error["message"]
        assert error["message"].startswith("This model's maximum context length is 64 tokens. ")
        assert not orchestrator.requests

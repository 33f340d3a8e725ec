"""Requests and tokens a minute over HTTP: headers, refusals, refunds and limits of tenants."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from deployments.api.gate.quotas import BoardCall, Limits, QuotaBoard, Quotas
from library.accounts.tenant_limits import write_limits
from library.accounts.usage_ledger import sum_usage
from library.storage.database import Database
from rapid.errors import EngineFailed, Overloaded, TargetUnavailable
from rapid.events import Finished, TextDelta
from tests.deployments.api.accounts.doors import AccountDoor
from tests.deployments.scripted import STARTED, receipt


class Shared:
    """A board that several ingresses call."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.board = QuotaBoard(lambda: self.now)

    def quotas(self) -> Quotas:
        async def call(method: str, *arguments: Any) -> Any:
            return getattr(self.board, method)(*arguments)

        return Quotas(call)


def door(database: Database, *script: Any, **config: Any) -> AccountDoor:
    return AccountDoor(database, *script, quotas=Shared().quotas(), **config)


def rates(response: Any) -> dict[str, str]:
    prefix = "x-ratelimit-"
    headers = response.headers.items()
    return {name.removeprefix(prefix): v for name, v in headers if name.startswith(prefix)}


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_says_what_is_left_and_a_refusal_when_to_come_again(
    database: Database, stream: bool
):
    inn = door(database, requests_per_minute=2, tokens_per_minute=10_000)
    key = await inn.key()
    first, second, third = [await inn.ask(key, stream=stream, max_tokens=20) for _ in range(3)]
    assert [each.status_code for each in (first, second, third)] == [200, 200, 429]
    most = len(first.request.content) + 20
    assert rates(first) == {
        "limit-requests": "2",
        "remaining-requests": "1",
        "reset-requests": "60.1s",
        "limit-tokens": "10000",
        "remaining-tokens": str(10_000 - most),
        "reset-tokens": "60.1s",
    }
    assert rates(second)["remaining-tokens"] == str(10_000 - 108 - most)  # it used 108
    assert third.headers["retry-after"] == "61"
    assert rates(third)["remaining-requests"] == "0"
    error = third.json()["error"]
    assert (error["code"], error["type"]) == ("rate_limit_exceeded", "rate_limit_error")
    assert len(inn.orchestrator.requests) == 2
    assert (await inn.ask(await inn.key("guest"))).status_code == 200


async def test_a_server_without_limits_says_nothing_of_them(database: Database):
    inn = door(database)
    assert rates(await inn.ask(await inn.key())) == {}


async def test_three_ingresses_count_together(database: Database):
    shared = Shared()
    doors = [AccountDoor(database, quotas=shared.quotas(), requests_per_minute=5) for _ in range(3)]
    key = await doors[0].key()
    asked = [await doors[n % 3].ask(key) for n in range(7)]
    assert [each.status_code for each in asked] == [200] * 5 + [429] * 2
    shared.now += 60.2
    assert (await doors[0].ask(key)).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    "script",
    [
        (Overloaded("Full."),),
        (STARTED, TargetUnavailable("Lost.")),
        (STARTED, TextDelta(0, "a"), EngineFailed("Broken.")),
    ],
)
async def test_what_the_server_fails_at_is_given_back(
    database: Database, stream: bool, script: tuple[Any, ...]
):
    inn = door(database, *script, requests_per_minute=1)
    key = await inn.key()
    for _ in range(3):
        assert (await inn.ask(key, stream=stream)).status_code != 429
    inn.orchestrator.script = (STARTED, TextDelta(0, "a", (), "stop"), Finished(receipt()))
    assert [(await inn.ask(key)).status_code for _ in range(2)] == [200, 429]


async def test_a_bad_request_costs_nothing(database: Database):
    inn = door(database, requests_per_minute=1)
    key = await inn.key()
    assert (await inn.ask(key, temperature=9)).status_code == 400
    assert (await inn.ask(key, model="none")).status_code == 404
    assert (await inn.ask(key)).status_code == 200


async def test_a_tenant_may_have_limits_of_its_own(database: Database):
    inn = door(database, requests_per_minute=1, max_requests_per_tenant=4, shared_requests=4)
    keys = {tenant: await inn.key(tenant) for tenant in ("acme", "guest")}
    own = {"requests_per_minute": 3, "concurrent_answers": 1, "weight": 3}
    await write_limits(database, "acme", own, actor="ops")
    async with inn.accounts.keep(inn.app._allowances.refresh), asyncio.timeout(60):
        while "acme" not in inn.accounts.limits:  # noqa: ASYNC110 (it is the product that polls)
            await asyncio.sleep(0.01)
    shares = inn.app.shares
    with shares.hold("acme"):
        assert not shares.admits("acme")
        with shares.hold("guest"):
            assert shares.admits("guest")
    for tenant, expected in (("acme", [200] * 3 + [429]), ("guest", [200, 429])):
        statuses = [(await inn.ask(keys[tenant])).status_code for _ in expected]
        assert statuses == expected


async def test_the_server_keeps_accounts_for_as_long_as_it_serves(database: Database):
    inn = door(database)
    key = await inn.key()
    said: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    heard: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    life = asyncio.create_task(inn.app({"type": "lifespan"}, said.get, heard.put))
    await said.put({"type": "lifespan.startup"})
    assert (await heard.get())["type"] == "lifespan.startup.complete"
    await inn.ask(key)
    await said.put({"type": "lifespan.shutdown"})
    assert (await heard.get())["type"] == "lifespan.shutdown.complete"
    await life
    (own,) = (await inn.send("GET", "/v1/usage", key)).json()["data"]
    assert own["num_requests"] == 1


class Held(Shared):
    """A board whose answers to reservations wait until they may come."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.may_answer = asyncio.Event(), asyncio.Event()
        self.may_answer.set()

    def quotas(self) -> Quotas:
        async def call(method: str, calls: list[BoardCall]) -> Any:
            found = getattr(self.board, method)(calls)
            if "reserve" in dict(calls):
                self.asked.set()
                await self.may_answer.wait()
            return found

        return Quotas(call)


async def test_an_answer_that_is_likely_to_be_granted_begins_before_the_board_has_answered(
    database: Database,
):
    held = Held()
    inn = AccountDoor(database, quotas=held.quotas(), requests_per_minute=9)
    key = await inn.key()
    held.may_answer.clear()
    first = asyncio.create_task(inn.ask(key))
    async with asyncio.timeout(10):
        await held.asked.wait()
    await asyncio.sleep(0.01)
    assert not inn.orchestrator.asked.is_set()  # nothing is known of the tenant
    held.may_answer.set()
    assert (await first).status_code == 200
    inn.orchestrator.asked.clear()
    held.may_answer.clear()
    second = asyncio.create_task(inn.ask(key))
    async with asyncio.timeout(10):
        await inn.orchestrator.asked.wait()
    await asyncio.sleep(0.05)
    assert not second.done()
    held.may_answer.set()
    assert rates(await second)["remaining-requests"] == "7"


async def test_what_was_begun_and_is_not_granted_is_given_up_and_counted_nowhere(
    database: Database, caplog: pytest.LogCaptureFixture
):
    held, going = Held(), asyncio.Event()
    inn = AccountDoor(database, STARTED, going, quotas=held.quotas(), requests_per_minute=4)
    key = await inn.key()
    inn.orchestrator.script = None
    assert (await inn.ask(key)).status_code == 200
    for number in range(3):  # at another ingress
        held.board.reserve(f"other {number}", "acme", Limits(requests=4), 1)
    inn.orchestrator.script = (STARTED, going)
    caplog.set_level("INFO")
    refused = await inn.ask(key)
    assert refused.status_code == 429
    assert rates(refused)["remaining-requests"] == "0"
    async with asyncio.timeout(10):
        await inn.orchestrator.given_up.wait()
    assert [each.outcome for each in caplog.records if hasattr(each, "outcome")] == ["refused"]
    await inn.accounts.write_usage()
    usage = await sum_usage(database, "acme", "2000-01-01", "2999-01-01", [])
    assert usage[0]["num_requests"] == 1


async def test_who_leaves_before_the_board_has_answered_holds_no_tokens(database: Database):
    held = Held()
    inn = AccountDoor(database, quotas=held.quotas(), tokens_per_minute=300)
    key = await inn.key()
    held.may_answer.clear()
    asking = asyncio.create_task(inn.ask(key))
    async with asyncio.timeout(10):
        await held.asked.wait()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    held.may_answer.set()
    assert (await inn.ask(key)).status_code == 200

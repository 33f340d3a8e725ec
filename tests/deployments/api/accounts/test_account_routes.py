"""Keys, limits, the audit log and usage over HTTP."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from typing import Any

import httpx
import pytest

from library.accounts import tenant_limits
from library.storage.database import Database
from rapid.errors import TargetUnavailable
from rapid.events import Finished, TextDelta
from tests.deployments.api.accounts.doors import CHAT, AccountDoor
from tests.deployments.scripted import STARTED, receipt
from tests.deployments.serving import served

KEYS, LIMITS = "/v1/admin/keys", "/v1/admin/limits"


@pytest.fixture
def door(database: Database) -> AccountDoor:
    return AccountDoor(database)


@pytest.fixture
async def admin(door: AccountDoor) -> str:
    return await door.key("ops", "admin")


async def test_a_key_is_made_shown_once_used_and_revoked(door: AccountDoor, admin: str):
    asked = {"tenant": "acme", "name": "laptop", "scopes": ["ask"]}
    made = (await door.send("POST", KEYS, admin, asked)).json()
    key = made.pop("key")
    assert made["object"] == "api_key"
    assert (made["tenant"], made["scopes"], made["revoked_at"]) == ("acme", ["ask"], None)
    assert (await door.ask(key)).status_code == 200
    assert door.orchestrator.requests[-1].tenant == "acme"
    listed = await door.send("GET", f"{KEYS}?tenant=acme", admin)
    assert listed.json()["data"] == [made]
    assert key not in listed.text
    revoked = (await door.send("DELETE", f"{KEYS}/{made['id']}", admin)).json()
    assert revoked == made | {"revoked_at": revoked["revoked_at"]}
    assert (await door.ask(key)).status_code == 401


async def test_another_replica_takes_and_refuses_a_key_at_once(door: AccountDoor, admin: str):
    other = AccountDoor(door.database)
    made = (await door.send("POST", KEYS, admin, {"tenant": "acme"})).json()
    assert (await other.ask(made["key"])).status_code == 200
    rotated = (await other.send("POST", f"{KEYS}/{made['id']}/rotate", admin, {})).json()
    assert [(await door.ask(each["key"])).status_code for each in (made, rotated)] == [401, 200]


async def test_pages(door: AccountDoor, admin: str):
    for _ in range(3):
        await door.key("acme")
    first = (await door.send("GET", f"{KEYS}?limit=2", admin)).json()
    rest = (await door.send("GET", f"{KEYS}?limit=2&after={first['last_id']}", admin)).json()
    assert (first["has_more"], rest["has_more"]) == (True, False)
    assert [len(first["data"]), len(rest["data"])] == [2, 2]
    acts = (await door.send("GET", "/v1/admin/audit?limit=1", admin)).json()
    assert acts["data"][0]["action"] == "keys.create"
    more = await door.send("GET", f"/v1/admin/audit?after={acts['last_id']}", admin)
    assert len(more.json()["data"]) == 3


async def test_acts_name_who_did_them(door: AccountDoor, admin: str):
    await door.send("POST", f"{LIMITS}/acme", admin, {"files": 3})
    (act, *_) = (await door.send("GET", "/v1/admin/audit", admin)).json()["data"]
    assert (act["action"], act["subject"]) == ("limits.set", "acme")
    assert act["actor"].startswith("ops/key_")
    assert admin not in str(act)


BAD_INPUT: list[tuple[str, str, Any, str | None, int]] = [
    ("POST", KEYS, {}, "tenant", 400),
    ("POST", KEYS, {"tenant": ""}, "tenant", 400),
    ("POST", KEYS, {"tenant": "a\n"}, "tenant", 400),
    ("POST", KEYS, {"tenant": "a\x00"}, "tenant", 400),
    ("POST", KEYS, {"tenant": "x" * 129}, "tenant", 400),
    ("POST", KEYS, {"tenant": "a", "scopes": ["root"]}, "scopes[0]", 400),
    ("POST", KEYS, {"tenant": "a", "scopes": []}, "scopes", 400),
    ("POST", KEYS, {"tenant": "a", "expires_at": 5}, "expires_at", 400),
    ("POST", KEYS, {"tenant": "a", "expires_at": 2**60}, "expires_at", 400),
    ("POST", KEYS, {"tenant": "a", "expires": 5}, "expires", 400),
    ("POST", KEYS, "text", None, 400),
    ("DELETE", f"{KEYS}/key_x", None, None, 404),
    ("DELETE", f"{KEYS}/key_{24 * '0'}", None, None, 404),
    ("DELETE", f"{KEYS}/%00", None, None, 404),
    ("POST", f"{KEYS}/key_x/rotate", {"grace_seconds": -1}, "grace_seconds", 400),
    ("GET", f"{KEYS}?limit=0", None, "limit", 400),
    ("GET", f"{KEYS}?limit=x", None, "limit", 400),
    ("GET", f"{KEYS}?tenant=%00", None, "tenant", 400),
    ("GET", f"{KEYS}?after=nobody", None, None, 404),
    ("GET", "/v1/admin/audit?after=-1", None, "after", 400),
    ("POST", f"{LIMITS}/acme", {"weight": 0}, "weight", 400),
    ("POST", f"{LIMITS}/acme", {"files": 2**63}, "files", 400),
    ("POST", f"{LIMITS}/acme", {"file": 1}, "file", 400),
    ("POST", f"{LIMITS}/%00", {"files": 1}, "tenant", 400),
    ("GET", "/v1/usage?group_by=hour", None, "group_by", 400),
    ("GET", "/v1/usage?group_by=day,day", None, "group_by", 400),
    ("GET", "/v1/usage?start_date=today", None, "start_date", 400),
    ("GET", "/v1/usage?end_date=2026-02-30", None, "end_date", 400),
]


async def test_bad_input_is_named(door: AccountDoor, admin: str):
    for method, path, body, param, status in BAD_INPUT:
        response = await door.send(method, path, admin, body)
        error = response.json()["error"]
        found = response.status_code, error["type"], error["param"]
        assert found == (status, "invalid_request_error", param), (method, path, body)
    assert await tenant_limits.read_limits(door.database) == []
    assert len((await door.send("GET", KEYS, admin)).json()["data"]) == 1


async def test_limits_are_set_one_by_one(door: AccountDoor, admin: str):
    await door.send("POST", f"{LIMITS}/acme", admin, {"files": 3, "weight": 2})
    await door.send("POST", f"{LIMITS}/acme", admin, {"files": None, "tokens_per_minute": 9})
    (row,) = (await door.send("GET", LIMITS, admin)).json()["data"]
    assert (row["tenant"], row["files"], row["weight"], row["tokens_per_minute"]) == (
        "acme",
        None,
        2,
        9,
    )


async def test_usage_is_the_tenants_own_and_all_for_an_administrator(door: AccountDoor, admin: str):
    keys = {tenant: await door.key(tenant) for tenant in ("acme", "guest")}
    for key in keys.values():
        assert (await door.ask(key)).status_code == 200
    await door.ask(keys["acme"], stream=True)
    await door.accounts.write_usage()

    async def usage(key: str, query: str = "") -> httpx.Response:
        return await door.send("GET", f"/v1/usage{query}", key)

    (own,) = (await usage(keys["acme"])).json()["data"]
    assert (own["num_requests"], own["prompt_tokens"], own["completion_tokens"]) == (2, 200, 16)
    assert (await usage(keys["acme"], "?tenant=guest")).status_code == 403
    assert (await usage(keys["acme"], "?tenant=*")).status_code == 403
    (other,) = (await usage(admin, "?tenant=guest&group_by=tenant,model,key_id")).json()["data"]
    assert (other["tenant"], other["model"], other["num_requests"]) == ("guest", "m", 1)
    every = (await usage(admin, "?tenant=*&group_by=tenant")).json()["data"]
    assert [each["num_requests"] for each in every] == [2, 1]
    assert (await usage(admin, "?tenant=*&end_date=2020-01-01")).json()["data"] == []


async def test_what_is_embedded_is_in_the_ledger_and_what_is_refused_is_not(door: AccountDoor):
    key = await door.key()
    for path, body in (
        ("/v1/embeddings", {"input": ["abc", "de"]}),
        ("/v1/rerank", {"query": "a", "documents": ["abc"]}),
        ("/v1/embeddings", {"input": "abc", "model": "unknown"}),
        ("/tokenize", {"prompt": "abc"}),
    ):
        await door.send("POST", path, key, body)
    await door.accounts.write_usage()
    (used,) = (await door.send("GET", "/v1/usage?group_by=model", key)).json()["data"]
    assert (used["model"], used["num_requests"]) == ("lengths", 2)
    assert (used["prompt_tokens"], used["completion_tokens"]) == (8, 0)


async def test_a_resumed_stream_is_counted_once_and_a_caller_s_id_hides_nothing(database: Database):
    """Its tokens, that is: the engines computed it as often as it was asked for."""
    used = replace(receipt(), target_s=0.5, drafter_s=0.25)
    door = AccountDoor(database, STARTED, TextDelta(0, "Hello"), Finished(used))
    key = await door.key()
    body = {"stream": True}
    for _ in range(2):
        whole = await door.send("POST", CHAT, key, _asked(body), **{"x-request-id": "mine"})
    event_id = whole.text.split('"rapid_event_id":"')[2].partition('"')[0]
    for _ in range(3):
        rest = await door.send("POST", CHAT, key, _asked(body), **{"last-event-id": event_id})
        assert rest.status_code == 200
    await door.accounts.write_usage()
    (own,) = (await door.send("GET", "/v1/usage", key)).json()["data"]
    assert (own["num_requests"], own["completion_tokens"]) == (2, 16)
    assert (own["target_s"], own["drafter_s"]) == (5 * 0.5, 5 * 0.25)


async def test_an_answer_that_its_caller_left_costs_what_was_told(database: Database):
    """And its end, when the stream is resumed, replaces that."""
    started = replace(STARTED, prompt_tokens=90)
    told = (started, TextDelta(0, "Hel", num_tokens=2), TextDelta(0, "lo", num_tokens=3))
    door = AccountDoor(database, *told, asyncio.Event())
    key = await door.key()

    async def usage() -> tuple[int, int, int]:
        await door.accounts.write_usage()
        (own,) = (await door.send("GET", "/v1/usage", key)).json()["data"]
        return own["num_requests"], own["prompt_tokens"], own["completion_tokens"]

    headers = {"authorization": f"Bearer {key}"}
    async with served(door.app) as url, httpx.AsyncClient(base_url=url) as http:
        asked = http.stream("POST", CHAT, json=_asked({"stream": True}), headers=headers)
        async with asked as response:
            async for line in response.aiter_lines():
                if '"content":"lo"' in line:
                    event_id = json.loads(line.removeprefix("data: "))["rapid_event_id"]
                    break
        await asyncio.wait_for(door.orchestrator.given_up.wait(), 60)
    async with asyncio.timeout(60):
        while not door.accounts._waiting:  # noqa: ASYNC110 (the connection ends on its own)
            await asyncio.sleep(0.01)
    assert await usage() == (1, 90, 5)
    door.orchestrator.script = (*told, TextDelta(0, "!", (), "stop"), Finished(receipt()))
    body = _asked({"stream": True})
    rest = await door.send("POST", CHAT, key, body, **{"last-event-id": event_id})
    assert "[DONE]" in rest.text
    assert await usage() == (1, 100, 8)


async def test_what_the_server_failed_at_costs_nothing(database: Database):
    door = AccountDoor(database, STARTED, TargetUnavailable("Lost."))
    key = await door.key()
    await door.ask(key, stream=True)
    await door.accounts.write_usage()
    (own,) = (await door.send("GET", "/v1/usage", key)).json()["data"]
    assert (own["num_requests"], own["prompt_tokens"]) == (1, 0)


async def test_an_expired_key_is_refused(door: AccountDoor):
    key = await door.key("acme", "ask", expires_at=int(time.time()) - 1)
    assert (await door.ask(key)).status_code == 401


def _asked(body: dict[str, Any]) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "Hi"}]} | body

"""Who may come in where: every route is walked without a key, and with each scope."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
from starlette.routing import Route

from deployments.api.ingress import Ingress
from deployments.config.api_config import ApiConfig, ApiKey
from deployments.config.tenants import hash_key
from library.accounts.books import Accounts
from library.accounts.callers import SCOPES
from library.library_access import LibraryAccess
from library.library_config import LibraryConfig
from library.storage.database import Database
from rapid.errors import LibraryUnavailable
from tests.deployments.api.accounts.doors import ASK, CHAT, AccountDoor
from tests.deployments.api.fuzzing import NEEDS

OPERATOR = ApiKey(tenant="ops", sha256=hash_key("sk-op"), operator=True)
PLAIN = ApiKey(tenant="acme", sha256=hash_key("sk-1"))


def routes(app: Ingress) -> list[tuple[str, str]]:
    """Every method and path, with parameters filled in."""
    found = [each for each in app._app.routes if isinstance(each, Route)]
    assert len(found) == len(app._app.routes)
    return [
        (method, route.path.replace("{", "").replace(":path", "").replace("}", ""))
        for route in found
        for method in sorted(route.methods or ())
        if method != "HEAD"
    ]


@pytest.mark.parametrize("has_configured_keys", [True, False])
@pytest.mark.parametrize("key", [None, "sk-unknown", "", hash_key("sk-1")])
async def test_without_a_key_only_health_readiness_and_the_empty_console_are_shown(
    database: Database, has_configured_keys: bool, key: str | None, tmp_path: Path
):
    library = LibraryAccess(LibraryConfig(folder=tmp_path))
    door = AccountDoor(database, library=library, keys=(PLAIN,) if has_configured_keys else ())
    await door.key()
    walked = routes(door.app)
    assert len(walked) >= 24
    for method, path in walked:
        response = await door.send(method, path, key, ASK)
        if path == "/ready" and response.status_code == 200:
            assert response.json() == {"ready": True}
            assert key is None or key == "" or not has_configured_keys
        elif path == "/health":
            assert response.json() == {"status": "ok"}
        elif path == "/":
            assert response.status_code == 200  # the console, which has no data
            assert "console/main.js" in response.text
        elif path == "/console/name":
            assert response.status_code == 404  # whatever the key
        else:
            assert (path, response.status_code) == (path, 401)
            assert response.json()["error"]["code"] == "invalid_api_key"
    assert not door.orchestrator.requests


@pytest.mark.parametrize("scope", SCOPES)
async def test_a_key_opens_what_it_is_for(database: Database, scope: str, tmp_path: Path):
    library = LibraryAccess(LibraryConfig(folder=tmp_path))
    door = AccountDoor(database, library=library)
    key = await door.key("acme", scope)
    parts = {path: path.removeprefix("/v1").split("/")[1] for _, path in routes(door.app)}
    needs = {path: NEEDS[part] for path, part in parts.items() if part in NEEDS}
    assert set(needs.values()) == set(SCOPES)
    for method, path in routes(door.app):
        response = await door.send(method, path, key, ASK)
        is_refused = needs.get(path, scope) != scope
        assert (path, response.status_code == 403) == (path, is_refused)
        if is_refused:
            error = response.json()["error"]
            assert error["code"] == "missing_scope"
            assert f"it needs the scope {needs[path]!r}, and has {scope!r}" in error["message"]
    await (await library.get()).close()


async def test_configured_keys_go_on_beside_those_of_the_database(database: Database):
    door = AccountDoor(database, keys=(PLAIN, OPERATOR))
    key = await door.key("guest")
    assert [(await door.ask(each)).status_code for each in ("sk-1", key, "sk-2")] == [200, 200, 401]
    keys = "/v1/admin/keys"
    statuses = [(await door.send("GET", keys, each)).status_code for each in ("sk-op", "sk-1", key)]
    assert statuses == [200, 403, 403]
    shown = [(await door.send("GET", "/ready", each)).json() for each in ("sk-op", "sk-1", None)]
    assert ["pools" in each for each in shown] == [True, False, False]


async def test_this_machine_needs_no_key_until_there_is_one(database: Database):
    import httpx

    door = AccountDoor(database)
    transport = httpx.ASGITransport(door.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
        sdk = {"authorization": "Bearer local"}
        assert (await http.post(CHAT, json=ASK, headers=sdk)).status_code == 200
        made = (await http.post("/v1/admin/keys", json={"tenant": "acme"})).json()
        assert (await http.post(CHAT, json=ASK, headers=sdk)).status_code == 401
        assert (await http.post(CHAT, json=ASK)).status_code == 401
        assert (await http.get("/ready")).json() == {"ready": True}
        own = {"authorization": f"Bearer {made['key']}"}
        assert (await http.post(CHAT, json=ASK, headers=own)).status_code == 200
    assert [each.tenant for each in door.orchestrator.requests] == ["local", "acme"]


async def test_while_the_database_is_away_configured_keys_are_taken_and_others_may_try_again():
    async def away() -> Database:
        raise LibraryUnavailable("The library's database does not answer.")

    door = AccountDoor.__new__(AccountDoor)
    from tests.deployments.scripted import ScriptedOrchestrator

    door.orchestrator = ScriptedOrchestrator()
    config = ApiConfig(model="m", keys=(PLAIN,))
    door.app = Ingress(door.orchestrator, config, accounts=Accounts(away))
    assert (await door.ask("sk-1")).status_code == 200
    other = await door.ask("sk-other")
    assert (other.status_code, other.json()["error"]["code"]) == (503, "library_unavailable")
    assert (await door.send("GET", "/ready")).json() == {"ready": True}


async def test_every_request_with_a_key_has_a_line_with_its_tenant(
    database: Database, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO)
    door = AccountDoor(database)
    key = await door.key("acme", "ask", "admin")
    await door.ask(key)
    await door.send("GET", "/v1/models/secret-word", key)
    await door.send("DELETE", "/v1/admin/keys/secret-word", key)
    await door.send("GET", "/v1/usage", key)
    lines: list[Any] = [each for each in caplog.records if each.name.endswith("access_log")]
    assert [each.tenant for each in lines] == ["acme"] * 4
    assert all(each.key_id.startswith("key_") for each in lines)
    assert [(each.route, each.status) for each in lines[1:]] == [
        ("/v1/models/{model:path}", 404),
        ("/v1/admin/keys/{key_id}", 404),
        ("/v1/usage", 200),
    ]
    assert "secret-word" not in str([each.__dict__ for each in lines])


async def test_the_tenant_of_a_request_is_known_to_all_that_is_logged_meanwhile(
    database: Database,
):
    from library.accounts.callers import TENANT

    door = AccountDoor(database)
    keys = [await door.key(tenant) for tenant in ("a", "b")]
    seen: list[str | None] = []
    begin = door.orchestrator.begin

    async def noting(*arguments: Any) -> Any:
        await asyncio.sleep(0.01)
        seen.append(TENANT.get())
        return await begin(*arguments)

    door.orchestrator.begin = noting  # type: ignore[method-assign]
    await asyncio.gather(*(door.ask(each) for each in keys))
    assert sorted(map(str, seen)) == ["a", "b"]
    assert TENANT.get() is None

"""What operators see of the server: its state, and what its requests have come to."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import httpx

from deployments.api.ingress import Ingress
from deployments.config.api_config import ApiConfig, ApiKey
from deployments.config.tenants import hash_key
from rapid.errors import Overloaded
from tests.deployments.scripted import STARTED, ScriptedOrchestrator

STATE = "/v1/admin/state"
ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}


class Gate(asyncio.Event):
    """A step of a script at which it stops, and says that it has come there."""

    def __init__(self) -> None:
        super().__init__()
        self.reached = asyncio.Event()

    async def wait(self) -> Literal[True]:
        self.reached.set()
        return await super().wait()


def door(orchestrator: ScriptedOrchestrator, **config: Any) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(Ingress(orchestrator, ApiConfig(model="m", **config)))
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")


async def test_the_state_is_what_this_process_knows() -> None:
    orchestrator = ScriptedOrchestrator()
    orchestrator.state = {"ready": False, "reason": "no target", "pools": {"target": {}}}
    async with door(orchestrator) as http:
        state = (await http.get(STATE)).json()
        assert (state["ready"], state["reason"]) == (False, "no target")
        assert (state["pools"], state["engines"]) == ({"target": {}}, [])
        orchestrator.state = RuntimeError("lost")
        unknown = await http.get(STATE)
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (503, "target_unavailable")


async def test_it_is_for_operators() -> None:
    keys = (
        ApiKey(tenant="acme", sha256=hash_key("sk-1")),
        ApiKey(tenant="ops", sha256=hash_key("sk-op"), operator=True),
    )
    async with door(ScriptedOrchestrator(), keys=keys) as http:
        for key, status in ((None, 401), ("sk-1", 403), ("sk-op", 200)):
            headers = {"authorization": f"Bearer {key}"} if key else {}
            assert (await http.get(STATE, headers=headers)).status_code == status


async def test_requests_are_counted_while_they_wait_are_answered_and_when_they_end() -> None:
    has_place, is_read = asyncio.Event(), Gate()
    orchestrator = ScriptedOrchestrator(has_place, STARTED, is_read, Overloaded("full"))
    async with door(orchestrator) as http:

        async def counts() -> dict[str, int]:
            found: dict[str, int] = (await http.get(STATE)).json()["requests"]
            return {name: number for name, number in found.items() if number}

        asked = asyncio.create_task(http.post("/v1/chat/completions", json=ASK))
        await orchestrator.asked.wait()
        assert await counts() == {"waiting": 1}
        has_place.set()
        await is_read.reached.wait()
        assert await counts() == {"answering": 1}
        is_read.set()
        await asked
        assert await counts() == {"failed": 1}
        orchestrator.script = None  # answers
        await http.post("/v1/chat/completions", json=ASK | {"n": 2})
        await http.post("/v1/chat/completions", json=ASK | {"model": "other"})
        ended = {"ok": 1, "refused": 1, "failed": 1}
        assert await counts() == ended | {"drafted": 18, "accepted": 12}  # of two choices

"""The deployment of the HTTP API: its keys and limits as they change, and what it reports."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from cluster import serve_internals
from deployments import ingress_replica as module
from deployments.api.backend.readiness import Readiness
from deployments.config.api_config import ApiConfig, ModelCard
from deployments.config.tenants import hash_key
from deployments.ingress_replica import IngressReplica, report_readiness
from library.library_config import LibraryConfig
from rapid.chat_messages import Message
from rapid.errors import ConfigurationError
from rapid.messages import GenerateRequest
from tests.deployments.api.backend.test_remote_orchestrator import ScriptedHandle
from tests.deployments.scripted import ScriptedOrchestrator, answer

REQUEST = GenerateRequest("r", "local", (Message("user", "Which?"),))


@pytest.fixture
def nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Readiness, "look", lambda self: None)
    monkeypatch.setattr(Readiness, "start", lambda self: None)


@pytest.mark.parametrize("is_embedded", [True, False])
async def test_the_models_card_says_whether_it_is_an_embedded_one(
    is_embedded: bool, nobody_looks: None
) -> None:
    settings = ApiConfig(models={"rapid": ModelCard(is_embedded=is_embedded)})
    replica = IngressReplica(settings, None, None, ScriptedHandle())  # type: ignore[arg-type]
    transport = httpx.ASGITransport(replica.__serve_build_asgi_app__())
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
        (card,) = (await http.get("/v1/models")).json()["data"]
    assert card["rapid"]["embedded"] == is_embedded


async def test_each_model_has_its_orchestrator(nobody_looks: None) -> None:
    """And its number cannot change while the replica runs, as handles are given at the start."""
    handles = [ScriptedHandle(None, *answer(REQUEST)), ScriptedHandle(None, *answer(REQUEST))]
    for handle, name in zip(handles, ("Orchestrator-a", "Orchestrator-b"), strict=True):
        handle.deployment_name = handle.deployment_id = name
    models = {"a": ModelCard(target="target-a"), "b": ModelCard(target="engines-big")}
    replica = IngressReplica(ApiConfig(models=models), None, None, *handles)  # type: ignore[arg-type]
    transport = httpx.ASGITransport(replica.__serve_build_asgi_app__())
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:

        async def ask(model: str) -> int:
            body = {"model": model, "messages": [{"role": "user", "content": "Which?"}]}
            return (await http.post("/v1/chat/completions", json=body)).status_code

        renamed = {"a": {"target": "target-a"}, "c": {"target": "engines-big"}}
        replica.reconfigure({"models": renamed})
        replica.reconfigure({"models": {"a": {}}})  # refused
        assert (await ask("b"), await ask("c")) == (404, 200)
    assert [len(handle.events) for handle in handles] == [len(answer(REQUEST)), 0]
    state = await replica._service.ready()
    assert state["reason"] == "no target-a takes requests"
    assert state["models"] == {"a": False, "c": False}


async def test_new_keys_and_limits_reach_a_replica_that_runs(nobody_looks: None) -> None:
    replica = IngressReplica(ApiConfig(), None, None, ScriptedHandle())  # type: ignore[arg-type]
    transport = httpx.ASGITransport(replica.__serve_build_asgi_app__())
    key = {"tenant": "a", "sha256": hash_key("sk-new")}
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:

        async def status(key: str | None = None) -> int:
            headers = {"authorization": f"Bearer {key}"} if key else {}
            return (await http.get("/v1/models", headers=headers)).status_code

        replica.reconfigure({"model": "rapid"})
        assert (await status(), await status("sk-new")) == (200, 200)
        replica.reconfigure({"model": "rapid", "keys": [key]})
        assert (await status(), await status("sk-new")) == (401, 200)
        replica.reconfigure({"model": "rapid", "keys": [key, key]})  # refused: the old ones stay
        assert (await status(), await status("sk-new")) == (401, 200)


async def test_a_replica_keeps_its_keys_where_callers_elsewhere_seem_local(
    nobody_looks: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(serve_internals, "RAY_SERVE_ENABLE_DIRECT_INGRESS", True)
    monkeypatch.setattr(module, "limit_replica", lambda: None)  # it would last
    replica = IngressReplica(ApiConfig(), None, None, ScriptedHandle())  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="list keys"):
        replica.reconfigure({"model": "rapid"})
    replica.reconfigure({"model": "rapid", "keys": [{"tenant": "a", "sha256": hash_key("sk")}]})
    replica.reconfigure({"model": "rapid"})
    assert "those in force stay: api.keys is empty" in caplog.text


async def test_readiness_is_reported_as_it_changes() -> None:
    service, seen = ScriptedOrchestrator(), []

    class Metrics:
        def report(self, *, is_ready: bool, model: str | None) -> None:
            seen.append(is_ready)

    async def sleep(_: float) -> None:
        service.state = {"ready": len(seen) == 2}
        if len(seen) == 3:
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await report_readiness(service, Metrics(), sleep)  # type: ignore[arg-type]
    assert seen == [True, False, True]


async def test_a_replica_with_a_library_takes_its_keys(nobody_looks: None, tmp_path: Path) -> None:
    library = LibraryConfig(folder=tmp_path)
    replica = IngressReplica(ApiConfig(), library, ScriptedHandle(), ScriptedHandle())  # type: ignore[arg-type]
    transport = httpx.ASGITransport(replica.__serve_build_asgi_app__())
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
        made = (await http.post("/v1/admin/keys", json={"tenant": "acme"})).json()
        own = {"authorization": f"Bearer {made['key']}"}
        statuses = [(await http.get("/v1/models", headers=each)).status_code for each in ({}, own)]
    assert statuses == [401, 200]
    assert replica._ingress._library is not None
    await (await replica._ingress._library.get()).close()

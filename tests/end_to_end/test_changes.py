"""Edits of a running application: what is replaced, and what its requests notice."""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from deployments.config.applying import update
from deployments.config.preflight import preflight
from deployments.config.serve_config import ServeConfig
from deployments.config.tenants import hash_key
from tests.ray_cluster import FAKES, Fakes, wait_until

logger = logging.getLogger(__name__)

pytestmark = [pytest.mark.ray, pytest.mark.slow]

APP = "changing"
KEYS = [{"tenant": "first", "sha256": hash_key("sk-first")}]
ENGINE = {"max_context": 2048, "kv_cache_tokens": 8192, "max_leases": 8, "threads": 1}
POOL = {"num_cpus": 0.05}
ARGS: dict[str, Any] = {
    "target": {"engine": {"model": "embedded:target", **ENGINE}, "pool": POOL},
    "drafter": {"engine": {"model": "embedded:drafter", **ENGINE}, "pool": POOL},
    "retriever": {"retrieval": {"chunk_tokens": 64, "budget_tokens": 320}, "pool": POOL},
    "orchestrator": {"draft_length": "fixed", "target_wait_s": 60, "pool": POOL},
    "api": {"model": "changing", "keys": KEYS, "pool": POOL},
}


class Running:
    """An application that is changed as `rapid apply` changes it."""

    def __init__(self, url: str) -> None:
        from ray.serve.context import _get_global_client

        self.url = f"{url}/{APP}"
        self.args = copy.deepcopy(ARGS)
        self._client = _get_global_client()

    def apply(self, edit: Callable[[dict[str, Any]], object] = lambda _: None) -> dict[str, Any]:
        """Send the edited settings; what this does to each deployment."""
        edit(self.args)
        file, state = self.content(), self.state()
        config = ServeConfig.model_validate(self.args)
        running = {APP: state["deployed_app_config"]} if state else {}
        content, effects = update(file, {APP: preflight(config)}, running)
        self.send(content)
        return effects

    def content(self) -> dict[str, Any]:
        application = {
            "name": APP,
            "route_prefix": f"/{APP}",
            "import_path": "deployments.app:build",
            "args": copy.deepcopy(self.args),
        }
        return {"applications": [application]}

    def send(self, content: dict[str, Any]) -> None:
        from ray.serve.schema import ServeDeploySchema

        self._client.deploy_apps(ServeDeploySchema.model_validate(content))

    def state(self) -> dict[str, Any]:
        applications: dict[str, Any] = self._client.get_serve_details()["applications"]
        return applications.get(APP, {})

    def settled(self) -> str:
        """The application's status once it has come to rest."""
        wait_until(lambda: self.state()["status"] != "DEPLOYING", 180, every_s=0.1)
        status: str = self.state()["status"]
        return status

    def replicas(self) -> dict[str, set[str]]:
        """The ids of the replicas that live, by deployment."""
        import ray

        found: dict[str, set[str]] = {}
        for actor in ray.util.list_named_actors(all_namespaces=True):
            _, is_ours, rest = actor["name"].partition(f"SERVE_REPLICA::{APP}#")
            if is_ours:
                deployment, _, replica = rest.partition("#")
                found.setdefault(deployment, set()).add(replica)
        return found

    def ask(self, key: str = "sk-first", **fields: Any) -> httpx.Response:
        asked = {
            "model": "changing",
            "messages": [{"role": "user", "content": "What does the lighthouse guard?"}],
            "seed": 7,
            "rapid": {"mode": "lossless"},
            **fields,
        }
        headers = {"authorization": f"Bearer {key}"}
        return httpx.post(
            f"{self.url}/v1/chat/completions", json=asked, headers=headers, timeout=120
        )


class Asking(threading.Thread):
    """A client that asks one question again and again, and keeps what it was told."""

    def __init__(self, running: Running) -> None:
        super().__init__(daemon=True)
        self._running = running
        self._is_over = threading.Event()
        self.replies: list[httpx.Response] = []

    def __enter__(self) -> Asking:
        self.start()
        return self

    def run(self) -> None:
        while not self._is_over.is_set():
            self.replies.append(self._running.ask(max_tokens=40))

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self.join()

    def texts(self) -> set[str]:
        """What the client was told; fails unless every request was answered."""
        assert {reply.status_code for reply in self.replies} == {200}
        return {reply.json()["choices"][0]["message"]["content"] for reply in self.replies}


@pytest.fixture(scope="module")
def running(ray_cluster: str) -> Iterator[Running]:
    from ray import serve

    running = Running(ray_cluster)
    running.apply()
    assert running.settled() == "RUNNING"
    wait_until(lambda: running.ask().status_code == 200, 30)
    yield running
    serve.delete(APP)


def test_keys_limits_and_defaults_change_while_every_replica_stays(running: Running) -> None:
    before = running.replicas()
    assert running.ask("sk-second").status_code == 401
    assert running.ask(n=3, max_tokens=4).status_code == 200

    def edit(args: dict[str, Any]) -> None:
        args["api"]["keys"] = [*KEYS, {"tenant": "second", "sha256": hash_key("sk-second")}]
        args["api"]["max_choices"] = 2
        args["orchestrator"]["default_max_tokens"] = 5
        args["speculation"] = {"max_draft": 3}

    def is_effective() -> bool:
        reply = running.ask("sk-second")
        if reply.status_code == 401:
            return False
        receipt = reply.json()["rapid"]
        is_new = receipt["max_draft"] == 3 and reply.json()["usage"]["completion_tokens"] <= 5
        return is_new and running.ask(n=3).status_code == 400

    with Asking(running) as asking:
        effects = running.apply(edit)
        took_s = wait_until(is_effective, 30, every_s=0.05)
    logger.info("effective after %.2f s, %d requests meanwhile", took_s, len(asking.replies))
    assert effects == {"Ingress": "live", "Orchestrator": "live"}
    assert len(asking.texts()) == 1
    assert running.settled() == "RUNNING"
    assert running.replicas() == before


def test_bad_settings_are_refused_and_the_old_ones_stay(running: Running) -> None:
    """Refused by the builder, and by the replica that a hand-written block reaches."""
    before = running.replicas()
    bad = running.content()
    bad["applications"][0]["args"]["api"]["max_choices"] = 0
    running.send(bad)
    assert running.settled() == "DEPLOY_FAILED"
    assert "max_choices" in running.state()["message"]
    assert running.ask(max_tokens=4).status_code == 200
    assert running.replicas() == before

    by_hand = running.content()
    block = {"name": "Ingress", "user_config": {"keys": "none"}}
    by_hand["applications"][0]["deployments"] = [block]
    running.send(by_hand)
    assert running.settled() == "RUNNING"
    assert running.ask("sk-none").status_code == 401
    assert running.ask(max_tokens=4).status_code == 200
    running.send(running.content())
    assert running.settled() == "RUNNING"
    assert running.replicas() == before


def test_scaling_numbers_change_while_every_replica_stays(running: Running) -> None:
    before = running.replicas()
    pool = {**POOL, "max_replicas": 2, "target_ongoing_requests": 3, "downscale_delay_s": 1}
    assert running.apply(lambda args: args["drafter"].update(pool=pool))["Drafter"] == "live"
    assert running.settled() == "RUNNING"
    deployed = running.state()["deployments"]["Drafter"]["deployment_config"]
    assert deployed["autoscaling_config"]["max_replicas"] == 2
    assert running.replicas() == before


def test_a_new_engine_has_loaded_before_the_old_one_leaves(running: Running) -> None:
    """Only its own deployment is replaced, and nobody who asks meanwhile is refused."""
    before = running.replicas()
    lived = []
    with Asking(running) as asking:
        effects = running.apply(lambda args: args["target"]["engine"].update(step_tokens=256))
        began = time.monotonic()
        while not (after := running.replicas())["Target"].isdisjoint(before["Target"]):
            assert time.monotonic() - began < 180
            lived.append(len(after["Target"]))
            time.sleep(0.1)
    assert effects["Target"] == "rolls"
    assert set(effects.values()) == {"rolls", "live"}
    assert max(lived) == 2
    assert len(asking.texts()) == 1
    assert running.settled() == "RUNNING"
    after = running.replicas()
    assert after.pop("Target").isdisjoint(before.pop("Target"))
    assert after == before


def test_two_versions_answer_by_share(running: Running, fakes: Fakes) -> None:
    """The application of fakes takes all, then nothing, then is not there."""

    def change(application: str, share: float) -> None:
        canary = {"application": application, "share": share}
        running.apply(lambda args: args["api"].update(canary=canary))
        assert running.settled() == "RUNNING"

    def answering() -> str:
        name: str = running.ask(max_tokens=4).json()["rapid"]["application"]
        return name

    before = running.replicas()
    change(FAKES, 1.0)
    wait_until(lambda: answering() == FAKES, 30)  # once the ingress has seen that it is ready
    change(FAKES, 0.0)
    assert answering() == APP
    change("gone", 1.0)
    assert answering() == APP
    assert running.replicas() == before

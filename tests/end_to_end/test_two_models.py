"""An application with two embedded targets that share one drafter, over HTTP on a local Ray."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from rapid.embedded.generator import generate_document
from tests.ray_cluster import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.slow]

APP = "two-models"
ENGINE = {
    "max_context": 4096,
    "kv_cache_tokens": 16384,
    "max_leases": 8,
    "threads": 1,
    "deterministic": True,  # who else is in a step changes no number
}
POOL = {"num_cpus": 0.05}


def engines(model: str) -> dict[str, Any]:
    return {"engine": {"model": model, **ENGINE}, "pool": POOL}


ARGS: dict[str, Any] = {
    "engine_pools": {"quick": engines("embedded:drafter")},
    "models": {
        "small": {"target": engines("embedded:drafter"), "drafter": "quick"},
        "large": {"target": engines("embedded:target"), "drafter": "quick"},
    },
    "retriever": {"retrieval": {"chunk_tokens": 64, "budget_tokens": 320}, "pool": POOL},
    "orchestrator": {"draft_length": "fixed", "target_wait_s": 60, "pool": POOL},
    "api": {"pool": POOL},
}
DOCUMENT = generate_document(5, 100)
# The document says nothing of the last, to which each model makes up an answer of its own.
QUESTIONS = [*(each.question for each in DOCUMENT.questions[:2]), "List the four deposits of Rize."]


@pytest.fixture(scope="module")
def url(ray_cluster: str) -> Iterator[str]:
    from ray import serve

    from deployments.app import build

    serve.run(build(ARGS), name=APP, route_prefix=f"/{APP}")
    url = f"{ray_cluster}/{APP}"
    wait_until(lambda: httpx.get(f"{url}/ready").status_code == 200, 60, every_s=0.2)
    yield url
    serve.delete(APP)


def ask(url: str, model: str, question: str) -> httpx.Response:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "temperature": 0.8,
        "seed": 7,
        "max_tokens": 24,
        "rapid": {"mode": "fused", "documents": [{"name": "notes", "text": DOCUMENT.text}]},
    }
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120)


def test_both_asked_at_once_answer_as_each_does_alone(url: str) -> None:
    asked = [(model, question) for model in ("small", "large") for question in QUESTIONS]
    alone = [ask(url, *each).json() for each in asked]
    with ThreadPoolExecutor(len(asked)) as clients:
        at_once = [reply.json() for reply in clients.map(lambda each: ask(url, *each), asked)]
    said = [
        [reply["choices"][0]["message"]["content"] for reply in each] for each in (alone, at_once)
    ]
    assert said[0] == said[1]
    assert said[0][:3] != said[0][3:]
    for (model, _), reply in zip(asked, at_once, strict=True):
        assert reply["model"] == model
        assert reply["rapid"]["mode"] == "fused"


def test_they_have_one_drafter_and_a_name_each(url: str) -> None:
    state = httpx.get(f"{url}/ready").json()
    assert state["models"] == {"small": True, "large": True}
    assert state["pools"].keys() == {
        *("ingress", "retriever", "engines-quick"),
        *("target-small", "target-large", "orchestrator-small", "orchestrator-large"),
    }
    cards = httpx.get(f"{url}/v1/models").json()["data"]
    assert [card["id"] for card in cards] == ["small", "large"]
    unknown = ask(url, "medium", "Which?")
    assert unknown.status_code == 404
    assert "this server has 'small', 'large'" in unknown.json()["error"]["message"]

"""The application of `cluster/configs/two-processes.yaml`, whose engines are two processes each.

The texts are those of the shipped configuration, whose engines are one process each.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from rapid.embedded.generator import generate_document
from tests.ray_cluster import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.slow]

ROOT = Path(__file__).parents[2]


@contextmanager
def served(server: str, target: int, drafter: int, num_targets: int = 1) -> Iterator[str]:
    """The application with engines of so many processes, which always drafts; its address."""
    from ray import serve

    from deployments.app import check, compose

    config = check(ROOT / "cluster/configs/two-processes.yaml")
    pools = {}
    for name, pool, size in (
        ("target", config.target, target),
        ("drafter", config.drafter_pool, drafter),
    ):
        engine = pool.engine.model_copy(update={"tensor_parallel": size})
        pools[name] = pool.model_copy(update={"engine": engine})
    several = pools["target"].pool.model_copy(update={"min_replicas": num_targets})
    pools["target"] = pools["target"].model_copy(update={"pool": several})
    drafting = config.orchestrator.model_copy(update={"draft_length": "fixed"})
    changed = config.model_copy(update=pools | {"orchestrator": drafting})
    name = f"ranks-{target}-{drafter}"
    serve.run(compose(changed), name=name, route_prefix=f"/{name}")
    try:
        yield f"{server}/{name}"
    finally:
        serve.delete(name)


@pytest.fixture(scope="module")
def url(ray_cluster: str) -> Iterator[str]:
    with served(ray_cluster, target=2, drafter=2, num_targets=2) as url:
        yield url


def body(number: int, mode: str, temperature: float, **fields: Any) -> dict[str, Any]:
    document = generate_document(number, 300)
    return {
        "model": "rapid-embedded",
        "messages": [{"role": "user", "content": document.questions[0].question}],
        "temperature": temperature,
        "seed": number,
        "max_tokens": 40,
        "rapid": {
            "mode": mode,
            "documents": [{"name": document.name, "text": document.text}],
        },
        **fields,
    }


def followers() -> set[psutil.Process]:
    """The processes that hold parts of models, below this one."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        try:
            if "rapid.engines.parallel.follower" in " ".join(process.cmdline()):
                found.add(process)
        except psutil.NoSuchProcess:
            continue
    return found


def text_of(url: str, request: dict[str, Any]) -> str:
    reply = httpx.post(f"{url}/v1/chat/completions", json=request, timeout=180)
    assert reply.status_code == 200, reply.text
    content: str = reply.json()["choices"][0]["message"]["content"]
    return content


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("mode", ["plain", "lossless", "fused", "rag"])
def test_two_processes_give_the_text_of_one(
    url: str, application: str, mode: str, temperature: float
) -> None:
    for number in range(3):
        request = body(number, mode, temperature)
        assert text_of(url, request) == text_of(application, request)


def test_an_answer_outlives_a_process_of_its_target(url: str) -> None:
    request = body(11, "plain", 1.5, max_tokens=200)
    undisturbed = text_of(url, request)
    before = followers()
    assert len(before) >= 3  # of two targets and a drafter, one each
    parts, is_first = [], True
    with httpx.stream(
        "POST", f"{url}/v1/chat/completions", json=request | {"stream": True}, timeout=180
    ) as reply:
        for line in reply.iter_lines():
            if not line.startswith("data: {"):
                continue
            choices = json.loads(line.removeprefix("data: "))["choices"]
            parts += [choice["delta"].get("content") or "" for choice in choices]
            if is_first and any(parts):
                is_first = False
                for follower in before:  # whichever target it is
                    follower.kill()
    assert "".join(parts) == undisturbed
    wait_until(lambda: len(followers()) == len(before), 180)
    assert not before & followers()
    assert text_of(url, request) == undisturbed


@pytest.mark.parametrize(("target", "drafter"), [(1, 2), (2, 1)])
def test_target_and_drafter_may_be_of_different_degrees(
    ray_cluster: str, application: str, target: int, drafter: int
) -> None:
    others = len(followers())
    with served(ray_cluster, target, drafter) as url:
        assert len(followers()) == others + 1
        for mode in ("plain", "lossless", "fused", "paper", "rag"):
            for temperature in (0.0, 1.0) if mode != "paper" else (1.0,):
                request = body(5, mode, temperature)
                assert text_of(url, request) == text_of(application, request), request

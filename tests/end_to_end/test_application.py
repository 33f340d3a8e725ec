"""The application of `serve_config.yaml`, asked over HTTP."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any

import httpx
import pytest

from rapid.chat_messages import Document, Message
from rapid.embedded.generator import generate_document
from rapid.events import Finished
from rapid.messages import GenerateRequest, SpeculationRequest
from tests.end_to_end.test_slow_reference import recomputed, tokens
from tests.ray_cluster import REAL, real_config, wait_until

pytestmark = pytest.mark.ray

MODES = ("auto", "plain", "lossless", "fused", "rag")


def body(index: int, **rapid: Any) -> dict[str, Any]:
    document = generate_document(index, 200 + 150 * (index % 6))
    return {
        "model": "rapid-embedded",
        "messages": [{"role": "user", "content": document.questions[index % 3].question}],
        "temperature": 1.0,
        "seed": index,
        "max_tokens": 20 + 5 * (index % 7),
        "rapid": {
            "mode": MODES[index % len(MODES)],
            "documents": [{"name": document.name, "text": document.text}],
            "explain": "tokens",
            **rapid,
        },
    }


async def ask(client: httpx.AsyncClient, request: dict[str, Any]) -> dict[str, Any]:
    reply = await client.post("/v1/chat/completions", json=request)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def held(url: str) -> tuple[int, int] | None:
    """Leases and pages in use; None until an engine of either pool is seen.

    An engine that loads, or leaves after the load, has neither.
    """
    listed = httpx.get(f"{url}/ready", timeout=10).json()["engines"]
    engines = [engine for engine in listed if engine["status"] == "ok"]
    if {engine["pool"] for engine in engines} != {"drafter", "target"}:
        return None
    return (
        sum(engine["leases_open"] for engine in engines),
        sum(engine["kv_pages_in_use"] for engine in engines),
    )


async def test_two_dozen_at_once_get_what_each_gets_alone(application: str) -> None:
    requests = [body(index) for index in range(24)]
    async with httpx.AsyncClient(base_url=application, timeout=120) as client:
        together = await asyncio.gather(*(ask(client, request) for request in requests))
        alone = [await ask(client, request) for request in requests]
    num_ties = 0
    for request, crowded, single in zip(requests, together, alone, strict=True):
        if tokens(crowded) != tokens(single):  # the batch moves logits by 3e-5: only at a tie
            num_ties += recomputed(crowded, request) or recomputed(single, request)
    assert num_ties <= len(requests) / 100
    wait_until(lambda: held(application) == (0, 0), 60)


async def test_what_is_answered_is_in_the_ledger_soon(application: str) -> None:
    """By the tenant's own look, under Serve; beside what other tests have asked."""

    def usage() -> dict[str, float]:
        found = httpx.get(f"{application}/v1/usage?group_by=tenant", timeout=30).json()["data"]
        seconds = ("target_s", "drafter_s", "kv_byte_s")
        names = ("num_requests", "prompt_tokens", "completion_tokens", *seconds)
        return {name: found[0][name] if found else 0 for name in names}

    before = usage()
    async with httpx.AsyncClient(base_url=application, timeout=120) as client:
        answer = await ask(client, body(3, mode="lossless"))
    least = {"num_requests": 1, "target_s": 1e-6, "drafter_s": 1e-6, "kv_byte_s": 1} | {
        name: answer["usage"][name] for name in ("prompt_tokens", "completion_tokens")
    }
    wait_until(lambda: all(usage()[name] - before[name] >= least[name] for name in least), 60)


async def test_both_acceptance_sites_give_the_same_tokens(application: str) -> None:
    """A second orchestrator, on the same engines, that fetches logits and judges by itself."""
    from ray import serve

    judging = orchestrator_beside("judging", acceptance_site="orchestrator", draft_length="fixed")
    deciding = serve.get_deployment_handle("Orchestrator", app_name=REAL)
    for index in range(4):
        for coupling in ("shared_noise", "maximal"):
            answers = []
            for orchestrator in (deciding, judging):
                generate = orchestrator.options(
                    stream=True, method_name="generate", _by_reference=False
                )
                events = [e async for e in generate.remote(long_question(index, coupling))]
                assert isinstance(events[-1], Finished)
                receipt = events[-1].receipt
                assert receipt.contract == "fused"
                assert receipt.explanation is not None
                answers.append(receipt.explanation)
            assert replace(answers[0], tokens=()) == replace(answers[1], tokens=())
            # Both sites round a distribution in their own way, in float32.
            numbers = [
                [
                    -1.0 if number is None else number
                    for token in answer.tokens[0]
                    for number in (token.target, token.drafter, token.sampled)
                ]
                for answer in answers
            ]
            assert numbers[0] == pytest.approx(numbers[1], rel=1e-4, abs=1e-5)
    serve.delete("judging")


async def test_prompt_lookup_drafts_what_plain_decodes(application: str) -> None:
    """An orchestrator without drafter and retriever, on the same target engines."""
    from ray import serve

    from cluster.placement import deployment_options
    from deployments.orchestrator.deployment import Orchestrator

    config = real_config(draft_length="fixed").model_copy(update={"drafter": "prompt_lookup"})
    target = serve.get_deployment_handle("Target", app_name=REAL)
    deployment = serve.deployment(Orchestrator).options(
        **deployment_options(config.orchestrator.pool)
    )
    looking = serve.run(
        deployment.bind(config, target, None, None), name="lookup", route_prefix=None
    )
    generate = looking.options(stream=True, method_name="generate", _by_reference=False)
    num_accepted = 0
    for index in range(4):
        asked = replace(long_question(index, None), temperature=0.7)
        receipts = {}
        for mode in ("plain", "lossless", "auto"):
            speculation = SpeculationRequest(mode=mode)  # type: ignore[arg-type]
            events = [e async for e in generate.remote(replace(asked, speculation=speculation))]
            receipts[mode] = events[-1].receipt
        plain = receipts.pop("plain")
        assert plain.choices[0].drafted == 0
        for lookup in receipts.values():
            assert lookup.explanation.token_ids == plain.explanation.token_ids
            assert (lookup.mode, lookup.coupling, lookup.eta) == ("lossless", "shared_noise", 0.0)
            assert lookup.plain_from == (None,)
            num_accepted += lookup.choices[0].accepted
    assert num_accepted > 0
    serve.delete("lookup")


async def test_measured_lengths_change_no_token(application: str) -> None:
    """A second orchestrator that measures: drafts of any length, and none, say what plain says."""
    from ray import serve

    measuring = orchestrator_beside("measuring", draft_length="measured")
    generate = measuring.options(stream=True, method_name="generate", _by_reference=False)
    rounds = Counter[str]()
    num_ties = num_answers = 0
    for index in range(6):
        for temperature in (0.0, 0.9):
            asked = replace(long_question(index, "shared_noise"), temperature=temperature)
            said = {}
            for mode in ("plain", "lossless"):
                speculation = replace(asked.speculation, mode=mode, max_draft=6)
                request = replace(asked, max_tokens=60, speculation=speculation)
                events = [event async for event in generate.remote(request)]
                said[mode] = events[-1].receipt
            lossless = said["lossless"].choices[0]
            rounds["drafted"] += lossless.drafted_rounds
            rounds["plain"] += lossless.rounds - lossless.drafted_rounds
            assert said["lossless"].plain_from == (None,)
            texts = {receipt.explanation.token_ids for receipt in said.values()}
            num_ties += len(texts) - 1
            num_answers += 1
    assert rounds["drafted"] > 0
    assert rounds["plain"] > 0
    assert num_ties <= num_answers / 100
    serve.delete("measuring")


def orchestrator_beside(name: str, **settings: Any) -> Any:
    """Another orchestrator for the same engines; its handle."""
    from ray import serve

    from cluster.placement import deployment_options
    from deployments.orchestrator.deployment import Orchestrator

    config = real_config(**settings)
    pools = [
        serve.get_deployment_handle(pool, app_name=REAL)
        for pool in ("Target", "Drafter", "Retriever")
    ]
    deployment = serve.deployment(Orchestrator).options(
        **deployment_options(config.orchestrator.pool)
    )
    return serve.run(deployment.bind(config, *pools), name=name, route_prefix=None)


async def test_an_answer_outlives_its_target(application: str) -> None:
    """New leases replay what was committed, and the text stays the same."""
    import ray
    from ray import serve

    from deployments.pools.engine_actor import engines_of

    orchestrator = serve.get_deployment_handle("Orchestrator", app_name=REAL)
    generate = orchestrator.options(stream=True, method_name="generate", _by_reference=False)
    request = replace(long_question(7, "shared_noise"), max_tokens=60, temperature=1.5)
    undisturbed = [event async for event in generate.remote(request)]
    disturbed = []
    async for event in generate.remote(request):
        disturbed.append(event)
        if len(disturbed) == 3:
            for name, engine in engines_of(REAL).items():
                if "/Target/" in name:
                    ray.kill(engine)
    first, second = undisturbed[-1].receipt, disturbed[-1].receipt
    assert len(first.explanation.token_ids[0]) > 20
    assert second.explanation.token_ids == first.explanation.token_ids
    assert second.plain_from == (None,)
    wait_until(lambda: held(application) == (0, 0), 60)


def long_question(index: int, coupling: Any) -> GenerateRequest:
    document = generate_document(40 + index, 400)
    return GenerateRequest(
        f"site-{index}",
        "local",
        (Message("user", document.questions[0].question),),
        documents=(Document(document.name, document.text),),
        seed=index,
        max_tokens=30,
        speculation=SpeculationRequest(mode="fused", coupling=coupling, max_draft=4),
        explain=True,
    )


async def test_a_long_document_travels_to_the_retriever_once_it_is_asked_for(
    application: str,
) -> None:
    document = generate_document("long", 30_000)
    assert len(document.text) > 2**16
    request = body(4, documents=[{"name": document.name, "text": document.text}])
    request["messages"][0]["content"] = document.questions[0].question
    async with httpx.AsyncClient(base_url=application, timeout=120) as client:
        first, later = [await ask(client, request) for _ in range(2)]
    assert first["rapid"]["chunks"]
    assert later["rapid"]["chunks"] == first["rapid"]["chunks"]
    assert tokens(later) == tokens(first)


def test_only_engines_import_torch_and_nobody_asks_for_a_core(application: str) -> None:
    """What runs beside the engines stays small: five deployments fit on a laptop."""
    import psutil
    import ray

    resident = {}
    for process in psutil.Process().children(recursive=True):
        name = process.name() + " ".join(process.cmdline()[:1])
        if "ray::ServeReplica:rapid" in name:
            maps = {each.path for each in process.memory_maps()}
            resident[name] = any("libtorch" in path for path in maps)
    assert len(resident) >= 5
    assert not any(resident.values()), resident
    free = ray.available_resources().get("CPU", 0.0)
    assert ray.cluster_resources()["CPU"] - free < 2

"""A server's answers as results: the real HTTP side, an orchestrator that follows a script."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import httpx
import pytest
from rich.console import Console

from deployments.api.ingress import Ingress
from deployments.config.api_config import ApiConfig
from evaluation.drivers import item_runner
from evaluation.drivers.answering import Trial, seed_of
from evaluation.drivers.in_process import Models
from evaluation.drivers.item_runner import Plan
from evaluation.drivers.over_http import Server, ServerRefused, check_can_serve, open_over_http
from evaluation.items import Item
from evaluation.loaders import load_items
from evaluation.results import RESULTS, Result, read
from evaluation.systems import BASELINES, System
from evaluation.tasks import Condition, Task
from rapid.chat_messages import Document, Message
from rapid.config import EngineConfig
from rapid.errors import ConfigurationError
from rapid.events import Finished, TextDelta
from tests.deployments.scripted import STARTED, ScriptedOrchestrator, receipt
from tests.evaluation.tiny_task import tiny_task

SERVER = Server(url="http://127.0.0.1:8000")
ITEM = Item(
    "one",
    (Message("user", "What is the harbor of Bakeno?"),),
    Document("notes", "The harbor of Bakeno is dolu. Nobody asked about the vault of Rowi."),
    ("dolu",),
    query="harbor Bakeno",
    evidence=((0, 29),),
)


class Refusing(httpx.AsyncBaseTransport):
    """Answers the first questions with errors, the others with the application."""

    def __init__(self, orchestrator: ScriptedOrchestrator, *errors: httpx.Response) -> None:
        app: Any = Ingress(orchestrator, ApiConfig(model="scripted"))  # type: ignore[arg-type]
        self.asgi = httpx.ASGITransport(app)
        self.errors = list(errors)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.method == "POST" and self.errors:
            return self.errors.pop(0)
        return await self.asgi.handle_async_request(request)


POOLS = {  # of a server, by what drafts there
    "drafter": {"target": {}, "drafter": {}, "retriever": {}},
    "target": {"target": {}, "retriever": {}},
    "lookup": {"target": {}},
}


async def asked(
    task: Task,
    system: str,
    condition: Condition,
    *errors: httpx.Response,
    orchestrator: ScriptedOrchestrator | None = None,
    drafts: str = "drafter",
) -> tuple[Result, ScriptedOrchestrator]:
    orchestrator = orchestrator or ScriptedOrchestrator()
    orchestrator.state = {"ready": True, "pools": POOLS[drafts], "engines": []}
    task = task.model_copy(update={"systems": (BASELINES[system],)})
    async with open_over_http(task, SERVER, Refusing(orchestrator, *errors)) as backend:
        return await backend.answer(Trial(ITEM, BASELINES[system], condition)), orchestrator


async def test_a_request_carries_the_system_and_the_reply_becomes_a_result():
    result, orchestrator = await asked(
        tiny_task(), "rapid-distill", Condition(name="eta 5", eta=5, retrieval_tokens=64)
    )
    (request,) = orchestrator.requests
    speculation = request.speculation
    assert (speculation.mode, speculation.transfer, speculation.eta) == ("fused", "distill", 5)
    assert (speculation.coupling, speculation.max_draft) == ("maximal", 10)
    assert (speculation.plausibility, speculation.draft_top_k) == (0.1, 64)
    assert (request.messages, request.documents) == (ITEM.messages, (ITEM.document,))
    assert (request.query, request.retrieval_tokens) == ("harbor Bakeno", 64)
    assert (request.temperature, request.max_tokens) == (0.0, 24)
    assert request.seed == result.seed == seed_of(tiny_task(), ITEM)
    assert result.key == ("one", "rapid-distill", "eta 5")
    assert result.prediction == "Hello, wörld!"
    assert (result.rounds, result.drafted, result.accepted, result.tokens) == (3, 9, 6, 8)
    assert result.by_position == ((3, 3), (3, 2), (2, 1))
    assert (result.context_tokens, result.ms["retrieval"]) == (100, 2.0)
    assert result.evidence_found


async def test_templates_are_filled_in_here_and_the_second_pass_is_plain():
    templates = {"target": "{context}? {question}", "drafter": "-", "extraction": "{reasoning}!"}
    result, orchestrator = await asked(tiny_task(templates=templates), "sd", Condition())
    first, second = orchestrator.requests
    assert first.messages[0].content == f"{ITEM.document.text}? {ITEM.messages[0].content}"
    assert (first.documents, first.speculation.mode) == ((), "lossless")
    assert second.messages[0].content == "Hello, wörld!!"
    assert second.speculation.mode == "plain"
    assert result.reasoning == "Hello, wörld!"


async def test_a_server_without_room_is_asked_again_when_it_says():
    full = httpx.Response(503, headers={"retry-after": "0"}, json={"error": {"message": "full"}})
    result, orchestrator = await asked(tiny_task(), "plain", Condition(), full, full)
    assert result.prediction == "Hello, wörld!"
    assert len(orchestrator.requests) == 1


@pytest.mark.parametrize(("system", "eta"), [("mixture", 1), ("rapid-adaptive", 8)])
async def test_a_server_is_asked_for_the_systems_own_transfer(system, eta):
    _, orchestrator = await asked(tiny_task(), system, Condition())
    speculation = orchestrator.requests[0].speculation
    assert (speculation.transfer, speculation.eta) == (system.removeprefix("rapid-"), eta)


async def test_a_refusal_is_told_and_not_repeated():
    refused = httpx.Response(400, json={"error": {"message": "the prompt is too long"}})
    with pytest.raises(ServerRefused, match="400, the prompt is too long"):
        await asked(tiny_task(), "plain", Condition(), refused)


async def test_the_papers_rule_is_asked_for_with_what_is_its_own():
    task = tiny_task(temperature=0.0, top_k=50)
    _, orchestrator = await asked(task, "rapid-paper", Condition(eta=5))
    (request,) = orchestrator.requests
    speculation = request.speculation
    assert (speculation.mode, speculation.eta) == ("paper", 5)
    assert (speculation.transfer, speculation.draft_top_k) == ("distill", None)
    assert (request.temperature, request.top_k) == (0.1, 50)


@pytest.mark.parametrize(
    ("system", "drafts"),
    [
        ("rapid-boost", "drafter"),
        ("rapid-adaptive", "drafter"),
        ("mixture", "drafter"),
        ("rag-target", "target"),
        ("rapid-self-boost", "target"),
        ("prompt-lookup", "lookup"),
    ],
)
async def test_a_server_is_asked_for_what_its_own_drafter_does(system, drafts):
    result, orchestrator = await asked(tiny_task(), system, Condition(), drafts=drafts)
    (request,) = orchestrator.requests
    assert request.speculation.mode == BASELINES[system].method
    assert (request.retrieval_tokens is None) == (drafts == "lookup")
    assert (result.evidence_found is None) == (drafts == "lookup")
    for other in POOLS.keys() - {drafts}:
        with pytest.raises(ConfigurationError) as refused:
            await asked(tiny_task(), system, Condition(), drafts=other)
        cannot, _, can = str(refused.value).partition("cannot be asked of this server")
        assert system in cannot
        assert "plain" in can
        able = can.split("from ")[1].split(", ")
        assert not {system, "plain-drafter", "rag-both"} & set(able)


@pytest.mark.parametrize(
    ("instead", "told"),
    [
        (
            {"mode": "plain", "reason": "no drafter could be had"},
            "as plain, not lossless: no drafter could be had",
        ),
        (
            {"mode": "lossless", "is_fallback": True, "reason": "no drafter: from its own text"},
            "as lossless, not lossless: no drafter: from its own text",
        ),
        ({"mode": "lossless", "plain_from": (3,)}, "lost its drafter at token 3"),
    ],
)
async def test_an_answer_without_its_drafter_is_no_answer_of_the_system(instead, told):
    end = TextDelta(0, "Hello", (), "stop")
    orchestrator = ScriptedOrchestrator(STARTED, end, Finished(replace(receipt(), **instead)))
    with pytest.raises(ServerRefused, match=told):
        await asked(tiny_task(), "sd", Condition(), orchestrator=orchestrator)


def test_what_no_server_can_do_is_refused():
    with pytest.raises(ConfigurationError) as refused:
        check_can_serve(list(BASELINES.values()), [])
    told = "plain-drafter: no server's drafter answers from everything: leave out --url"
    assert str(refused.value).startswith(told)
    servable = {name: each for name, each in BASELINES.items() if name != "plain-drafter"}
    with pytest.raises(ConfigurationError, match=r"^naive-sd, magicdec: no server drafts in this"):
        check_can_serve(list(servable.values()), [])
    with pytest.raises(ConfigurationError, match=r"^rag-both: the target of a server reads every"):
        check_can_serve([BASELINES["mixture"], BASELINES["rag-both"]], [])
    system = System(name="again", method="fused", refresh=True)
    with pytest.raises(ConfigurationError, match=r"again: no server retrieves again"):
        check_can_serve([system], [])
    system = System(name="plain", method="plain")
    with pytest.raises(ConfigurationError, match=r"condition wrong: .* cannot be corrupted"):
        check_can_serve([system], [Condition(name="wrong", corruption="unrelated")])


async def test_a_server_that_is_not_there_is_one_sentence():
    with pytest.raises(ConfigurationError, match=r"no RAPID server answers at http://127.0.0.1:9"):
        async with open_over_http(tiny_task(), Server(url="http://127.0.0.1:9")):
            pass


@pytest.mark.ray
def test_a_server_says_what_this_process_says(application, tmp_path):
    task = tiny_task(systems=["plain", "sd", "rapid-boost", "rapid-paper"])
    items = load_items(task)
    embedded = Models(EngineConfig(model="embedded:target"), EngineConfig(model="embedded:drafter"))
    said = []
    for name, plan in {
        "here": Plan(task, items, embedded, batch=2),
        "there": Plan(task, items, None, Server(url=application), batch=2),
    }.items():
        item_runner.run(plan, tmp_path / name, Console(file=io.StringIO()))
        results = read(tmp_path / name / RESULTS)[1]
        assert not any(each.error for each in results)
        said.append({each.key: (each.prediction, each.tokens) for each in results})
    assert said[0] == said[1]


async def test_cutting_contexts_needs_a_tokenizer():
    task = tiny_task(context_tokens=16)
    with pytest.raises(ConfigurationError, match="name it with --target"):
        await asked(task, "plain", Condition())


async def test_a_server_that_does_not_show_its_pools_asks_for_an_operators_key():
    orchestrator = ScriptedOrchestrator()
    orchestrator.state = {"ready": True}
    with pytest.raises(ConfigurationError, match="operator: true"):
        async with open_over_http(tiny_task(), SERVER, Refusing(orchestrator)):
            pass

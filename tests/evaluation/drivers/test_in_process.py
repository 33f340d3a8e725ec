"""Every baseline on the embedded models, in this process."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace

import pytest

from evaluation.drivers import in_process
from evaluation.drivers.answering import BackendLost, Trial, trials_left
from evaluation.drivers.in_process import Models, open_in_process
from evaluation.loaders import load_items
from evaluation.reports.run_results import RunResults
from evaluation.results import RESULTS, Result, read
from evaluation.systems import BASELINES
from evaluation.tasks import Condition
from rapid.config import EngineConfig
from rapid.engines.engine import Engine
from rapid.engines.forward.weights import loading
from tests.evaluation.embedded_run import MODELS, ByKey, answered
from tests.evaluation.tiny_task import SETTINGS, tiny_task
from tests.rapid.engines.parallel.conftest import followers_of
from tests.rapid.tiny_models import out_of_memory


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> ByKey:
    """Two items by every baseline, retrieval as it is and unrelated, and the drafter left out."""
    conditions = [Condition(), Condition(name="unrelated", corruption="unrelated")]
    whole = tiny_task(systems=list(BASELINES), conditions=conditions)
    # Only these are asked what they say without the drafter, and with nothing else.
    extremes = [Condition(name="eta 0", eta=0), Condition(name="eta 1000", eta=1000)]
    few = tiny_task(systems=["rag-both", "rapid-boost", "mixture"], conditions=extremes)
    runs = [answered(each, tmp_path_factory.mktemp("run")) for each in (whole, few)]
    return runs[0] | runs[1]


def of(results: ByKey, system: str, condition: str = "as is") -> list[Result]:
    found = [
        each for (_, name, under), each in results.items() if (name, under) == (system, condition)
    ]
    return sorted(found, key=lambda each: each.item)


@pytest.mark.parametrize("condition", ["as is", "unrelated"])
def test_lossless_systems_say_what_plain_says(results, condition):
    expected = [each.prediction for each in of(results, "plain", condition)]
    assert all(expected)
    for name, system in BASELINES.items():
        if system.method == "lossless":
            assert [each.prediction for each in of(results, name, condition)] == expected, name


def test_every_system_answers_and_counts(results):
    for name, system in BASELINES.items():
        for each in of(results, name):
            assert each.error is None
            assert 0 < each.tokens <= 24
            drafter_alone = name in ("plain-drafter", "rag-drafter", "rag-target")
            assert (each.context_tokens == 0) == (system.method == "rag" or name == "rag-both")
            assert (each.retrieved_tokens > 0) == system.reads_retrieved
            assert ("target_prefill" in each.ms) == (not drafter_alone)
            reads_two = system.is_drafted and system.drafts not in ("window", "lookup")
            assert ("drafter_prefill" in each.ms) == (drafter_alone or reads_two)
            assert each.ms["decode"] >= each.ms["draft"] + each.ms["verify"] - 1
            judged = sum(judged for judged, _ in each.by_position)
            kept = sum(kept for _, kept in each.by_position)
            assert kept == each.accepted <= judged <= each.drafted
            if not drafter_alone and name not in ("plain", "prompt-lookup"):
                assert each.drafted > 0


def said(results: ByKey, system: str, condition: str = "as is") -> list[str]:
    return [each.prediction for each in of(results, system, condition)]


def test_the_drafter_alone_says_what_it_says_as_a_target(results, tmp_path):
    drafter = Models(MODELS.drafter, None)
    alone = answered(tiny_task(systems=["plain"]), tmp_path, models=drafter)
    assert said(results, "plain-drafter") == said(alone, "plain") != said(results, "plain")
    lengths = [each.context_tokens for each in of(results, "plain-drafter")]
    assert lengths == [each.context_tokens for each in of(results, "plain")]


def test_both_on_retrieved_text_without_the_drafter_are_the_targets_rag(results):
    assert said(results, "rag-both", "eta 0") == said(results, "rag-target")
    assert said(results, "rapid-boost", "eta 0") == said(results, "plain")
    assert said(results, "rag-target") != said(results, "plain")


def test_a_mixture_goes_from_plain_to_the_drafters_rag(results):
    assert said(results, "mixture", "eta 0") == said(results, "plain")
    assert said(results, "mixture", "eta 1000") == said(results, "rag-drafter")
    assert said(results, "plain") != said(results, "rag-drafter")


def test_a_context_that_the_drafter_cannot_read_is_told_with_numbers(tmp_path):
    task = tiny_task(systems=["plain", "plain-drafter", "naive-sd"])
    small = Models(MODELS.target, EngineConfig(model="embedded:drafter", max_context=64))
    told = answered(task, tmp_path, models=small)
    assert all(each.error is None for each in of(told, "plain"))
    for name in ("plain-drafter", "naive-sd"):
        assert all("this model's context of 64" in str(each.error) for each in of(told, name))


def test_unrelated_retrieval_hides_the_evidence_and_leaves_the_target_alone(tmp_path):
    facts = {"loader": "generated", "split": "dev", "options": {"lengths": {300: 2}}}
    conditions = [Condition(), Condition(name="unrelated", corruption="unrelated")]
    task = tiny_task(source=facts, systems=["plain", "rag-drafter"], conditions=conditions)
    results = answered(task, tmp_path)
    assert all(each.evidence_found for each in of(results, "rag-drafter"))
    assert not any(each.evidence_found for each in of(results, "rag-drafter", "unrelated"))
    same = [(each.prediction, each.seed) for each in of(results, "plain")]
    assert [(each.prediction, each.seed) for each in of(results, "plain", "unrelated")] == same


def test_an_answer_that_lost_its_drafter_is_an_error_and_is_answered_again(
    results, tmp_path, monkeypatch
):
    # One alone: of two, the other may be reading its prompt in the step that fails.
    options = SETTINGS["source"]["options"] | {"lengths": {900: 1}}
    source = SETTINGS["source"] | {"options": options}
    task = tiny_task(systems=["plain", "rapid-boost"], source=source)
    with ExitStack() as broken:

        def load_model(config):
            model = loading.load_model(config)
            if config.model == "embedded:drafter":
                broken.enter_context(out_of_memory(model.model, forward=6))
            return model

        monkeypatch.setattr(in_process, "load_replica", load_model)
        first = answered(task, tmp_path)
    lost = [each for each in of(first, "rapid-boost") if each.error is not None]
    assert lost
    for each in lost:
        assert "the drafter gave no block" in each.error
        assert "OutOfMemoryError" in each.error
        assert (each.prediction, each.tokens) == ("", 0)
    assert all(each.error is None for each in of(first, "plain"))
    monkeypatch.undo()
    again = answered(task, tmp_path)
    assert {key: each.prediction for key, each in again.items()} == {
        key: results[key].prediction for key in again
    }
    assert RunResults.read(tmp_path).without_drafter == []


def test_a_run_ends_when_an_engine_closes_and_the_same_command_goes_on(
    results, tmp_path, monkeypatch
):
    task = tiny_task(systems=["plain", "rag-drafter"])
    engines: list[Engine] = []

    def engine(*arguments, **options):
        engines.append(Engine(*arguments, **options))
        return engines[-1]

    monkeypatch.setattr("rapid.engines.local_ports.Engine", engine)
    answer = in_process.InProcess._answer

    async def answer_until_the_drafter_closes(self, trial):
        if trial.system.name == "rag-drafter":
            await asyncio.to_thread(engines[1].close)
        return await answer(self, trial)

    with monkeypatch.context() as closing:
        closing.setattr(in_process.InProcess, "_answer", answer_until_the_drafter_closes)
        with pytest.raises(BackendLost, match="an engine of this run has closed"):
            answered(task, tmp_path)
    kept = tmp_path / RESULTS  # is not there if the first answer was lost
    assert not kept.exists() or all(each.error is None for each in read(kept)[1])
    again = answered(task, tmp_path)
    assert {key: each.prediction for key, each in again.items()} == {
        key: results[key].prediction for key in again
    }


def test_sampling_from_the_best_token_alone_is_greedy(results, tmp_path):
    systems = ["plain", "rag-drafter", "sd"]
    sampled = answered(tiny_task(systems=systems, temperature=1.0, top_k=1), tmp_path)
    for name in systems:
        said = [each.prediction for each in of(results, name)]
        assert [each.prediction for each in of(sampled, name)] == said


def test_without_a_drafter_the_target_is_its_own(results, tmp_path):
    alone = answered(tiny_task(systems=["sd"]), tmp_path, models=Models(MODELS.target, None))
    drafts = [(each.drafted, each.accepted) for each in of(alone, "sd")]
    assert drafts == [(each.drafted, each.accepted) for each in of(results, "sd-self")]


@pytest.mark.parametrize(
    ("reuses", "tenants"), [(False, {"plain", "sd"}), (True, {"local"})], ids=["apart", "reused"]
)
def test_systems_read_apart_unless_the_task_reuses_what_was_read(
    monkeypatch, tmp_path, reuses, tenants
):
    seen: set[str] = set()

    class Recorded(in_process.Session):
        def __init__(self, terms):
            seen.add(terms.tenant)
            super().__init__(terms)

    monkeypatch.setattr(in_process, "Session", Recorded)
    answered(tiny_task(systems=["plain", "sd"], reuses_prefill=reuses), tmp_path)
    assert seen == tenants


async def test_systems_that_read_the_same_share_one_prefill_where_that_is_asked(monkeypatch):
    """Tokens read of two questions on one book, which stands first, by seven systems."""
    read: Counter[Engine] = Counter()
    prefill = Engine.prefill

    async def recorded(self, lease_id):
        receipt = await prefill(self, lease_id)
        read[self] += receipt.num_tokens - receipt.num_cached_tokens
        return receipt

    monkeypatch.setattr(Engine, "prefill", recorded)
    systems = ["plain", "rag-target", "rag-drafter", "magicdec", "sd-self", "rapid-self-boost"]
    systems += ["rapid-boost", "rapid-adaptive", "plain-drafter"]
    wording = dict.fromkeys(("target", "drafter"), "{context}\n\n{question}")
    counts: dict[bool, list[int]] = {}
    for reuses in (False, True):
        task = tiny_task(systems=systems, templates=wording, reuses_prefill=reuses)
        first, second = load_items(task)
        items = [first, replace(second, document=first.document)]
        async with open_in_process(task, MODELS, items, items, batch=1) as backend:
            whole = [len(backend._prompter.target_prompt(each, Condition())) for each in items]
            found = [await backend._prompter.retrieve(each, Condition()) for each in items]
            short = [len(backend._prompter.encode(each, True)) for each in found]
            read.clear()
            for trials in trials_left(items, task):
                for trial in trials:
                    await backend.answer(trial)
            counts[reuses] = [read[engine] for engine in backend._engines]
    page = EngineConfig(model="embedded:target").page_tokens
    few = page * len(systems) * len(items)  # an engine reuses whole pages
    questions = 4 * page
    assert counts[True][0] <= max(whole) + sum(short) + questions + few
    assert counts[True][1] <= max(whole) + sum(short) + questions + few
    assert counts[False][0] >= 6 * max(whole)


@pytest.mark.slow
async def test_a_model_in_two_processes_answers_as_in_one(results, tmp_path):
    in_two = EngineConfig(model="embedded:target", tensor_parallel=2)
    task = tiny_task(systems=["plain", "rapid-self-boost"])
    told = await asyncio.to_thread(answered, task, tmp_path, models=Models(in_two, None))
    assert {key: each.prediction for key, each in told.items()} == {
        key: results[key].prediction for key in told
    }
    assert not followers_of(os.getpid())


async def test_no_engine_holds_a_prefill_back_for_the_sake_of_other_answers(monkeypatch):
    settings: list[EngineConfig] = []

    def engine(loaded, config, **options):
        settings.append(config)
        return Engine(loaded, config, **options)

    monkeypatch.setattr("rapid.engines.local_ports.Engine", engine)
    task = tiny_task(systems=["sd"])
    items = load_items(task)
    async with open_in_process(task, MODELS, items, items, batch=2):
        assert [each.prefill_slowdown for each in settings] == [in_process.PREFILL_SLOWDOWN] * 2


def test_a_window_that_leaves_everything_in_sight_drafts_what_the_target_says(tmp_path):
    wide = {"name": "wide", "method": "lossless", "drafts": "window", "window": 4096}
    narrow = wide | {"name": "narrow", "window": 8}
    results = answered(tiny_task(systems=[wide, narrow]), tmp_path)
    assert all(each.accepted == each.drafted for each in of(results, "wide"))
    assert all(each.accepted < each.drafted for each in of(results, "narrow"))


def test_a_second_pass_reads_the_first(tmp_path):
    templates = {
        "target": "{context}\n\n{question}",
        "drafter": "{context}\n\n{question}",
        "extraction": "It was said: {reasoning}\n\n{question}",
    }
    task = tiny_task(systems=["sd", "rag-drafter"], templates=templates, extraction_tokens=5)
    without_target = tiny_task(systems=["plain-drafter"], templates=templates)
    for each in [
        *answered(task, tmp_path / "both").values(),
        *answered(without_target, tmp_path / "drafter").values(),
    ]:
        assert each.error is None
        assert each.reasoning
        assert each.prediction != each.reasoning


async def test_a_rejected_draft_has_the_answer_so_far_looked_up(monkeypatch):
    engines: list[Engine] = []

    def engine(*arguments, **options):
        engines.append(Engine(*arguments, **options))
        return engines[-1]

    monkeypatch.setattr("rapid.engines.local_ports.Engine", engine)
    once = {"name": "once", "method": "lossless"}
    lossless = once | {"name": "lossless", "refresh": True}
    by_itself = lossless | {"name": "by itself", "drafts": "target"}
    fused = lossless | {"name": "fused", "method": "fused"}
    unrelated = Condition(name="unrelated", corruption="unrelated")
    task = tiny_task(systems=["plain", once, lossless, by_itself, fused], conditions=[unrelated])
    items = load_items(task)
    results: ByKey = {}
    async with open_in_process(task, MODELS, items, items, batch=1) as backend:
        retriever = backend._prompter._retriever
        retrieve, queries = retriever.retrieve, []

        async def recorded(tenant, documents, query, budget):
            queries.append(query)
            return await retrieve(tenant, documents, query, budget)

        monkeypatch.setattr(retriever, "retrieve", recorded)
        for item in items:
            for system in task.systems:
                queries.clear()
                each = await backend.answer(Trial(item, system, unrelated))
                results[each.key] = each
                question = item.messages[-1].content
                again = [query for query in queries if query != question]
                assert len(again) == each.refreshes
                assert ("refresh" in each.ms) == (each.refreshes > 0)
                for query in again:
                    assert query.startswith(f"{question} ")
                    so_far = query.removeprefix(f"{question} ")
                    assert so_far
                    assert each.prediction.startswith(so_far)
                for used in engines:
                    used.check_integrity()
                    assert used.status().kv_pages_in_use == 0
    said, refreshes = {}, {}
    for system in task.systems:
        answers = of(results, system.name, "unrelated")
        said[system.name] = [each.prediction for each in answers]
        refreshes[system.name] = sum(each.refreshes for each in answers)
    assert said["plain"] == said["once"] == said["lossless"] == said["by itself"]
    assert refreshes["plain"] == refreshes["once"] == 0
    assert min(refreshes[name] for name in ("lossless", "by itself", "fused")) > 0


def test_an_item_that_cannot_fit_is_an_error_with_numbers_and_the_others_are_answered(tmp_path):
    task = tiny_task(systems=["plain", "rag-drafter"])
    small = Models(EngineConfig(model="embedded:target", max_context=64), MODELS.drafter)
    told = answered(task, tmp_path, models=small)
    assert all("this model's context of 64" in str(each.error) for each in of(told, "plain"))
    assert all(each.error is None for each in of(told, "rag-drafter"))


@pytest.mark.parametrize("transfer", ["adaptive", "boost"])
def test_under_adaptive_the_target_reads_what_was_retrieved_as_well(tmp_path, transfer):
    system = {"name": "fused", "method": "fused", "drafts": "drafter", "transfer": transfer}
    results = answered(tiny_task(systems=[system]), tmp_path)
    for each in of(results, "fused"):
        assert each.error is None
        assert ("witness_prefill" in each.ms) == (transfer == "adaptive")

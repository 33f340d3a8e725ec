"""The runs that the options of ``rapid eval`` ask for."""

from __future__ import annotations

from pathlib import Path

import pytest

from deployments.cli.evals.eval_options import EvalOptions
from deployments.cli.evals.eval_plan import plans
from evaluation.recipes import load_recipe
from rapid.config import EngineConfig, SpeculationConfig
from rapid.transfers import OWN_RULES
from tests.deployments.cli.eval_command import rapid_eval, words
from tests.evaluation.benchmark_files import BENCHMARKS

EXAMPLES = Path(__file__).parents[4] / "examples"


def test_a_mode_is_a_system_of_its_own(task):
    shown = words(
        rapid_eval(
            "--task", task, "--dry-run", "--mode", "fused", "--eta", "3", "--transfer", "distill"
        )
    )
    assert "fused-eta-3.0-transfer-distill: fused, drafts drafter" in shown
    assert "eta 3, temperature 0" in shown


def test_a_system_named_twice_answers_once(task):
    shown = words(rapid_eval("--task", task, "--dry-run", "--system", "sd", "--system", "sd"))
    assert "2, 2 answers" in shown


def test_a_recipe_of_several_tasks_runs_them_one_after_the_other_on_a_folder_of_files():
    shown = words(
        rapid_eval(
            "--dry-run", "--recipe", "infinitebench-llama-3.1-8b-self", "--data", str(BENCHMARKS)
        )
    )
    places = [shown.index(f"task infinitebench-{name}") for name in ("qa", "mc", "sum")]
    assert places == sorted(places)
    assert shown.count("items 3, 3 answers") == 3


@pytest.mark.parametrize(
    ("embedder", "told"),
    [
        ("lexical", "retrieval.embedder lexical retrieval.floor None"),
        ("bge-m3", "retrieval.embedder bge-m3 retrieval.floor 0.3"),
        ("bm25", "--embedder bm25: give lexical, sentence-transformers or bge-m3"),
    ],
)
def test_another_embedder_comes_with_its_own_floor(embedder, told):
    options = ("--data", str(BENCHMARKS), "--embedder", embedder)
    assert told in words(rapid_eval("--dry-run", "--task", "longbench-v2", *options))


def test_an_item_seed_asks_about_other_generated_documents_in_a_run_of_their_own():
    options = EvalOptions(task="laptop-quick", item_seed=7)
    ((plan, folder),) = plans(options)
    assert plan.task.source.options["seed"] == 7
    assert folder == Path(".eval/laptop-quick-7")


def test_an_item_seed_is_refused_where_items_are_not_generated():
    shown = words(rapid_eval("--dry-run", "--task", "real-text", "--item-seed", "7"))
    assert "--item-seed goes with generated documents, and those of real-text are not" in shown


def test_a_server_is_asked_by_one_process_with_its_own_models(task):
    options = EvalOptions(
        task=task, url="http://127.0.0.1:9/", api_key="secret", target="embedded:target"
    )
    ((plan, folder),) = plans(options)
    assert (plan.models, plan.batch, plan.workers) == (None, 8, 1)
    assert plan.server is not None
    assert plan.server.public() == {"url": "http://127.0.0.1:9", "tokenizer": "embedded:target"}
    assert plan.server.api_key is not None
    assert plan.server.api_key.get_secret_value() == "secret"
    assert folder == Path(".eval/tiny")


def test_a_named_target_replaces_the_recipes_and_a_drafter_that_is_not_needed_is_left_out():
    recipe = load_recipe("llama-3.1-8b-by-70b")
    ((plan, _),) = plans(EvalOptions(recipe=[recipe.name], target="embedded:target"))
    assert plan.models is not None
    assert plan.models.target == EngineConfig(model="embedded:target")
    assert plan.models.drafter == recipe.drafter
    assert plan.recipes == (recipe.name,)
    ((plan, _),) = plans(EvalOptions(recipe=[recipe.name], system=["plain"]))
    assert plan.models is not None
    assert (plan.models.target, plan.models.drafter) == (recipe.target, None)


def test_a_file_registers_the_rule_that_a_mode_names(task):
    mine = EXAMPLES / "own_transfer.py"
    asked = ("--task", task, "--dry-run", "--mode", "fused", "--transfer", "geometric")
    try:
        told = words(rapid_eval(*asked))
        assert "--transfer: must be 'distill', 'boost', 'adaptive' or 'mixture', or a name" in told
        assert "fused-transfer-geometric: fused" in words(rapid_eval(*asked, "--rules", str(mine)))
        told = words(rapid_eval(*asked, "--rules", str(mine), "--url", "http://127.0.0.1:9"))
        assert "--rules and --url do not go together" in told
    finally:
        OWN_RULES.clear()


def test_a_dtype_is_that_of_both_models_wherever_they_were_named():
    named = EvalOptions(task="laptop", target="/models/a", dtype="bfloat16")
    ((plan, _),) = plans(named)
    assert plan.models is not None
    assert plan.models.target == EngineConfig(model="/models/a", dtype="bfloat16")
    assert plan.models.drafter == EngineConfig(model="embedded:drafter", dtype="bfloat16")
    recipe = load_recipe("qwen2.5-7b-self")
    ((plan, _),) = plans(EvalOptions(recipe=[recipe.name], dtype="float16"))
    assert plan.models is not None
    assert plan.models.target == recipe.target.model_copy(update={"dtype": "float16"})
    assert plan.models.drafter is None


def test_a_part_of_the_items_has_a_folder_of_its_own(task):
    ((plan, folder),) = plans(EvalOptions(task=task, shard="2/3", reuse_prefill=True))
    assert (plan.shard, folder) == ((2, 3), Path(".eval/tiny/2-of-3"))
    assert plan.task.reuses_prefill
    assert "batch 8, workers 1, part 1 of 2" in words(
        rapid_eval("--task", task, "--dry-run", "--shard", "1/2", "--workers", "1")
    )


def test_another_system_of_a_recipe_is_as_its_task_has_it():
    asked = EvalOptions(recipe=["llama-3.1-8b-by-70b"], system=["rapid-adaptive", "rapid-paper"])
    ((plan, _),) = plans(asked)
    assert [each.eta for each in plan.task.systems] == [SpeculationConfig().eta, 50]

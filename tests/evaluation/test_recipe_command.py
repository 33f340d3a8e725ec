from pathlib import Path

import pytest
from typer.testing import CliRunner

from deployments.cli import app

BENCHMARKS = str(Path(__file__).parent / "benchmarks")


def printed(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["eval", "--dry-run", *arguments])
    return " ".join(result.output.split())


def test_a_recipe_shows_its_models_and_settings_without_loading_anything():
    shown = printed("--recipe", "llama-3.1-8b-by-70b-cot")
    assert "THUDM/LongBench-v2 from the hub" in shown
    assert "rapid-paper: paper, drafts drafter, blocks of 10, eta 40, temperature 0.1" in shown
    assert "meta-llama/Llama-3.1-8B-Instruct" in shown
    assert "meta-llama/Llama-3.1-70B-Instruct" in shown


def test_a_recipe_of_several_tasks_runs_them_one_after_the_other_on_a_folder_of_files():
    shown = printed("--recipe", "infinitebench-llama-3.1-8b-self", "--data", BENCHMARKS)
    places = [shown.index(f"task infinitebench-{name}") for name in ("qa", "mc", "sum")]
    assert places == sorted(places)
    assert shown.count("items 3, 3 answers") == 3


@pytest.mark.parametrize(
    ("embedder", "told"),
    [
        ("lexical", "retrieval.embedder lexical retrieval.floor None"),
        ("bge-m3", "retrieval.embedder bge-m3 retrieval.floor 0.3"),
        ("bm25", "--embedder bm25: give lexical or bge-m3"),
    ],
)
def test_another_embedder_comes_with_its_own_floor(embedder, told):
    assert told in printed("--task", "longbench-v2", "--data", BENCHMARKS, "--embedder", embedder)

"""What ``rapid eval`` shows without running anything."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from deployments.cli.evals.eval_display import show_summary
from evaluation.recipes import recipe_names
from tests.deployments.cli.eval_command import rapid_eval, words


def test_a_dry_run_shows_everything_and_leaves_nothing(task, tmp_path):
    out = tmp_path / "run"
    shown = rapid_eval("--task", task, "--dry-run", "--out", str(out), "--batch", "3")
    assert shown.exit_code == 0
    for part in (
        "tiny: two generated documents",
        "2, 4 answers",
        "rapid-boost: fused, drafts drafter, blocks of 10, eta 10, temperature 0",
        "embedded:target",
        "embedded:drafter",
        "retrieval.tokens 160",
        "batch 3",
        "user: Document ",
    ):
        assert part in words(shown)
    for title in ("systems", "settings"):  # once, before the first of its lines
        assert words(shown).count(title) == 1
    assert not out.exists()


def test_a_recipe_shows_its_models_and_settings_without_loading_anything():
    shown = words(rapid_eval("--dry-run", "--recipe", "llama-3.1-8b-by-70b-cot"))
    assert "THUDM/LongBench-v2 from the hub" in shown
    assert "rapid-paper: paper, drafts drafter, blocks of 10, eta 40, temperature 0.1" in shown
    assert "top_k 50" in shown
    assert "meta-llama/Llama-3.1-8B-Instruct" in shown
    assert "meta-llama/Llama-3.1-70B-Instruct" in shown


def test_the_list_has_tasks_recipes_and_systems():
    shown = rapid_eval("--list").output
    for name in ("longbench-v2", "magicdec", *recipe_names()):
        assert name in shown
    assert len(shown.splitlines()) < 80


def test_programs_get_the_list_as_json():
    told = json.loads(rapid_eval("--list", "--json").output)
    names = {kind: [each["name"] for each in entries] for kind, entries in told.items()}
    assert names.keys() == {"tasks", "recipes", "systems"}
    assert "longbench-v2" in names["tasks"]
    assert "magicdec" in names["systems"]
    assert all(each["summary"] for entries in told.values() for each in entries)
    refused = rapid_eval("--json", "--task", "laptop-quick")
    assert refused.exit_code == 2
    assert "--json is for --list" in words(refused)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_report_is_a_table_on_a_terminal_and_markdown_elsewhere(is_terminal):
    written = io.StringIO()
    console = Console(file=written, force_terminal=is_terminal, width=80)
    show_summary("| system | all |\n| --- | --- |\n| plain | 1.000 |", console)
    assert "plain" in written.getvalue()
    assert ("| --- |" in written.getvalue()) != is_terminal

"""The command ``rapid eval``, which compares quality, speed and cost of modes and baselines."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from deployments.cli.evals.eval_options import EvalOptions, gather_options
from deployments.cli.terminal import USAGE, err, fail, note, out

if TYPE_CHECKING:
    from evaluation.drivers.item_runner import Plan

_EXTRA = ("datasets", "matplotlib", "rouge_score")  # checked before, not after, hours of answers


@gather_options
def evaluate(options: EvalOptions) -> None:
    """Compare modes and baselines on a task: quality, speed and cost, with intervals.

    Each answer is written as a line of OUT/results.jsonl; the tables and plots in OUT/report.html
    and OUT/report.md are made from these lines. With the embedded models, start with:
    rapid eval --task laptop-quick
    """
    if options.is_list:
        from deployments.cli.evals.eval_display import show_list

        show_list(as_json=options.as_json)
        return
    if options.as_json:
        fail("--json is for --list: a run writes OUT/results.jsonl", USAGE)
    if options.compare is not None:
        _compare(*options.compare)
        return
    if (options.task is None) == (not options.recipe and options.node is None):
        fail(
            "give --task or --recipe (--list shows what there is), or --node without --task", USAGE
        )
    if options.quantization is not None and options.node is None:
        fail(
            "--quantization goes with --node; a recipe's name says it, as llama-3.1-70b-int4", USAGE
        )
    from deployments.cli.evals.eval_display import show_plan
    from deployments.cli.evals.eval_plan import plans
    from rapid.errors import RapidError

    try:
        if options.node is not None:
            from deployments.cli.evals.eval_node import run_node

            run_node(options)
            return
        for plan, folder in plans(options):
            if options.dry_run:
                show_plan(plan, folder, options)
            else:
                _run(plan, folder, options)
    except (RapidError, ValueError, OSError) as error:
        fail(str(error), _status_of(error))


def _status_of(error: Exception) -> int:
    """Return the exit status: whether what was typed is wrong, or something failed."""
    from rapid.errors import ConfigurationError

    return USAGE if isinstance(error, ConfigurationError | ValueError) else 1


def _compare(before: Path, after: Path) -> None:
    from deployments.cli.evals.eval_display import show_summary
    from evaluation.reports.comparison import compare
    from rapid.errors import RapidError

    try:
        show_summary(compare(before, after), out)
    except (RapidError, ValueError, OSError) as error:
        fail(str(error), _status_of(error))


def _run(plan: Plan, folder: Path, options: EvalOptions) -> None:
    """Run or resume a plan, and print the summary of its report."""
    from deployments.cli.evals.eval_display import show_summary
    from evaluation.drivers import item_runner
    from evaluation.loaders import load_items

    if missing := [name for name in _EXTRA if find_spec(name) is None]:
        fail(f"{', '.join(missing)} cannot be imported: pip install 'rapid-serve[eval]'")
    plan = replace(plan, items=load_items(plan.task, options.data, options.limit))
    if not plan.mine:
        fail(f"--shard {options.shard}: the task has only {len(plan.items)} items", USAGE)
    note(f"{plan.task.name}: {len(plan.mine)} items, {plan.num_answers} answers, to {folder}")
    try:
        item_runner.run(plan, folder, err)
    except KeyboardInterrupt:
        note(f"interrupted; what is done is kept in {folder}: the same command goes on from there")
        raise typer.Exit(130) from None
    if plan.shard is not None:
        note(
            "done; the report of all parts: python -m evaluation.reports.report "
            f"{folder.parent} --out {folder.parent}"
        )
        return
    from evaluation.reports import report

    page = report.write(folder)
    show_summary(report.summary(folder), out)
    note(f"written to {page} and, with the plots, to {page.with_name(report.WEB_PAGE)}")

"""What ``rapid eval`` prints besides a report: the plan of a run, and the list of what there is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from deployments.cli.evals.eval_options import EvalOptions
from deployments.cli.terminal import make_title_table, out, print_json
from evaluation.items import Item
from evaluation.loaders import load_items
from evaluation.recipes import load_recipe, recipe_names
from evaluation.systems import BASELINES, System
from evaluation.tasks import Task, load_task, task_names
from rapid.config import EngineConfig

if TYPE_CHECKING:
    from evaluation.drivers.item_runner import Plan

_SHOWN = 600  # characters of each end of an example prompt


def show_plan(plan: Plan, folder: Path, options: EvalOptions) -> None:
    """Print what would be run, without loading models or downloading data."""
    task = plan.task
    is_remote = task.source.hub is not None and options.data is None
    items = [] if is_remote else load_items(task, options.data, options.limit)
    table = make_title_table()

    def add(title: str, *lines: str) -> None:
        for index, line in enumerate(lines):
            table.add_row("" if index else title, escape(line))

    add("task", f"{task.name}: {task.description}")
    if is_remote:
        at_most = f", the first {options.limit}" if options.limit else ""
        add("items", f"{task.source.hub} from the hub{at_most} (or --data FILE)")
    else:
        add("items", f"{len(items)}, {replace(plan, items=items).num_answers} answers")
    add("systems", *(_settings_of(system, plan) for system in task.systems))
    for index, condition in enumerate(task.conditions):
        changes = condition.model_dump(exclude_defaults=True, exclude={"name"})
        told = ", ".join(f"{key} {value}" for key, value in changes.items())
        add("" if index else "conditions", f"{condition.name}: {told or 'none'}")
    if plan.server is not None:
        add("server", plan.server.url)
    if plan.models is not None:
        add("target", _model_of(plan.models.target))
        drafter = plan.models.drafter
        add("drafter", _model_of(drafter) if drafter else "none but the target")
    settings = task.model_dump(
        include={"metrics", "max_tokens", "temperature", "top_k", "context_tokens"}
    )
    settings |= {f"retrieval.{key}": value for key, value in task.retrieval.model_dump().items()}
    add(
        "settings",
        *(
            f"{key} {', '.join(value) if isinstance(value, tuple) else value}"
            for key, value in settings.items()
        ),
    )
    part = "" if plan.shard is None else f", part {plan.shard[0]} of {plan.shard[1]}"
    add("", f"batch {plan.batch}, workers {plan.workers}{part}")
    add("to", str(folder))
    out.print(table)
    out.print("\n[bold]what the target reads[/]" + (f" of item {items[0].id}" if items else ""))
    out.print(_example(task, items[0] if items else None), markup=False, highlight=False)


def show_list(*, as_json: bool) -> None:
    """Print the names of tasks, recipes and systems, and what each is."""
    rows = {
        "tasks": [(name, load_task(name).description) for name in task_names()],
        "recipes": [(name, ", ".join(load_recipe(name).tasks)) for name in recipe_names()],
        "systems": [
            (each.name, each.method + ("" if each.is_plain else f", {each.drafts}"))
            for each in BASELINES.values()
        ],
    }
    if as_json:
        described = {
            title: [{"name": name, "summary": told} for name, told in entries]
            for title, entries in rows.items()
        }
        print_json(described)
        return
    # Fifty recipes are of a few tasks: the names of each are a paragraph.
    by_tasks: dict[str, list[str]] = {}
    for name, tasks in rows.pop("recipes"):
        by_tasks.setdefault(tasks, []).append(name)
    for title, entries in rows.items():
        table = Table(title=title, title_justify="left", show_header=False, box=None)
        for entry in entries:
            table.add_row(*map(escape, entry))
        out.print(table)
    for tasks, names in by_tasks.items():
        out.print(Padding(f"[italic]recipes for {tasks}[/]\n{', '.join(names)}", (0, 1)))


def _settings_of(system: System, plan: Plan) -> str:
    told = f"{system.name}: {system.method}"
    if system.is_drafted:
        told += f", drafts {system.drafts}, blocks of {system.block}"
    elif not system.is_plain:
        told += f", answers {system.drafts}"
    if system.fuses:
        etas = {system.eta_in(each.eta) for each in plan.task.conditions}
        told += f", eta {' / '.join(f'{eta:g}' for eta in sorted(etas))}"
    return f"{told}, temperature {system.temperature_in(plan.task.temperature):g}"


def _model_of(config: EngineConfig) -> str:
    settings = config.model_dump(exclude_defaults=True)
    name = settings.pop("model")
    return f"{name} {settings}" if settings else str(name)


def _example(task: Task, item: Item | None) -> str:
    """Return what the target reads of `item`, without its middle if it is long."""
    if item is None:
        return task.templates.target if task.templates else "the chat, with its document"
    from evaluation.drivers.prompter import target_chat  # imports torch, which takes seconds

    chat = target_chat(task, item, item.document)
    text = "\n\n".join(f"{message.role}: {message.text}" for message in chat)
    left_out = len(text) - 2 * _SHOWN
    if left_out <= 0:
        return text
    return f"{text[:_SHOWN]}\n[... {left_out:,} characters ...]\n{text[-_SHOWN:]}"


def show_summary(summary: str, console: Console) -> None:
    """Print the Markdown of a report: as tables on a terminal, as it is for a file or program."""
    from rich.markdown import Markdown

    if console.is_terminal:
        console.print(Markdown(summary))
    else:
        console.print(summary, markup=False, highlight=False, soft_wrap=True)

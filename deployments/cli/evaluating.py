"""The command ``rapid eval``, which compares quality, speed and cost of modes and baselines."""

from __future__ import annotations

import os
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from deployments.cli.terminal import err, fail, note, out

if TYPE_CHECKING:
    from evaluation.drivers.runner import Plan
    from evaluation.items import Item
    from evaluation.recipes import Recipe
    from evaluation.systems import System
    from evaluation.tasks import Retrieval, Task

_TARGET, _DRAFTER = "embedded:target", "embedded:drafter"
_WHAT, _WHO, _HOW = "What is asked", "Who answers", "How it is run"
_EXTRA = ("datasets", "matplotlib", "rouge_score")  # checked before, not after, hours of answers
_SHOWN = 600  # characters of each end of an example prompt


def evaluate(
    task: Annotated[
        str | None,
        typer.Option(
            help="Name (--list shows them) or .yaml file.",
            show_default=False,
            rich_help_panel=_WHAT,
            metavar="NAME|FILE",
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="The official file, or a folder that holds it, instead of the hub's copy.",
            show_default=False,
            rich_help_panel=_WHAT,
            metavar="PATH",
        ),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            help="One published row: its tasks, models, settings.",
            show_default=False,
            rich_help_panel=_WHAT,
            metavar="NAME",
        ),
    ] = None,
    system: Annotated[
        list[str] | None,
        typer.Option(
            help="Which system answers; may be repeated. By default the task's.",
            show_default=False,
            rich_help_panel=_WHO,
            metavar="NAME",
        ),
    ] = None,
    mode: Annotated[
        str | None,
        typer.Option(
            help="One system instead: plain, lossless, fused, paper or rag.",
            show_default=False,
            rich_help_panel=_WHO,
            metavar="MODE",
        ),
    ] = None,
    eta: Annotated[
        float | None,
        typer.Option(
            help="With --mode fused or paper.",
            show_default=False,
            rich_help_panel=_WHO,
            metavar="NUMBER",
        ),
    ] = None,
    transfer: Annotated[
        str | None,
        typer.Option(
            help="With --mode fused: boost, distill or adaptive.",
            show_default=False,
            rich_help_panel=_WHO,
            metavar="RULE",
        ),
    ] = None,
    max_draft: Annotated[
        int | None,
        typer.Option(
            help="With --mode: tokens per block.",
            show_default=False,
            rich_help_panel=_WHO,
            metavar="NUMBER",
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            help=f"Checkpoint; by default {_TARGET}.",
            show_default=False,
            rich_help_panel=_WHO,
            metavar="MODEL",
        ),
    ] = None,
    drafter: Annotated[
        str | None,
        typer.Option(
            help=f"Checkpoint; by default {_DRAFTER}.",
            show_default=False,
            rich_help_panel=_WHO,
            metavar="MODEL",
        ),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            help="Ask a running server instead of loading models.",
            show_default=False,
            rich_help_panel=_WHO,
            metavar="URL",
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="RAPID_API_KEY",
            help="If the server wants one.",
            show_default=False,
            rich_help_panel=_WHO,
            metavar="KEY",
        ),
    ] = None,
    embedder: Annotated[
        str | None,
        typer.Option(
            help="lexical or bge-m3, instead of the task's; lexical needs no weights.",
            show_default=False,
            rich_help_panel=_WHO,
            metavar="NAME",
        ),
    ] = None,
    judge_url: Annotated[
        str | None,
        typer.Option(
            help="OpenAI-compatible endpoint of the metric judge.",
            show_default=False,
            rich_help_panel=_WHO,
            metavar="URL",
        ),
    ] = None,
    judge_model: Annotated[
        str | None,
        typer.Option(help="Its model.", show_default=False, rich_help_panel=_WHO, metavar="MODEL"),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Only the first items.",
            show_default=False,
            rich_help_panel=_WHAT,
            metavar="NUMBER",
        ),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Answers at once in a process; by default 8, on CUDA 1.",
            show_default=False,
            rich_help_panel=_HOW,
            metavar="NUMBER",
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Processes; by default one per core, on CUDA 1.",
            show_default=False,
            rich_help_panel=_HOW,
            metavar="NUMBER",
        ),
    ] = None,
    out_dir: Annotated[
        Path | None,
        typer.Option(
            "--out",
            file_okay=False,
            help="Folder of the run; by default .eval/NAME. The same command goes on where it "
            "was interrupted.",
            show_default=False,
            rich_help_panel=_HOW,
            metavar="DIR",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show what would be run.", rich_help_panel=_HOW)
    ] = False,
    is_list: Annotated[
        bool, typer.Option("--list", help="Show tasks, recipes and systems.", rich_help_panel=_HOW)
    ] = False,
) -> None:
    """Compare modes and baselines on a task: quality, speed and cost, with intervals.

    Every answer is a line of OUT/results.jsonl; tables and plots in OUT/report.md are made of
    these lines. With the embedded models, start with: rapid eval --task laptop-quick
    """
    from rapid.errors import RapidError

    if is_list:
        _list()
        return
    if (task is None) == (recipe is None):
        fail("give --task or --recipe (--list shows what there is)")
    try:
        for loaded, row in _tasks(task, recipe):
            if row is not None and len(row.tasks) > 1 and data is not None and not data.is_dir():
                fail(f"--recipe {recipe} has {len(row.tasks)} tasks: give --data a folder of files")
            systems = _systems(loaded, system, mode, eta, transfer, max_draft)
            retrieval = _retrieval(loaded, embedder)
            chosen = loaded.model_copy(update={"systems": systems, "retrieval": retrieval})
            name = recipe if recipe is not None else loaded.name
            folder = out_dir or Path(".eval") / name
            if row is not None and len(row.tasks) > 1:
                folder = folder / loaded.name
            plan = _plan(
                chosen,
                row,
                target,
                drafter,
                url,
                api_key,
                embedder,
                judge_url,
                judge_model,
                batch,
                workers,
            )
            if dry_run:
                _show(plan, data, limit, folder)
            else:
                _run(plan, data, limit, folder)
    except (RapidError, ValueError, OSError) as error:
        fail(str(error))


def _tasks(task: str | None, recipe: str | None) -> list[tuple[Task, Recipe | None]]:
    from evaluation.tasks import load_task

    if recipe is None:
        assert task is not None
        return [(load_task(task), None)]
    from evaluation.recipes import load_recipe

    row = load_recipe(recipe)
    return [(each, row) for each in row.load_tasks()]


def _systems(
    task: Task,
    names: list[str] | None,
    mode: str | None,
    eta: float | None,
    transfer: str | None,
    max_draft: int | None,
) -> tuple[System, ...]:
    """Return the task's systems, those named, or the one that the mode defines."""
    from pydantic import ValidationError

    from evaluation.systems import System, named

    if names and mode:
        fail("give --system or --mode, not both")
    given = {"eta": eta, "transfer": transfer, "max_draft": max_draft}
    settings = {key: value for key, value in given.items() if value is not None}
    if mode is None:
        if settings:
            fail(f"--{next(iter(settings)).replace('_', '-')} goes with --mode")
        known = {each.name: each for each in task.systems}
        return tuple(known.get(name) or named(name) for name in dict.fromkeys(names or known))
    name = "-".join([mode, *(f"{key}-{value}" for key, value in settings.items())])
    try:
        return (System.model_validate({"name": name, "method": mode, **settings}),)
    except ValidationError as error:
        first = error.errors()[0]
        fail(
            f"--{'-'.join(map(str, first['loc'])) or 'mode'}: {first['msg']}".replace(
                "method", "mode"
            )
        )


def _retrieval(task: Task, embedder: str | None) -> Retrieval:
    """Return the task's retrieval; another embedder comes with its own floor."""
    from evaluation.tasks import Retrieval

    if embedder not in (None, "lexical", "bge-m3"):
        fail(f"--embedder {embedder}: give lexical or bge-m3")
    if embedder in (None, task.retrieval.embedder):
        return task.retrieval
    settings = task.retrieval.model_dump() | {"embedder": embedder, "floor": None}
    return Retrieval.model_validate(settings)


def _plan(
    task: Task,
    row: Recipe | None,
    target: str | None,
    drafter: str | None,
    url: str | None,
    api_key: str | None,
    embedder: str | None,
    judge_url: str | None,
    judge_model: str | None,
    batch: int | None,
    workers: int | None,
) -> Plan:
    """Return the plan of the run, still without its items."""
    from pydantic import SecretStr

    from evaluation.drivers.in_process import Models
    from evaluation.drivers.judge import JudgeConfig
    from evaluation.drivers.over_http import Server, check_can_serve
    from evaluation.drivers.runner import Plan
    from rapid.config import EngineConfig

    judge = None
    if judge_url or judge_model:
        if not (judge_url and judge_model):
            fail("--judge-url and --judge-model go together")
        judge = JudgeConfig(url=judge_url, model=judge_model)
    if url is not None:
        for name, given in (("drafter", drafter), ("embedder", embedder), ("workers", workers)):
            if given is not None:
                fail(f"--{name} and --url do not go together: a server has its own")
        check_can_serve(task.systems, task.conditions)
        key = SecretStr(api_key) if api_key else None
        server = Server(url=url.rstrip("/"), api_key=key, tokenizer=target)
        return Plan(task, (), None, server, batch or 8, 1, judge, row.name if row else None)
    drafted_by = row.drafter if row is not None else EngineConfig(model=_DRAFTER)
    reads = row.target if row is not None else EngineConfig(model=_TARGET)
    if target is not None:
        reads = EngineConfig(model=target)
    if drafter is not None:
        drafted_by = EngineConfig(model=drafter)
    if drafted_by == reads or not any(each.needs_drafter for each in task.systems):
        drafted_by = None
    is_cuda = _has_cuda()
    return Plan(
        task,
        (),
        Models(reads, drafted_by),
        None,
        batch or (1 if is_cuda else 8),
        workers or (1 if is_cuda else os.cpu_count() or 1),
        judge,
        row.name if row else None,
    )


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _run(plan: Plan, data: Path | None, limit: int | None, folder: Path) -> None:
    from evaluation.drivers import runner
    from evaluation.loaders import load_items

    if missing := [name for name in _EXTRA if find_spec(name) is None]:
        fail(f"{', '.join(missing)} cannot be imported: pip install 'rapid-serve[eval]'")
    plan = replace(plan, items=load_items(plan.task, data, limit))
    note(f"{plan.task.name}: {len(plan.items)} items, {plan.num_answers} answers, to {folder}")
    try:
        runner.run(plan, folder, err)
    except KeyboardInterrupt:
        note(f"interrupted; what is done is kept in {folder}: the same command goes on from there")
        raise typer.Exit(130) from None
    from evaluation.reports import report

    page = report.write(folder)
    out.print(report.summary(folder), markup=False, highlight=False, soft_wrap=True)
    note(f"written to {page}")


def _show(plan: Plan, data: Path | None, limit: int | None, folder: Path) -> None:
    """Print what would be run, without loading models or downloading data."""
    from evaluation.loaders import load_items

    task = plan.task
    is_remote = task.source.hub is not None and data is None
    items = [] if is_remote else load_items(task, data, limit)
    plan = replace(plan, items=items)
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    table.add_row("task", escape(f"{task.name}: {task.description}"))
    if is_remote:
        at_most = f", the first {limit}" if limit else ""
        table.add_row("items", f"{task.source.hub} from the hub{at_most} (or --data FILE)")
    else:
        table.add_row("items", f"{len(items)}, {plan.num_answers} answers")
    for index, each in enumerate(task.systems):
        table.add_row("" if index else "systems", escape(_settings_of(each, plan)))
    for index, condition in enumerate(task.conditions):
        changes = condition.model_dump(exclude_defaults=True, exclude={"name"})
        told = ", ".join(f"{key} {value}" for key, value in changes.items())
        table.add_row("" if index else "conditions", escape(f"{condition.name}: {told or 'none'}"))
    if plan.server is not None:
        table.add_row("server", escape(plan.server.url))
    if plan.models is not None:
        table.add_row("target", escape(_model_of(plan.models.target)))
        other = plan.models.drafter
        table.add_row("drafter", escape(_model_of(other)) if other else "none but the target")
    asked = task.model_dump(include={"metrics", "max_tokens", "temperature", "context_tokens"})
    asked |= {f"retrieval.{key}": value for key, value in task.retrieval.model_dump().items()}
    for index, (key, value) in enumerate(asked.items()):
        shown = ", ".join(value) if isinstance(value, tuple) else value
        table.add_row("" if index else "settings", escape(f"{key} {shown}"))
    table.add_row("", f"batch {plan.batch}, workers {plan.workers}")
    table.add_row("to", escape(str(folder)))
    out.print(table)
    out.print("\n[bold]what the target reads[/]" + (f" of item {items[0].id}" if items else ""))
    out.print(_example(task, items[0] if items else None), markup=False, highlight=False)


def _settings_of(system: System, plan: Plan) -> str:
    told = f"{system.name}: {system.method}"
    if system.is_drafted:
        told += f", drafts {system.drafts}, blocks of {system.block}"
    elif system.method == "rag":
        told += f", answers {system.drafts}"
    if system.fuses:
        etas = {system.eta_in(each.eta) for each in plan.conditions}
        told += f", eta {' / '.join(f'{eta:g}' for eta in sorted(etas))}"
    return f"{told}, temperature {system.temperature_in(plan.task.temperature):g}"


def _model_of(config: object) -> str:
    settings = config.model_dump(exclude_defaults=True)  # type: ignore[attr-defined]
    name = settings.pop("model")
    return f"{name} {settings}" if settings else str(name)


def _example(task: Task, item: Item | None) -> str:
    from evaluation.drivers.prompting import target_chat

    if item is None:
        return task.templates.target if task.templates else "the chat, with its document"
    chat = target_chat(task, item, item.document)
    text = "\n\n".join(f"{message.role}: {message.content}" for message in chat)
    left_out = len(text) - 2 * _SHOWN
    if left_out <= 0:
        return text
    return f"{text[:_SHOWN]}\n[... {left_out:,} characters ...]\n{text[-_SHOWN:]}"


def _list() -> None:
    from evaluation.recipes import load_recipe, recipe_names
    from evaluation.systems import BASELINES
    from evaluation.tasks import load_task, task_names

    rows = {
        "tasks": [(name, load_task(name).description) for name in task_names()],
        "recipes": [(name, ", ".join(load_recipe(name).tasks)) for name in recipe_names()],
        "systems": [
            (each.name, each.method + ("" if each.method == "plain" else f", {each.drafts}"))
            for each in BASELINES.values()
        ],
    }
    for title, entries in rows.items():
        table = Table(title=title, title_justify="left", show_header=False, box=None)
        for entry in entries:
            table.add_row(*map(escape, entry))
        out.print(table)

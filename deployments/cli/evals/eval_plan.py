"""The decisions of ``rapid eval``: which runs its options ask for."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from pydantic import SecretStr, ValidationError

from deployments.cli.evals.eval_options import DRAFTER, TARGET, EvalOptions
from deployments.cli.terminal import USAGE, fail
from evaluation.drivers.judge import JudgeConfig
from evaluation.recipes import Recipe, load_recipe, load_tasks
from evaluation.results import shard_name
from evaluation.systems import System, find_baseline
from evaluation.tasks import EmbedderKind, RetrievalSettings, Source, Task, load_task
from rapid.config import EngineConfig
from rapid.transfers import run_rules

if TYPE_CHECKING:
    from evaluation.drivers.in_process import Models
    from evaluation.drivers.item_runner import Plan
    from evaluation.drivers.over_http import Server


def plans(options: EvalOptions) -> Iterator[tuple[Plan, Path]]:
    """Yield the plan of each task, still without its items, with the folder of its run.

    The options name either a task or recipes of the same models.

    Raises:
        typer.Exit: The options contradict each other; the reason has been printed.
        ConfigurationError: A task or recipe is unknown, the file of rules cannot be run, or no
            server can do what is asked.
        ValueError: A system is unknown.
    """
    if options.rules is not None:
        run_rules(options.rules)
    recipes = [load_recipe(name) for name in options.recipe or ()]
    tasks: list[tuple[Task, tuple[str, ...]]] = []
    if recipes:
        tasks = load_tasks(recipes)
        name = recipes[0].name
    else:
        assert options.task is not None
        tasks = [(load_task(options.task), ())]
        name = tasks[0][0].name
    if options.item_seed is not None:
        name += f"-{options.item_seed}"
    folder = options.out_dir or Path(".eval") / name
    if len(tasks) > 1 and options.data is not None and not options.data.is_dir():
        fail(f"--recipe {name} has {len(tasks)} tasks: give --data a folder of files", USAGE)
    shard = _shard(options)
    for task, names in tasks:
        changes = {
            "source": _source(task, options),
            "systems": _systems(task, options),
            "retrieval": _retrieval(task, options),
            "reuses_prefill": task.reuses_prefill or options.reuse_prefill,
        }
        plan = _plan(task.model_copy(update=changes), recipes[0] if recipes else None, options)
        own = folder / task.name if len(tasks) > 1 else folder
        own = own if shard is None else own / shard_name(shard)
        yield replace(plan, recipes=names, shard=shard), own


def _shard(options: EvalOptions) -> tuple[int, int] | None:
    if options.shard is None:
        return None
    found = re.fullmatch(r"(\d+)/(\d+)", options.shard)
    part, count = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1 <= part <= count:
        fail(
            f"--shard {options.shard}: give the number of a part and that of all, as 1/8 or 8/8",
            USAGE,
        )
    return part, count


def _source(task: Task, options: EvalOptions) -> Source:
    """Return the task's source of items, or that of others of their kind."""
    if options.item_seed is None:
        return task.source
    if task.source.loader != "generated":
        fail(f"--item-seed goes with generated documents, and those of {task.name} are not", USAGE)
    update = {"options": {**task.source.options, "seed": options.item_seed}}
    return task.source.model_copy(update=update)


def _systems(task: Task, options: EvalOptions) -> tuple[System, ...]:
    """Return the task's systems, those named, or the one that the mode defines."""
    names, mode = options.system, options.mode
    if names and mode:
        fail("give --system or --mode, not both", USAGE)
    given = {key: getattr(options, key) for key in ("eta", "transfer", "max_draft")}
    settings = {key: value for key, value in given.items() if value is not None}
    if mode is None:
        if settings:
            fail(f"--{next(iter(settings)).replace('_', '-')} goes with --mode", USAGE)
        # A recipe's task has only the recipe's system; others are as its file has them.
        others = load_task(task.name).systems if options.recipe else ()
        known = {each.name: each for each in (*others, *task.systems)}
        asked = names or [each.name for each in task.systems]
        return tuple(known.get(name) or find_baseline(name) for name in dict.fromkeys(asked))
    name = "-".join([mode, *(f"{key}-{value}" for key, value in settings.items())])
    try:
        return (System.model_validate({"name": name, "method": mode, **settings}),)
    except ValidationError as error:
        first = error.errors()[0]
        option = "-".join(map(str, first["loc"])) or "mode"
        fail(f"--{option}: {first['msg']}".replace("method", "mode"), USAGE)


def _retrieval(task: Task, options: EvalOptions) -> RetrievalSettings:
    """Return the task's retrieval settings; another embedder brings its own floor and ranking."""
    kinds = get_args(EmbedderKind)
    if options.embedder not in (None, *kinds):
        fail(f"--embedder {options.embedder}: give {', '.join(kinds[:-1])} or {kinds[-1]}", USAGE)
    if options.embedder in (None, task.retrieval.embedder):
        return task.retrieval
    settings = task.retrieval.model_dump(exclude={"floor", "selection"})
    return RetrievalSettings.model_validate(settings | {"embedder": options.embedder})


def _plan(task: Task, recipe: Recipe | None, options: EvalOptions) -> Plan:
    from evaluation.drivers.item_runner import Plan

    judge = _judge(options)
    if options.url is not None:
        server, models = _server(task, options.url, options), None
        batch, workers = 8, 1
    else:
        import torch

        server, models = None, _models(task, recipe, options)
        batch, workers = (1, 1) if torch.cuda.is_available() else (8, os.cpu_count() or 1)
    return Plan(
        task,
        items=(),
        models=models,
        server=server,
        batch=options.batch or batch,
        workers=options.workers or workers,
        judge=judge,
        rules=options.rules,
    )


def _judge(options: EvalOptions) -> JudgeConfig | None:
    url, model = options.judge_url, options.judge_model
    if not (url or model):
        return None
    if not (url and model):
        fail("--judge-url and --judge-model go together", USAGE)
    return JudgeConfig(url=url, model=model)


def _server(task: Task, url: str, options: EvalOptions) -> Server:
    from evaluation.drivers.over_http import Server, check_can_serve

    for name in ("drafter", "dtype", "embedder", "workers", "rules"):
        if getattr(options, name) is not None:
            fail(f"--{name} and --url do not go together: a server has its own", USAGE)
    check_can_serve(task.systems, task.conditions)
    api_key = SecretStr(options.api_key) if options.api_key else None
    return Server(url=url.rstrip("/"), api_key=api_key, tokenizer=options.target)


def _models(task: Task, recipe: Recipe | None, options: EvalOptions) -> Models:
    """Return the named checkpoints, the recipe's, or the embedded ones, in the named dtype."""
    from evaluation.drivers.in_process import Models

    target = EngineConfig(model=TARGET)
    drafter: EngineConfig | None = EngineConfig(model=DRAFTER)
    if recipe is not None:
        target, drafter = recipe.target, recipe.drafter
    if options.target is not None:
        target = EngineConfig(model=options.target)
    if options.drafter is not None:
        drafter = EngineConfig(model=options.drafter)
    if options.dtype is not None:
        target = _in_dtype(target, options.dtype)
        drafter = drafter and _in_dtype(drafter, options.dtype)
    is_needed = drafter != target and any(system.needs_drafter for system in task.systems)
    return Models(target, drafter if is_needed else None)


def _in_dtype(config: EngineConfig, dtype: str) -> EngineConfig:
    try:
        return EngineConfig.model_validate(config.model_dump(exclude_unset=True) | {"dtype": dtype})
    except ValidationError as error:
        fail(f"--dtype {dtype}: {error.errors()[0]['msg']}", USAGE)

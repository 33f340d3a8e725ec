"""Recipes that repeat the results which RAPID's authors publish, row by row.

The rows are in ``recipe_files/published.yaml``, from the readme of the reference code and Table 1
of the paper (arXiv 2502.20330). ``docs/evaluation.md`` says what differs from the reference code.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import Field

from evaluation.systems import BASELINES, System
from evaluation.tasks import Task, load_task
from rapid.config import EngineConfig, Finite, Frozen
from rapid.config_errors import read_yaml, validate
from rapid.errors import ConfigurationError

RECIPE_FILE = Path(__file__).parent / "recipe_files" / "published.yaml"
MAX_DRAFT = 10


class Recipe(Frozen):
    """A recipe: the models and tasks of one row of the published tables.

    Attributes:
        tasks: Names of task files, which run one after the other.
        models: Names of the target and, where it is another model, of the drafter.
        target: With a drafter over several GPUs, spread over the same ones, which would idle while
            it reads.
        drafter: The drafter model; None where nothing is drafted or the target drafts for itself.
        top_k: Number of best tokens that the reference code samples from with these models.
        published: The authors' numbers, in percent, by column of their table.
    """

    name: str
    tasks: tuple[str, ...]
    models: tuple[str, ...]
    target: EngineConfig
    drafter: EngineConfig | None
    system: System
    top_k: int
    published: Mapping[str, float]

    @property
    def num_gpus(self) -> int:
        """Number of GPUs that one process needs, which both models share."""
        return self.target.tensor_parallel


def load_tasks(recipes: Sequence[Recipe]) -> list[tuple[Task, tuple[str, ...]]]:
    """Load the tasks of recipes with the same models, each with the names of those that have it.

    A task has only these recipes' systems, and their sampler.

    Raises:
        ConfigurationError: Their models are not the same.
    """
    for each in recipes:
        if (each.target, each.drafter) != (recipes[0].target, recipes[0].drafter):
            raise ConfigurationError(
                f"recipes {recipes[0].name} and {each.name} have other models: give each a "
                "command of its own, or run both with --node"
            )
    tasks: list[tuple[Task, tuple[str, ...]]] = []
    for name in dict.fromkeys(task for each in recipes for task in each.tasks):
        asked = [each for each in recipes if name in each.tasks]
        systems = tuple({each.system.name: each.system for each in asked}.values())
        changes = {"systems": systems, "top_k": recipes[0].top_k}
        names = tuple(each.name for each in asked)
        tasks.append((load_task(name).model_copy(update=changes), names))
    return tasks


def recipe_names(quantization: str | None = None) -> list[str]:
    """Return the names of all recipes, in the order of the published tables.

    With `quantization`, a large model has quantized weights, and its recipes names that say so.

    Raises:
        ConfigurationError: The recipes have no quantization of that name.
    """
    known = _file().quantized
    if quantization not in (None, *known):
        raise ConfigurationError(
            f"no recipe has quantization {quantization!r}: take one of {', '.join(known)}"
        )
    return list(_recipes(quantization))


def load_recipe(name: str) -> Recipe:
    """Return the recipe `name`; that of a large model also with ``-fp8`` or ``-int4`` at its end.

    Raises:
        ConfigurationError: There is none of that name.
    """
    recipes = {**_recipes(None)}
    for quantization in _file().quantized:
        recipes |= _recipes(quantization)
    if name not in recipes:
        near = difflib.get_close_matches(name, recipes, n=1)
        meant = f"did you mean {near[0]}?" if near else f"known are {', '.join(_recipes(None))}"
        raise ConfigurationError(f"there is no recipe {name!r}: {meant}")
    return recipes[name]


class _Table(Frozen):
    """The tasks and columns that the rows of one published table share."""

    tasks: tuple[str, ...]
    columns: tuple[str, ...]


class _RecipeRow(Frozen):
    """A row of the recipe file; only those of RAPID and SD have `drafter` and `eta`."""

    name: str
    rows: str
    target: str
    baseline: Literal["rag", "magicdec"] | None = None
    drafter: str | None = None
    eta: Finite | None = Field(None, ge=0)
    published: tuple[Finite, ...]


class _File(Frozen):
    rows: dict[str, _Table]
    models: dict[str, EngineConfig]
    quantized: dict[str, dict[str, str | int]]
    top_k: dict[str, int]
    recipes: tuple[_RecipeRow, ...]


@cache
def _file() -> _File:
    settings = read_yaml(RECIPE_FILE, "the one that came with the package")
    return validate(_File, settings, prefix=f"{RECIPE_FILE}: ", top="recipes")


@cache
def _recipes(quantization: str | None) -> Mapping[str, Recipe]:
    file = _file()
    recipes = [_recipe(row, file, quantization) for row in file.recipes]
    return {each.name: each for each in recipes}


def _recipe(row: _RecipeRow, file: _File, quantization: str | None) -> Recipe:
    table = file.rows[row.rows]
    is_self = row.drafter == row.target
    names = [row.target] if is_self or row.drafter is None else [row.target, row.drafter]
    configs = [file.models[name] for name in names]
    suffix = ""
    if quantization is not None and configs[-1].tensor_parallel > 1:  # the large one, if any
        suffix = f"-{quantization}"
        names[-1] += suffix
        settings = configs[-1].model_dump(exclude_unset=True) | file.quantized[quantization]
        configs[-1] = EngineConfig.model_validate(settings)
    target, drafter = configs[0], None
    if len(configs) > 1:
        drafter = configs[1]
        target = target.model_copy(update={"tensor_parallel": drafter.tensor_parallel})
    return Recipe(
        name=row.name + suffix,
        tasks=table.tasks,
        models=tuple(names),
        target=target,
        drafter=drafter,
        system=_system(row, is_self),
        top_k=file.top_k[row.target],
        published=dict(zip(table.columns, row.published, strict=True)),
    )


def _system(row: _RecipeRow, is_self: bool) -> System:
    if row.baseline == "rag":
        return BASELINES["rag-target"]
    if row.baseline == "magicdec":
        return System(
            name="magicdec",
            method="lossless",
            drafts="window",
            window=4096,  # the paper, section 3.2
            max_draft=MAX_DRAFT,
        )
    if row.drafter is None:
        return BASELINES["plain"]
    method = "rapid" if row.eta else "sd"
    return System(
        name=f"{method}-self-paper" if is_self else f"{method}-paper",
        method="paper",
        drafts="target" if is_self else "drafter",
        eta=row.eta,
        max_draft=MAX_DRAFT,
    )

"""Recipes that repeat the results which RAPID's authors publish, row by row.

The rows are in ``recipe_files/published.yaml``, from the readme of the reference code and Table 1
of the paper (arXiv 2502.20330). ``docs/evaluation.md`` says what differs from the reference code.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
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
        drafter: The drafter model; None where nothing is drafted or the target drafts for itself.
        top_k: Number of best tokens that the reference code samples from with these models.
        published: The authors' numbers, in percent, by column of their table.
    """

    name: str
    tasks: tuple[str, ...]
    target: EngineConfig
    drafter: EngineConfig | None
    system: System
    top_k: int
    published: Mapping[str, float]

    def load_tasks(self) -> list[Task]:
        """Load the tasks, each with only the recipe's system and with its sampler."""
        changes = {"systems": (self.system,), "top_k": self.top_k}
        return [load_task(name).model_copy(update=changes) for name in self.tasks]


def recipe_names() -> list[str]:
    """Return the names of all recipes, in the order of the published tables."""
    return list(_recipes())


def load_recipe(name: str) -> Recipe:
    """Return the recipe `name`.

    Raises:
        ConfigurationError: There is none of that name.
    """
    recipes = _recipes()
    if name not in recipes:
        near = difflib.get_close_matches(name, recipes, n=1)
        meant = f"did you mean {near[0]}?" if near else f"known are {', '.join(recipes)}"
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
    top_k: dict[str, int]
    recipes: tuple[_RecipeRow, ...]


@cache
def _recipes() -> Mapping[str, Recipe]:
    settings = read_yaml(RECIPE_FILE, "the one that came with the package")
    file = validate(_File, settings, prefix=f"{RECIPE_FILE}: ", top="recipes")
    return {row.name: _recipe(row, file) for row in file.recipes}


def _recipe(row: _RecipeRow, file: _File) -> Recipe:
    table = file.rows[row.rows]
    is_self = row.drafter == row.target
    return Recipe(
        name=row.name,
        tasks=table.tasks,
        target=file.models[row.target],
        drafter=None if is_self or row.drafter is None else file.models[row.drafter],
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

"""A task is one YAML file: items, wording, scores, and what is compared on them."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from evaluation.systems import System, named
from rapid.config import Finite, Frozen
from rapid.config_errors import read_yaml, validated
from rapid.errors import ConfigurationError

TASK_FILES = Path(__file__).parent / "task_files"
DAY = date(2026, 1, 1)
"""What chat templates that name the day are told in every run, so that a run can be repeated."""

Corruption = Literal["none", "unrelated", "replaced", "contradicting"]


class Source(Frozen):
    """Where items come from.

    Attributes:
        loader: a function of `evaluation.loaders`, by name.
        hub: dataset name on the hub, where there is one.
        subset, split: of the hub dataset.
        file: its official file: of the hub's dataset, and looked for where `--data` is a directory.
        options: what else the loader takes (generated documents: lengths, kinds, items, seed).
    """

    loader: str
    hub: str | None = None
    subset: str | None = None
    split: str | None = None
    file: str | None = None
    options: dict[str, object] = Field(default_factory=dict)


class Templates(Frozen):
    """Wording of one user message; ``{context}`` and the item's fields are filled in.

    Attributes:
        target: with the whole context.
        drafter: with the retrieved chunks.
        extraction: of a second, undrafted pass that reads the first answer as ``{reasoning}``.
    """

    target: str
    drafter: str
    extraction: str | None = None


class Retrieval(Frozen):
    """What the drafter gets to read.

    Attributes:
        chunk_tokens: of the target's tokenizer.
        tokens: budget; None is the paper's ``max(4096, context / 24)``.
        embedder: `lexical` needs no download; `bge-m3` is the paper's.
        floor: least score; None takes the embedder's.
    """

    chunk_tokens: int = Field(512, ge=8)
    tokens: int | None = Field(None, ge=16)
    embedder: Literal["lexical", "bge-m3"] = "bge-m3"
    floor: Finite | None = None


class Condition(Frozen):
    """A change to what is read or how strongly it counts, the same for all systems.

    Attributes:
        name: as tables have it.
        corruption: of the retrieved chunks: all from an unrelated document, a share of them
            replaced by such, or chunks added that contradict the evidence.
        share: of chunks replaced.
        eta: overrides that of systems that fuse.
        context_tokens: the context is cut in the middle to this many tokens.
        retrieval_tokens: overrides the budget.
    """

    name: str = "as is"
    corruption: Corruption = "none"
    share: Finite = Field(1.0, gt=0, le=1)
    eta: Finite | None = Field(None, ge=0, le=1000)
    context_tokens: int | None = Field(None, ge=16)
    retrieval_tokens: int | None = Field(None, ge=16)


class Task(Frozen):
    """A task file.

    Attributes:
        templates: None asks with the product's own prompts (`rapid.prompts`).
        metrics: names in `evaluation.reports.metrics`; the first is the headline.
        max_tokens: longest answer.
        extraction_tokens: longest answer of the second pass.
        temperature: 0 is greedy.
        seed: with the item's id, of all randomness: the same for every system.
        context_tokens: longest context in tokens; longer ones lose their middle.
        groups: keys of the items' groups to report by.
        systems: names of `BASELINES`, or systems written out.
    """

    name: str
    description: str
    source: Source
    templates: Templates | None = None
    metrics: tuple[str, ...] = Field(min_length=1)
    max_tokens: int = Field(128, ge=1)
    extraction_tokens: int = Field(128, ge=1)
    temperature: Finite = Field(0.0, ge=0, le=2)
    seed: int = 0
    context_tokens: int | None = Field(None, ge=16)
    retrieval: Retrieval = Retrieval()
    groups: tuple[str, ...] = ()
    systems: tuple[System, ...] = Field((named("plain"),), min_length=1)
    conditions: tuple[Condition, ...] = Field((Condition(),), min_length=1)

    @field_validator("systems", mode="before")
    @classmethod
    def _by_name(cls, systems: object) -> object:
        if not isinstance(systems, list | tuple):
            return systems
        return [named(each) if isinstance(each, str) else each for each in systems]

    @field_validator("systems", "conditions")
    @classmethod
    def _names_are_distinct(
        cls, given: tuple[System | Condition, ...]
    ) -> tuple[System | Condition, ...]:
        names = [each.name for each in given]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"two are named {twice[0]!r}: results are kept by name")
        return given


def task_names() -> list[str]:
    """The tasks that come with the package."""
    return sorted(path.stem for path in TASK_FILES.glob("*.yaml"))


def load_task(name_or_path: str | Path) -> Task:
    """Read and check a task: one of `task_names`, or a file.

    Raises:
        ConfigurationError: naming the file and the key, a line for each mistake.
    """
    path = TASK_FILES / f"{name_or_path}.yaml"
    if not path.is_file():
        path = Path(name_or_path)
        if path.suffix not in (".yaml", ".yml"):
            raise ConfigurationError(
                f"there is no task {str(name_or_path)!r}: known are {', '.join(task_names())}; "
                "or give a .yaml file"
            )
    settings = read_yaml(path, f"a file of {TASK_FILES}")
    task = validated(Task, settings, prefix=f"{path}: ", top="task")
    from evaluation.reports.metrics import METRICS  # scorers take a second to import

    for index, metric in enumerate(task.metrics):
        if metric not in METRICS:
            raise ConfigurationError(
                f"{path}: metrics.{index}: unknown metric {metric!r}; known: "
                f"{', '.join(sorted(METRICS))}"
            )
    return task

"""Tasks: YAML files that define items, wording, metrics, and the systems compared on them."""

from __future__ import annotations

import operator
from datetime import date
from pathlib import Path
from typing import Literal, Self, TypeVar

from pydantic import Field, ValidationError, field_validator, model_validator

from evaluation.systems import System, find_baseline
from rapid.config import Finite, Frozen
from rapid.config_errors import read_yaml, validate
from rapid.errors import ConfigurationError

TASK_FILES = Path(__file__).parent / "task_files"
DAY = date(2026, 1, 1)
"""The date given to chat templates that name the day, fixed so that runs are repeatable."""

Options = TypeVar("Options", bound=Frozen)
Corruption = Literal["none", "empty", "unrelated", "replaced", "contradicting", "missed"]
EmbedderKind = Literal["lexical", "sentence-transformers", "bge-m3"]


class Source(Frozen):
    """The source of a task's items.

    Attributes:
        hub: Dataset name on the hub, where there is one.
        file: The dataset's official file, on the hub and in the directory that `--data` names.
    """

    loader: str
    hub: str | None = None
    subset: str | None = None
    split: str | None = None
    file: str | None = None
    options: dict[str, object] = Field(default_factory=dict)

    def check_options(self, kind: type[Options], source: str) -> Options:
        """Return the options as the loader of `source` defines them.

        Raises:
            ConfigurationError: The options are not of this kind.
        """
        try:
            return kind.model_validate(self.options)
        except ValidationError as error:
            raise ConfigurationError(f"source.options of {source}: {error}") from None


class Templates(Frozen):
    """The wording of one user message, with places for ``{context}`` and the item's fields.

    Attributes:
        extraction: Template of a second, undrafted pass, which reads the first answer as
            ``{reasoning}``.
    """

    target: str
    drafter: str
    extraction: str | None = None


class RetrievalSettings(Frozen):
    """The retrieval settings of a task.

    Attributes:
        chunk_tokens: Maximum size of a chunk, in tokens of the target's tokenizer.
        tokens: Budget of retrieved tokens; None is the paper's ``max(4096, context / 24)``.
        embedder: `lexical` needs no download; `sentence-transformers` is all-MiniLM-L6-v2 with BM25
            beside it, which `rapid models get all-minilm-l6-v2` fetches; `bge-m3` is the paper's.
        floor: Lowest score of a chunk; None takes the embedder's.
        selection: `budget` ranks as the product does, by dense vectors and term weights, and fills
            the budget. `top-k` takes, as RAPID's code does, the ``ceil(budget / chunk_tokens)``
            best by dense vectors alone. A run's file omits it where it is `budget`.
    """

    chunk_tokens: int = Field(512, ge=8)
    tokens: int | None = Field(None, ge=16)
    embedder: EmbedderKind = "bge-m3"
    floor: Finite | None = None
    selection: Literal["budget", "top-k"] = Field("budget", exclude_if="budget".__eq__)

    @model_validator(mode="after")
    def _has_dense_vectors(self) -> Self:
        if self.selection == "top-k" and self.embedder == "lexical":
            raise ValueError("selection: top-k needs dense vectors, which lexical has none of")
        return self


class Condition(Frozen):
    """A change, the same for all systems, to what they read or how strongly it counts.

    Attributes:
        corruption: Corruption of the retrieved chunks: there are none, so that a model answers from
            memory; all are from an unrelated document; a share of them is replaced by such chunks;
            chunks that contradict the evidence are added; or chunks that hold evidence are passed
            over, as if the search had missed them.
        context_tokens: Length to which the context is cut in its middle, in tokens, for the target
            and for retrieval.
        retrieval_tokens: Overrides the budget of retrieved tokens.
    """

    name: str = "as is"
    corruption: Corruption = "none"
    share: Finite = Field(1.0, gt=0, le=1)
    eta: Finite | None = Field(None, ge=0, le=1000)
    context_tokens: int | None = Field(None, ge=16)
    retrieval_tokens: int | None = Field(None, ge=16)


class Task(Frozen):
    """An evaluation task: its items, baselines and metrics, as its YAML file has them.

    Attributes:
        templates: Wording of the prompts; None takes the product's own prompts (`rapid.prompts`).
        metrics: Names of `evaluation.scorers.NAMES`; the first is the headline.
        extraction_tokens: Maximum length of an answer of the second pass.
        temperature: Sampling temperature; 0 is greedy.
        top_k: Number of best tokens that are sampled from; None keeps all. A run's file omits it
            where it is not set.
        seed: Seed, with the item's id, of all randomness; it is the same for every system.
        context_tokens: Maximum length in tokens of the context that the target reads; longer ones
            lose their middle. Retrieval in process searches all of it.
        reuses_prefill: Whether an answer reuses what the engines have read for other answers. It
            makes a run with many questions on one document several times faster. Then the times of
            prefill say nothing.
        systems: Names of `BASELINES`, or systems written out.
        conditions: The first is the headline's.
    """

    name: str
    description: str
    source: Source
    templates: Templates | None = None
    metrics: tuple[str, ...] = Field(min_length=1)
    max_tokens: int = Field(128, ge=1)
    extraction_tokens: int = Field(128, ge=1)
    temperature: Finite = Field(0.0, ge=0, le=2)
    top_k: int | None = Field(None, ge=1, exclude_if=operator.not_)
    seed: int = 0
    context_tokens: int | None = Field(None, ge=16)
    retrieval: RetrievalSettings = RetrievalSettings()
    groups: tuple[str, ...] = ()
    reuses_prefill: bool = Field(False, exclude_if=operator.not_)
    systems: tuple[System, ...] = Field((find_baseline("plain"),), min_length=1)
    conditions: tuple[Condition, ...] = Field((Condition(),), min_length=1)

    @property
    def extraction(self) -> str | None:
        """The template of the second pass; None where there is one pass."""
        return None if self.templates is None else self.templates.extraction

    def context_limit(self, condition: Condition) -> int | None:
        """Return the tokens to which a context is cut under `condition`; None keeps all."""
        limits = (self.context_tokens, condition.context_tokens)
        return min((limit for limit in limits if limit is not None), default=None)

    @field_validator("systems", mode="before")
    @classmethod
    def _by_name(cls, systems: object) -> object:
        if not isinstance(systems, list | tuple):
            return systems
        return [find_baseline(each) if isinstance(each, str) else each for each in systems]

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
    """Return the names of the tasks that come with the package."""
    return sorted(path.stem for path in TASK_FILES.glob("*.yaml"))


def load_task(name_or_path: str | Path) -> Task:
    """Read and check a task, given by a name in `task_names` or the path of a file.

    Raises:
        ConfigurationError: The task is unknown or not valid; the message names the file and the
            key, with a line for each mistake.
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
    task = validate(Task, settings, prefix=f"{path}: ", top="task")
    from evaluation.scorers import NAMES  # importing the scorers takes a second

    for index, metric in enumerate(task.metrics):
        if metric not in NAMES:
            known = ", ".join(sorted(NAMES))
            raise ConfigurationError(
                f"{path}: metrics.{index}: unknown metric {metric!r}; known: {known}"
            )
    return task

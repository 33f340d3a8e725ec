"""The recipes of the paper's Table 1 on one machine: what runs where, how long, and their page.

Hours are arithmetic of `rapid.planning.plan`, with the losses that are likely.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from evaluation.recipes import Recipe, load_recipe, load_tasks
from evaluation.reports.report import PAGE, body
from evaluation.reports.run_results import RunResults
from evaluation.reports.scores import PUBLISHED_HEADER, list_published
from evaluation.reports.tables import table
from evaluation.results import RESULTS
from evaluation.systems import System
from evaluation.tasks import Task
from rapid.config import EngineConfig
from rapid.errors import ConfigurationError
from rapid.planning.gpus import GPU, GPUS, find_gpu
from rapid.planning.known_models import KNOWN_SHAPES
from rapid.planning.plan import FP8_BITS, LIKELY, USABLE, Replica
from rapid.planning.speedups import tokens_per_round
from retrieval.settings import RetrievalConfig

CPU = "cpu"
ACCEPTANCE = 0.77  # of a drafted token, as `rapid plan` takes it from arXiv 2502.20330
_BITS = {None: 16, "fp8": FP8_BITS, "int4": 4}  # of a weight, by `quantization`
_SHAPES = dict(KNOWN_SHAPES.values())  # by the repository of the model
_ITEMS = {  # of the official files
    "longbench-v2": 503,
    "longbench-v2-cot": 503,
    "infinitebench-qa": 351,
    "infinitebench-mc": 229,
    "infinitebench-sum": 103,
}


@dataclass(frozen=True, slots=True)
class GpuNode:
    """A machine with equal GPUs; with None for them, processes on its CPU, for rehearsals."""

    num_gpus: int
    gpu: GPU | None


def find_node(name: str) -> GpuNode:
    """Return the machine of a name such as ``8xh100`` or ``2xcpu``.

    Raises:
        ConfigurationError: It has another form, or no such GPU is known; the message lists them.
    """
    found = re.fullmatch(r"([1-9]\d?)x(.+)", name.lower())
    if found is None:
        raise ConfigurationError(
            f"node {name!r}: give a number of GPUs and their kind, such as 8xh100, or processes of "
            f"a rehearsal, such as 2x{CPU}; kinds are {', '.join(GPUS)}"
        )
    return GpuNode(int(found[1]), None if found[2] == CPU else find_gpu(found[2]))


@dataclass(frozen=True, slots=True)
class TableJob:
    """Recipes with the same models: a process for each group of GPUs runs them on its items.

    Systems of one item that read the same text share its prefill.
    """

    recipes: tuple[Recipe, ...]

    @property
    def name(self) -> str:
        """The models by name, as ``llama-3.1-8b-by-llama-3.1-70b``."""
        return "-by-".join(self.recipes[0].models)

    @property
    def configs(self) -> list[EngineConfig]:
        """The target and, if it is another model, the drafter."""
        both = (self.recipes[0].target, self.recipes[0].drafter)
        return [each for each in both if each is not None]

    def count_shards(self, node: GpuNode) -> int:
        """Return the number of processes that the GPUs of a node are enough for."""
        return node.num_gpus if node.gpu is None else node.num_gpus // self.recipes[0].num_gpus

    def why_not_on(self, node: GpuNode) -> str | None:
        """Return why a node cannot run it, if it cannot."""
        num_gpus = self.recipes[0].num_gpus
        if node.gpu is None:
            return None
        if num_gpus > node.num_gpus:
            return f"needs {num_gpus} GPUs"
        if not node.gpu.has_fp8_products and any(c.quantization == "fp8" for c in self.configs):
            return "has weights in fp8, which needs GPUs of capability 9.0 or later"
        needed, usable = self.bytes_of_gpu(node.gpu), node.gpu.memory * USABLE
        if needed > usable:
            return f"needs {needed / 1e9:.0f} GB of each GPU, which has {usable / 1e9:.0f} to use"
        return None

    def bytes_of_gpu(self, gpu: GPU) -> float:
        """Return the bytes that the models and one answer of the longest task need of each GPU."""
        tasks = [task for task, _ in load_tasks(self.recipes)]
        longest = max(_context(task) + task.max_tokens for task in tasks)
        short = RetrievalConfig().budget_for(longest)
        needed = _replica(self.configs[0], gpu, longest).need(1).total
        drafting = _replica(self.configs[-1], gpu, short)
        needed += drafting.need(1).total if len(self.configs) > 1 else drafting.kv_of(1)
        return needed / self.recipes[0].num_gpus

    def hours_on(self, node: GpuNode) -> float:
        """Return the hours of all items at the longest context, without loading and retrieval.

        Each text is read once for all systems, and every answer has its full length.
        """
        assert node.gpu is not None
        seconds = 0.0
        for task, _ in load_tasks(self.recipes):
            long = _replica(self.configs[0], node.gpu, _context(task))
            short = replace(long, context=RetrievalConfig().budget_for(long.context))
            drafting = _replica(self.configs[-1], node.gpu, short.context)
            reads = {long} if any(each.reads_everything for each in task.systems) else set()
            for each in task.systems:
                if each.reads_retrieved:
                    reads.add(drafting if each.needs_drafter else short)
            length = task.max_tokens + (task.extraction_tokens if task.extraction else 0)
            step_s = sum(_token_s(each, long, short, drafting) for each in task.systems)
            each_s = sum(replica.prefill_s() for replica in reads) + length * step_s
            seconds += _ITEMS[task.name] * each_s
        return seconds / 3600 / self.count_shards(node)

    @property
    def gigabytes(self) -> float:
        """Gigabytes of the checkpoints, whose weights have 16 bits."""
        return sum(_SHAPES[config.model].weight_bytes(16, 16) for config in self.configs) / 1e9


def list_jobs(names: Sequence[str]) -> list[TableJob]:
    """Return the jobs of recipes, those on fewer GPUs first, which are the shorter ones."""
    by_models: dict[tuple[str, ...], list[Recipe]] = {}
    for recipe in map(load_recipe, names):
        by_models.setdefault(recipe.models, []).append(recipe)
    jobs = [TableJob(tuple(recipes)) for recipes in by_models.values()]
    return sorted(jobs, key=lambda job: job.recipes[0].num_gpus)


def write_page(jobs: Sequence[TableJob], out_dir: Path) -> Path:
    """Write one page of what the jobs' folders within `out_dir` hold, and return its path.

    Raises:
        ConfigurationError: There is no result yet, or parts of a run are of different runs.
    """
    runs: list[tuple[str, RunResults]] = []
    for job in jobs:
        files = (out_dir / job.name).rglob(f"*-of-*/{RESULTS}")
        folders = sorted({file.parent.parent for file in files})
        runs += [(job.name, RunResults.read(folder)) for folder in folders]
    if not runs:
        raise ConfigurationError(f"{out_dir} has no results of these recipes")
    rows = [row for _, run in runs for row in list_published(run) if row[3] != "-"]
    names = [recipe.name for job in jobs for recipe in job.recipes]
    rows += [row for name in names if (row := _average(name, [run for _, run in runs]))]
    rows.sort(key=lambda row: names.index(row[0]))
    page = out_dir / PAGE
    sections = [
        f"## {name}: {run.task.name}\n\n{body(run, {})}".replace("\n## ", "\n### ")
        for name, run in runs
    ]
    intro = (
        f"# Table 1\n\n{table(PUBLISHED_HEADER, rows)}\nTheirs are published, ours measured.\n\n"
    )
    page.write_text(intro + "\n".join(sections), encoding="utf-8")
    return page


def _average(name: str, runs: Sequence[RunResults]) -> list[str] | None:
    """Return the row of a recipe's mean over its tasks, if that is published and all were run."""
    recipe = load_recipe(name)
    theirs = recipe.published.get("average")
    own = [run for run in runs if name in run.configuration.get("recipes", ())]
    found = [run.scores(run.headline(recipe.system)) for run in own]
    if theirs is None or len(found) < len(recipe.tasks) or not all(found):
        return None
    ours = fmean(each.value for each in found if each is not None)
    count = str(sum(len(run.headline(recipe.system)) for run in own))
    return [name, recipe.system.name, "average", count, f"{theirs:g}%", f"{ours:.1%}"]


def _context(task: Task) -> int:
    assert task.context_tokens is not None
    return task.context_tokens


def _replica(config: EngineConfig, gpu: GPU, context: int) -> Replica:
    assert not isinstance(config.quantization, dict)
    return Replica(
        _SHAPES[config.model],
        gpu,
        context,
        num_gpus=config.tensor_parallel,
        layer_bits=_BITS[config.quantization],
        losses=LIKELY,
    )


def _token_s(system: System, long: Replica, short: Replica, drafting: Replica) -> float:
    """Return the seconds of a generated token of one answer, without prefills."""
    if not system.is_drafted:
        return (long if system.reads_everything else short).plain_s(1)
    drafter = drafting if system.needs_drafter else short
    if system.drafts == "window":
        drafter = replace(long, context=system.window_drafting.window)
    block_s = system.block * drafter.draft_s(1) + long.verify_s(1, system.block)
    return block_s / tokens_per_round(ACCEPTANCE, system.block)

"""The recipes of Table 1 on all GPUs of a machine: a process for each group of them."""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path

import typer
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from deployments.cli.evals.eval_options import EvalOptions
from deployments.cli.terminal import USAGE, err, fail, note, out, say
from evaluation.recipes import recipe_names
from evaluation.table_1 import GpuNode, TableJob, find_node, list_jobs, write_page

_RAPID = (sys.executable, "-c", "from deployments.cli import app; app()")
_PASSED = ("data", "target", "drafter", "dtype", "embedder", "limit", "batch")
_SILENCE_S = 60.0  # between lines of progress where they cannot stay in their place
_TAIL_BYTES = 4096  # of a log, which hold its last line


@dataclass(frozen=True, slots=True)
class NodeShard:
    """A part of a job's items, which a process answers on a group of GPUs."""

    name: str
    num_gpus: int
    command: tuple[str, ...]
    log: Path


def run_node(options: EvalOptions) -> None:
    """Run the named recipes, or all, and write their page; with --dry-run, show what would run.

    Raises:
        typer.Exit: Something failed, or Ctrl-C ended the run; the same command goes on.
        ConfigurationError: The node, a recipe or the quantization is unknown.
    """
    assert options.node is not None
    if options.recipe and options.quantization:
        fail(
            f"--quantization is for all recipes: name those that end in -{options.quantization}",
            USAGE,
        )
    node = find_node(options.node)
    jobs = list_jobs(options.recipe or recipe_names(options.quantization))
    folder = options.out_dir or Path(".eval") / "table-1"
    possible = [job for job in jobs if job.why_not_on(node) is None]
    shards = [shard for job in possible for shard in _shards(job, node, folder, options)]
    if options.dry_run:
        _show_plan(jobs, node, shards)
        return
    for job in jobs:
        if job not in possible:
            note(f"{job.name} is left out: it {job.why_not_on(node)}")
    devices = _visible_devices(node)
    try:
        failed = asyncio.run(supervise(shards, devices))
    except KeyboardInterrupt:
        note(f"interrupted; what is done is kept in {folder}: the same command goes on from there")
        raise typer.Exit(130) from None
    note(f"written to {write_page(possible, folder)}")
    if failed:
        fail(f"{len(failed)} of {len(shards)} parts failed; the same command runs them again")


async def supervise(shards: Sequence[NodeShard], devices: Sequence[str]) -> list[NodeShard]:
    """Run shards on groups of devices, as many at once as there are groups; return the failed.

    When this is cancelled, all processes end.
    """
    running: dict[NodeShard, str] = {}
    failed: list[NodeShard] = []

    async def run_one_after_another(waiting: Iterator[NodeShard], names: str, threads: int) -> None:
        for shard in waiting:
            running[shard] = names
            if status := await _run(shard, names, threads):
                failed.append(shard)
                note(f"{shard.name} failed with exit status {status}; its log is {shard.log}")
            else:
                note(f"{shard.name} is done")
            del running[shard]

    watching = asyncio.create_task(_watch(running))
    try:
        for size, of_size in groupby(shards, key=lambda shard: shard.num_gpus):
            waiting = iter(list(of_size))
            groups = [devices[at : at + size] for at in range(0, len(devices) - size + 1, size)]
            threads = max(1, (os.cpu_count() or 1) // len(groups))
            async with asyncio.TaskGroup() as tasks:
                for group in groups:
                    tasks.create_task(run_one_after_another(waiting, ",".join(group), threads))
    finally:
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching
    return failed


async def _run(shard: NodeShard, devices: str, threads: int) -> int:
    """Run a shard's process to its end and return its exit status."""
    shard.log.parent.mkdir(parents=True, exist_ok=True)
    environment = {"CUDA_VISIBLE_DEVICES": devices, "OMP_NUM_THREADS": str(threads)}
    with shard.log.open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *shard.command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=asyncio.subprocess.STDOUT,
            env=os.environ | environment,
        )
    try:
        return await process.wait()
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()


async def _watch(running: dict[NodeShard, str]) -> None:
    """Show a line for each running shard: in its place on a terminal, else once a minute."""
    if not err.is_terminal:
        while True:
            await asyncio.sleep(_SILENCE_S)
            note("\n".join(_lines(running)))
    with Live(console=err, transient=True) as live:
        while True:
            live.update(Text("\n".join(_lines(running)), no_wrap=True, overflow="ellipsis"))
            await asyncio.sleep(1.0)


def _lines(running: dict[NodeShard, str]) -> list[str]:
    return [
        f"{shard.name}{f' on GPU {devices}' if devices else ''}: {_last_line(shard.log)}"
        for shard, devices in running.items()
    ]


def _last_line(log: Path) -> str:
    with suppress(OSError), log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        lines = file.read().decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "begins")
    return "begins"


def _shards(
    job: TableJob, node: GpuNode, folder: Path, options: EvalOptions
) -> Iterator[NodeShard]:
    count = min(job.count_shards(node), options.limit or node.num_gpus)
    given = {name: getattr(options, name) for name in _PASSED}
    pairs = [("--recipe", recipe.name) for recipe in job.recipes]
    pairs += [(f"--{name}", str(value)) for name, value in given.items() if value is not None]
    asked = tuple(chain.from_iterable(pairs))
    for part in range(1, count + 1):
        place = folder / job.name
        command = (
            *("eval", *asked, "--shard", f"{part}/{count}", "--out", str(place)),
            *("--reuse-prefill", "--workers", "1"),
        )
        num_gpus = 1 if node.gpu is None else job.recipes[0].num_gpus
        log = place / f"{part}-of-{count}.log"
        yield NodeShard(f"{job.name} {part}/{count}", num_gpus, (*_RAPID, *command), log)


def _visible_devices(node: GpuNode) -> list[str]:
    """Return the names of the node's GPUs; empty ones, which hide all, for processes on a CPU."""
    if node.gpu is None:
        return [""] * node.num_gpus
    import torch

    if (found := torch.cuda.device_count()) < node.num_gpus:
        fail(f"this machine shows {found} GPUs, and the node has {node.num_gpus}")
    told = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = told.split(",") if told else [str(index) for index in range(found)]
    return names[: node.num_gpus]


def _show_plan(jobs: Sequence[TableJob], node: GpuNode, shards: Sequence[NodeShard]) -> None:
    table = Table(Column("models", overflow="fold"), box=None)
    for title in ("recipes", "GPUs", "at once", "GB a GPU", "GB to fetch", "hours"):
        table.add_column(title)
    for job in jobs:
        if (problem := job.why_not_on(node)) is not None:
            note(f"{job.name} is left out: it {problem}")
            continue
        cells: list[float] = [len(job.recipes), job.recipes[0].num_gpus, job.count_shards(node)]
        if node.gpu is not None:
            cells += [round(job.bytes_of_gpu(node.gpu) / 1e9), round(job.gigabytes)]
            cells.append(round(job.hours_on(node), 1))
        table.add_row(job.name, *map(str, cells))
    out.print(table)
    note("The hours are arithmetic (docs/table-1.md). The first process of each runs:")
    for shard in shards:
        if " 1/" in shard.name:
            say(shlex.join(("rapid", *shard.command[len(_RAPID) :])))

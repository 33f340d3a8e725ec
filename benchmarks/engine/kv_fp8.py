"""What KV in fp8 changes: answers of the embedded models, memory, and time on a CPU.

    python -m benchmarks.engine.kv_fp8 [--items 36] [--quick]

* Answers: the first items of the laptop grid (documents of 500 to 3,000 tokens, greedy), answered
  plainly, with a drafter (`sd`, lossless) and with `adaptive`, by engines that keep KV in their
  dtype and by engines that keep it in fp8. An answer counts as changed if its text is another one.
* Memory: bytes of a token's KV, and tokens in one GiB.
* Time: steps of a model with random weights whose cache is filled, one thread, processor time; a
  ratio is the median of the repetitions' own.

It takes about fifteen minutes of one core.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from dataclasses import replace
from typing import Any

import torch

from benchmarks.engine.filled import Model, random_model
from benchmarks.reporting import keep, ratios, shown, table
from evaluation.drivers.answering import answer_all, trials_left
from evaluation.drivers.in_process import Models, open_in_process
from evaluation.items import Item
from evaluation.loaders.generated import load
from evaluation.results import Result
from evaluation.scorers import METRICS
from evaluation.tasks import Task, load_task
from rapid.config import EngineConfig
from rapid.engines.attention.batch import Feed
from rapid.engines.attention.cases import randomise
from rapid.engines.forward.runner import Runner
from rapid.engines.kv.cache import KVCache, PageRun, PageTable
from rapid.planning.known_models import KNOWN_SHAPES

SYSTEMS = ("plain", "sd", "rapid-adaptive")
DTYPES = ("float32", "bfloat16")
SHAPE = {"hidden_size": 1024, "num_layers": 8, "num_heads": 16, "num_kv_heads": 4}
CONTEXTS = (1024, 8192)
ROWS = (1, 8, 512)
REPEATS = 5
CPU = torch.device("cpu")


# --- answers --------------------------------------------------------------------------------------


async def answers(
    task: Task, items: list[Item], **settings: dict[str, Any]
) -> dict[str, list[Result]]:
    """Return the answers of every system, in the order of the items.

    Args:
        task: the systems, and how they answer.
        items: the questions.
        **settings: those of the engines of `target` and `drafter`.
    """
    target, drafter = (
        EngineConfig(model=f"embedded:{role}", device="cpu", **settings[role])
        for role in ("target", "drafter")
    )
    found: dict[tuple[str, str], Result] = {}

    def take(result: Result) -> None:
        assert result.error is None, result.error
        found[result.system, result.item] = result

    async with open_in_process(task, Models(target, drafter), items, items, batch=1) as backend:
        trials = [trial for each in trials_left(items, task) for trial in each]
        metrics = {name: METRICS[name] for name in task.metrics}
        await answer_all(backend, trials, task, metrics, take, batch=1)
    return {name: [found[name, item.id] for item in items] for name in SYSTEMS}


def compare_answers(num_items: int) -> tuple[list[list[object]], dict[str, Any]]:
    laptop = load_task("laptop")
    systems = tuple(system for system in laptop.systems if system.name in SYSTEMS)
    task = laptop.model_copy(update={"systems": systems})
    items = [item for item, _ in zip(load(task.source, None), range(num_items), strict=False)]
    rows, report = [], {}
    for dtype in DTYPES:
        began = time.process_time()
        both = [{"dtype": dtype, "kv_cache_dtype": kv} for kv in ("auto", "fp8")]
        usual, kept = [
            asyncio.run(answers(task, items, target=each, drafter=each)) for each in both
        ]
        for name in SYSTEMS:
            right = [sum(result.scores["exact"] for result in each[name]) for each in (usual, kept)]
            case = {
                "changed": differing(usual[name], kept[name]),
                "right": right[0],
                "right_fp8": right[1],
                "other_than_plain": differing(usual["plain"], usual[name]),
                "other_than_plain_fp8": differing(kept["plain"], kept[name]),
            }
            report[f"{dtype}, {name}"] = case
            rows.append([dtype, name, *case.values()])
            print(*rows[-1], flush=True)
        print(f"{time.process_time() - began:.0f} s", flush=True)
    return rows, report


def differing(some: list[Result], others: list[Result]) -> int:
    """Return how many answers have another text."""
    pairs = zip(some, others, strict=True)
    return sum(one.prediction != other.prediction for one, other in pairs)


# --- memory ---------------------------------------------------------------------------------------


def compare_memory() -> list[list[object]]:
    rows: list[list[object]] = []
    for name, (_, shape) in KNOWN_SHAPES.items():
        plain, eight = shape.kv_bytes_per_token(2), shape.kv_bytes_per_token(1)
        rows.append([name, plain, eight, int(2**30 / plain), int(2**30 / eight)])
    return rows


# --- time -----------------------------------------------------------------------------------------


def runner_of(model: Model, context: int, *, is_fp8: bool) -> Runner:
    """Return the forward of a model over a filled cache of one sequence."""
    loaded = model.ours
    layout = replace(loaded.kv_layout, is_fp8=is_fp8)
    cache = KVCache(layout, (context + max(ROWS)) // 16, 16)
    for layer in cache.layers:
        for tensor in layer:
            randomise(tensor)
    return Runner(loaded.model, cache, CPU, loaded.vocab_size)


def step_ms(runner: Runner, context: int, num_rows: int) -> float:
    """Return the processor milliseconds of a step."""
    pages = PageTable([PageRun(0, (context + max(ROWS)) // 16)], 16)
    feed = Feed(list(range(10, 10 + num_rows)), context, pages, min(num_rows, 16))
    began = time.thread_time()
    runner.run([feed])
    return 1e3 * (time.thread_time() - began)


def compare_time(contexts: tuple[int, ...]) -> tuple[list[list[object]], list[dict[str, Any]]]:
    rows, report = [], []
    for dtype in DTYPES:
        model = random_model(dtype, **SHAPE)
        for context in contexts:
            runners = [runner_of(model, context, is_fp8=is_fp8) for is_fp8 in (False, True)]
            for num_rows in ROWS:
                times = [
                    [step_ms(runner, context, num_rows) for runner in runners]
                    for _ in range(REPEATS + 1)
                ]
                plain, eight = zip(*times[1:], strict=True)
                slower = ratios(eight, plain)
                report.append(
                    {"dtype": dtype, "context": context, "rows": num_rows, "time": slower}
                )
                rows.append([dtype, context, num_rows, shown(slower)])
                print(*rows[-1], flush=True)
    return rows, report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--items", type=int, default=36)
    parser.add_argument("--quick", action="store_true", help="two items, nothing kept")
    options = parser.parse_args()
    torch.set_num_threads(1)
    answered, report = compare_answers(2 if options.quick else options.items)
    memory = compare_memory()
    timed, times = compare_time(CONTEXTS[:1] if options.quick else CONTEXTS)
    text = "\n".join(
        (
            table(
                ["dtype", "system", "changed by fp8", "right", "right in fp8",
                 "other than plain", "other than plain in fp8"],
                answered,
            ),
            table(
                ["model", "bytes of a token, bfloat16", "fp8", "tokens in a GiB", "in fp8"], memory
            ),
            table(["dtype", "context", "rows of the step", "time of fp8 over dtype"], timed),
        )
    )  # fmt: skip
    settings = {"items": options.items, "systems": SYSTEMS, "shape": SHAPE}
    kept = {"settings": settings, "answers": report, "times": times}
    keep(None if options.quick else "kv_fp8", "KV in fp8 on a CPU", text, kept)


if __name__ == "__main__":
    main()

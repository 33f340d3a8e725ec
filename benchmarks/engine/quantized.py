"""Weights in eight and four bits on a CPU: the time of steps, answers, and distributions.

    python -m benchmarks.engine.quantized [--items 36] [--model smollm2-135m] [--quick]

* Time: models with random weights, 110 and 200 million in their layers. A step has 1 to 512 new
  rows of one sequence after 256 tokens: decoding has one, judging a block a few, prefill many. The
  models run in turn, on one thread, in processor time; a ratio is the median of the repetitions'.
* Answers: the first items of the laptop grid (documents of 500 to 3,000 tokens, greedy) by the
  embedded models. An answer counts as changed if its text is another one than in bfloat16.
* Distributions: of a real model after every token of a text, against those of the same model in
  float32: their divergence (nats), its 99th percentile, how often the likeliest token is the same,
  and by how much the text's own tokens become less likely; groups of other lengths are beside those
  that are shipped.
  Two of SmolLM2's three kinds of columns are 576, which 128 does not divide. Its file has weights
  of four bits in groups of 32 itself, so this is a second rounding.

It takes about five minutes of one core.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.engine.filled import Model, random_model
from benchmarks.reporting import ROOT, keep, ratios, settings, shown, spread, table
from evaluation.drivers.answering import answer_all, trials_left
from evaluation.drivers.in_process import Models, open_in_process
from evaluation.items import Item
from evaluation.loaders.generated import load
from evaluation.results import Result
from evaluation.scorers import METRICS
from evaluation.tasks import Task, load_task
from rapid.config import EngineConfig
from rapid.engines.attention.batch import Feed
from rapid.engines.forward.loading import LoadedModel, load_model
from rapid.engines.forward.products import Method, quantize
from rapid.engines.forward.runner import Runner
from rapid.engines.kv.cache import KVCache, PageRun, PageTable
from rapid.planning import packed_bits

CPU = torch.device("cpu")
SYSTEMS = ("plain", "sd", "rapid-adaptive")
METHODS: tuple[Method, ...] = ("int8", "int4")
SHAPES = {
    "110M": {"hidden_size": 1024, "num_layers": 12, "num_heads": 16, "num_kv_heads": 4},
    "200M": {"hidden_size": 2048, "num_layers": 5, "num_heads": 32, "num_kv_heads": 8},
}
ROWS = (1, 2, 4, 8, 16, 64, 65, 512)
CONTEXT = 256
REPEATS = 9
TEXT = ROOT / "docs/operations.md"
NUM_TOKENS = 384  # of the text
CHUNK = 128  # tokens of it that are read at once
PAGE = 16
GROUPS = (32, 64, 128)


# --- time -----------------------------------------------------------------------------------------


def runner_of(model: Model) -> Runner:
    """Return the forward of a model over a cache that has room for one sequence."""
    loaded = model.ours
    cache = KVCache(loaded.kv_layout, -(-(CONTEXT + max(ROWS)) // 16), 16)
    for layer in cache.layers:
        for tensor in layer:
            tensor.normal_()
    return Runner(loaded.model, cache, CPU, loaded.vocab_size)


def step_ms(runner: Runner, num_rows: int) -> float:
    """Return the processor milliseconds of a step."""
    table = PageTable([PageRun(0, (CONTEXT + max(ROWS)) // 16)], 16)
    feed = Feed(list(range(10, 10 + num_rows)), CONTEXT, table, min(num_rows, 16))
    began = time.thread_time()
    runner.run([feed])
    return 1e3 * (time.thread_time() - began)


def compare_time(repeats: int) -> list[dict[str, Any]]:
    """Measure all shapes and rows."""
    cases: list[dict[str, Any]] = []
    for name, shape in SHAPES.items():
        runners = [runner_of(random_model("bfloat16", **shape))]
        for method in METHODS:
            model = random_model("bfloat16", **shape)
            quantize(model.ours.model, method, CPU)
            runners.append(runner_of(model))
        for num_rows in ROWS:
            times = [[step_ms(runner, num_rows) for runner in runners] for _ in range(repeats + 1)]
            bfloat16, *others = zip(*times[1:], strict=True)
            case: dict[str, Any] = {"weights": name, "rows": num_rows}
            case["bfloat16_ms"] = round(statistics.median(bfloat16), 2)
            for method, own in zip(METHODS, others, strict=True):
                case[f"{method}_ms"] = spread(own)
                case[f"{method}_speedup"] = ratios(bfloat16, own)
            cases.append(case)
            print(name, num_rows, *(shown(case[f"{each}_speedup"]) for each in METHODS), flush=True)
    return cases


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


def differing(some: list[Result], others: list[Result]) -> int:
    """Return how many answers have another text."""
    pairs = zip(some, others, strict=True)
    return sum(one.prediction != other.prediction for one, other in pairs)


def compare_answers(num_items: int) -> list[dict[str, Any]]:
    """Answer with all weights in bfloat16, then with those of both models or of one quantized."""
    laptop = load_task("laptop")
    systems = tuple(system for system in laptop.systems if system.name in SYSTEMS)
    task = laptop.model_copy(update={"systems": systems})
    items = [item for item, _ in zip(load(task.source, None), range(num_items), strict=False)]
    plain: dict[str, Any] = {"dtype": "bfloat16"}
    kinds = {"bfloat16": (plain, plain)}
    for method in METHODS:
        quantized = plain | {"quantization": method}
        kinds[f"{method}, both models"] = quantized, quantized
    kinds["int4, the drafter"] = plain, plain | {"quantization": "int4"}
    cases, usual = [], {}
    for kind, (target, drafter) in kinds.items():
        found = asyncio.run(answers(task, items, target=target, drafter=drafter))
        usual = usual or found
        for name in SYSTEMS:
            case = {
                "weights": kind,
                "system": name,
                "right": sum(result.scores["exact"] for result in found[name]),
                "changed": differing(usual[name], found[name]),
                "other than plain": differing(found["plain"], found[name]),
            }
            cases.append(case)
            print(*case.values(), flush=True)
    return cases


# --- distributions --------------------------------------------------------------------------------


def log_probs(loaded: LoadedModel, token_ids: list[int], cache: KVCache) -> torch.Tensor:
    """Return the log-probabilities after every token, [tokens, vocab]."""
    runner = Runner(loaded.model, cache, loaded.device, loaded.vocab_size)
    pages = PageTable([PageRun(0, len(token_ids) // PAGE + 1)], PAGE)
    rows = []
    for start in range(0, len(token_ids), CHUNK):
        part = token_ids[start : start + CHUNK]
        rows += runner.run([Feed(part, start, pages, len(part))])
    return torch.cat(rows).log_softmax(-1)


def compare(exact: torch.Tensor, found: torch.Tensor, token_ids: list[int]) -> dict[str, float]:
    """Return what the table says of one kind of weights."""
    divergence = (exact.exp() * (exact - found)).sum(-1)
    same = (exact.argmax(-1) == found.argmax(-1)).float().mean()
    said = torch.tensor(token_ids[1:])[:, None]
    lost = (exact[:-1].gather(1, said) - found[:-1].gather(1, said)).mean()
    return {
        "divergence": round(float(divergence.mean()), 5),
        "its 99th percentile": round(float(divergence.quantile(0.99)), 4),
        "same likeliest token": round(float(same), 3),
        "less likely text": round(float(lost), 4),
    }


def compare_distributions(model: str) -> list[dict[str, Any]]:
    """Return what each kind of weights does to a real model's next-token distributions."""

    def log_probs_of(dtype: str, quantization: Method | None) -> torch.Tensor:
        config = EngineConfig(model=model, dtype=dtype, quantization=quantization, device="cpu")
        loaded = load_model(config)
        token_ids[:] = loaded.tokenizer(TEXT.read_text())["input_ids"][:NUM_TOKENS]
        cache = KVCache(loaded.kv_layout, NUM_TOKENS // PAGE + 1, PAGE)
        return log_probs(loaded, token_ids, cache)

    token_ids: list[int] = []
    exact = log_probs_of("float32", None)
    ways = {"bfloat16": log_probs_of("bfloat16", None), "int8": log_probs_of("bfloat16", "int8")}
    shipped = packed_bits.GROUPS
    ways[f"int4, groups of {' or '.join(map(str, shipped))}"] = log_probs_of("bfloat16", "int4")
    for length in GROUPS:
        packed_bits.GROUPS = tuple(group for group in (128, 64, 32) if group <= length)
        ways[f"int4, of {length} at most"] = log_probs_of("bfloat16", "int4")
    packed_bits.GROUPS = shipped
    return [{"weights": way} | compare(exact, found, token_ids) for way, found in ways.items()]


def tables(report: dict[str, Any]) -> str:
    """Return the tables of the parts that are done."""
    times = [
        [case["weights"], case["rows"], case["bfloat16_ms"]]
        + [shown(case[f"{method}_speedup"]) for method in METHODS]
        for case in report.get("times", [])
    ]
    header = ["weights of the layers", "rows", "bfloat16, ms"]
    header += [f"{method}, speed over it" for method in METHODS]
    others = [report[name] for name in ("distributions", "answers") if name in report]
    parts = [table(list(cases[0]), [list(case.values()) for case in cases]) for cases in others]
    return "\n".join([table(header, times)] * bool(times) + parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--items", type=int, default=36)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--quick", action="store_true", help="two items, nothing kept")
    options = parser.parse_args()
    torch.set_num_threads(1)
    report: dict[str, Any] = {"settings": settings(options)}
    parts: dict[str, Callable[[], object]] = {
        "times": lambda: compare_time(1 if options.quick else REPEATS),
        "distributions": lambda: compare_distributions(options.model),
        "answers": lambda: compare_answers(2 if options.quick else options.items),
    }
    for name, measure in parts.items():
        report[name] = measure()
        print(f"\n{tables(report)}", flush=True)
    text = f"torch {torch.__version__}, one thread, processor time.\n\n{tables(report)}"
    title = "Weights in eight and four bits on a CPU"
    keep(None if options.quick else "quantized", title, text, report)


if __name__ == "__main__":
    main()

"""Steps of a model with weights in eight bits against the same model in bfloat16, on a CPU.

    python benchmarks/quantized.py

The models have random weights, 110 and 200 million in their layers. A step has 1 to 512 new rows of
one sequence after 256 tokens: decoding has one, judging a block a few, prefill many. Both models
run in turn, on one thread, in processor time; a ratio is the median of the repetitions' own. It
takes about 2 minutes.
"""

from __future__ import annotations

import statistics
import time

import torch
from filled import Model, random_model
from reporting import keep, ratios, shown, spread, table

from rapid.engines.attention.batch import Feed
from rapid.engines.forward.products import quantize
from rapid.engines.forward.runner import Runner
from rapid.engines.kv.cache import KVCache, PageTable, Run

CPU = torch.device("cpu")
SHAPES = {
    "110M": {"hidden_size": 1024, "num_layers": 12, "num_heads": 16, "num_kv_heads": 4},
    "200M": {"hidden_size": 2048, "num_layers": 5, "num_heads": 32, "num_kv_heads": 8},
}
ROWS = (1, 2, 4, 8, 16, 64, 512)
CONTEXT = 256
REPEATS = 9


def runner_of(model: Model) -> Runner:
    """Return the forward of a model over a cache that has room for one sequence."""
    loaded = model.ours
    cache = KVCache(loaded.kv_layout, (CONTEXT + max(ROWS)) // 16, 16)
    for layer in cache.layers:
        for tensor in layer:
            tensor.normal_()
    return Runner(loaded.model, cache, CPU, loaded.vocab_size)


def step_ms(runner: Runner, num_rows: int) -> float:
    """Return the processor milliseconds of a step."""
    table = PageTable([Run(0, (CONTEXT + max(ROWS)) // 16)], 16)
    feed = Feed(list(range(10, 10 + num_rows)), CONTEXT, table, min(num_rows, 16))
    began = time.thread_time()
    runner.run([feed])
    return 1e3 * (time.thread_time() - began)


def measure() -> list[dict[str, object]]:
    """Measure all shapes and rows."""
    cases: list[dict[str, object]] = []
    for name, shape in SHAPES.items():
        plain, eight = random_model("bfloat16", **shape), random_model("bfloat16", **shape)
        quantize(eight.ours.model, "int8", CPU)
        runners = runner_of(plain), runner_of(eight)
        for num_rows in ROWS:
            times = [[step_ms(runner, num_rows) for runner in runners] for _ in range(REPEATS + 1)]
            bfloat16, int8 = zip(*times[1:], strict=True)
            cases.append(
                {
                    "weights": name,
                    "rows": num_rows,
                    "bfloat16_ms": round(statistics.median(bfloat16), 2),
                    "int8_ms": spread(int8),
                    "speedup": ratios(bfloat16, int8),
                }
            )
            print(name, num_rows, cases[-1]["speedup"], flush=True)
    return cases


def main() -> None:
    torch.set_num_threads(1)
    cases = measure()
    rows = [
        [case["weights"], case["rows"], case["bfloat16_ms"], case["int8_ms"]["median"],
         shown(case["speedup"])]
        for case in cases
    ]  # fmt: skip
    header = ["weights of the layers", "rows", "bfloat16, ms", "int8, ms", "speedup"]
    text = f"torch {torch.__version__}, one thread, processor time.\n\n{table(header, rows)}"
    keep("quantized", "Weights in eight bits on a CPU", text, {"cases": cases})


if __name__ == "__main__":
    main()

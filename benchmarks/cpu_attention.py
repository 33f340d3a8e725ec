"""Attention over page runs against one SDPA call on a contiguous tensor, on this CPU.

Shows that reading KV through runs gathers and copies nothing: the ratio stays near one, while
indexing the pages together first (`k[table]`) costs many times the attention itself. Every row also
checks that the results agree. Candidates are interleaved within a repetition.

    python benchmarks/cpu_attention.py [--threads 1] [--repeats 9]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.nn.functional import scaled_dot_product_attention

from evaluation.circumstances import circumstances
from rapid.engines.attention import ragged_attention
from rapid.engines.batching import Feed, assemble
from rapid.engines.kv_cache import KVCache, KVLayout, PageTable, Run

PAGE, KV_HEADS, GROUP, HEAD_DIM = 16, 4, 1, 64
CPU = torch.device("cpu")


def interleaved_ms(
    candidates: dict[str, Callable[[], torch.Tensor]], repeats: int
) -> dict[str, list[float]]:
    """Milliseconds of every candidate in every repetition."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for candidate in candidates.values():
        candidate()
    for _ in range(repeats):
        for name, candidate in candidates.items():
            start = time.perf_counter()
            candidate()
            times[name].append((time.perf_counter() - start) * 1e3)
    return times


def table_of(num_tokens: int, num_runs: int) -> PageTable:
    """Equal runs with a foreign page between them; the last takes the rest."""
    pages = -(-num_tokens // PAGE)
    length = -(-pages // num_runs)
    runs, start = [], 3
    while pages:
        size = min(length, pages)
        runs.append(Run(start, start + size))
        start += size + 1
        pages -= size
    return PageTable(runs, PAGE)


def measure(num_keys: int, rows: int, num_runs: int, dtype: torch.dtype, repeats: int) -> dict:
    torch.manual_seed(0)
    table = table_of(num_keys, num_runs)
    cache = KVCache(
        KVLayout(KV_HEADS, HEAD_DIM, dtype, (CPU,)), max(r.stop for r in table.runs) + 1, PAGE
    )
    keys, values = cache.layers[0]
    keys.normal_()
    values.normal_()
    feed = Feed([0] * rows, num_keys - rows, table, rows)
    ragged = assemble([feed], cache, CPU).rows
    query = torch.randn(1, KV_HEADS * GROUP, rows, HEAD_DIM).to(dtype)
    key, value = (torch.randn(1, KV_HEADS, rows, HEAD_DIM).to(dtype) for _ in range(2))
    layer = SimpleNamespace(layer_idx=0)
    pages = torch.cat([torch.arange(run.start, run.stop) for run in table.runs])
    by_page = [t.view(KV_HEADS, -1, PAGE, HEAD_DIM) for t in (keys, values)]

    def ours() -> torch.Tensor:
        return ragged_attention(layer, query, key, value, None, ragged=ragged)[0].transpose(1, 2)

    def gathered() -> list[torch.Tensor]:
        return [t[:, pages].flatten(1, 2)[None, :, :num_keys] for t in by_page]

    ours()
    contiguous = [tensor.contiguous() for tensor in gathered()]
    mask = torch.ones(rows, num_keys, dtype=torch.bool).tril(num_keys - rows)

    # Without its mask SDPA computes slightly other numbers at equal work; the mask costs it extra.
    candidates = {
        "runs": ours,
        "contiguous": lambda: scaled_dot_product_attention(query, *contiguous),
        "contiguous_masked": lambda: scaled_dot_product_attention(
            query, *contiguous, attn_mask=mask
        ),
        "gather_first": lambda: scaled_dot_product_attention(query, *gathered(), attn_mask=mask),
    }
    difference = (ours().float() - candidates["contiguous_masked"]().float()).abs().max().item()
    times = interleaved_ms(candidates, repeats)
    ratios = {
        name: round(statistics.median(a / b for a, b in zip(times["runs"], other, strict=True)), 3)
        for name, other in times.items()
        if name != "runs"
    }
    return {
        "keys": num_keys,
        "rows": rows,
        "runs": num_runs,
        "dtype": str(dtype).removeprefix("torch."),
        "median_ms": {name: round(statistics.median(t), 3) for name, t in times.items()},
        "min_ms": {name: round(min(t), 3) for name, t in times.items()},
        "runs_over": ratios,
        "max_difference": difference,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with torch.inference_mode():
        cases = [
            measure(num_keys, rows, num_runs, dtype, arguments.repeats)
            for dtype in (torch.float32, torch.bfloat16)
            for num_keys in (16384, 32768)
            for rows in (1, 10)
            for num_runs in (1, 4)
        ]
    for case in cases:
        print(
            f"{case['dtype']:>8} {case['keys']:>6} keys {case['rows']:>2} rows {case['runs']} runs:"
            f" {case['median_ms']['runs']:7.2f} ms;"
            f" / contiguous {case['runs_over']['contiguous']:.2f},"
            f" / masked {case['runs_over']['contiguous_masked']:.2f},"
            f" / gather first {case['runs_over']['gather_first']:.3f};"
            f" difference {case['max_difference']:.1e}"
        )
    result = {
        **circumstances(),
        "threads": arguments.threads,
        "torch": torch.__version__,
        "repeats": arguments.repeats,
        "shape": {"kv_heads": KV_HEADS, "group": GROUP, "head_dim": HEAD_DIM, "page_tokens": PAGE},
        "cases": cases,
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / "cpu_attention.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written to {path}")


if __name__ == "__main__":
    main()

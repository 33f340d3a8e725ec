"""Attention on this CPU: the fastest form for each shape, and the cost of reading page runs.

    python -m benchmarks.engine.cpu_attention [--quick]

The first table compares the forms of `rapid.engines.attention.cpu` and the written-out products by
dtype, threads, KV heads, rows (all queries that share a KV head) and keys; `chosen / best` is the
time of the form that the engine takes over that of the fastest. The second compares attention
through page runs with one SDPA call on a contiguous tensor. Attention through runs gathers and
copies nothing, so the ratio stays near one, while indexing the pages together first (`k[table]`)
costs many times the attention itself. Every row also checks that the results agree. Candidates are
interleaved within a repetition.

It takes a minute and a half, with `--quick` 20 seconds.
"""

from __future__ import annotations

import argparse
import functools
import os
import random
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.reporting import keep, table
from rapid.engines.attention import cpu as cpu_attention
from rapid.engines.attention.batch import Feed, assemble
from rapid.engines.attention.ragged import attend_ragged, plain_partial
from rapid.engines.kv.cache import KVCache, KVLayout, PageRun, PageTable

PAGE, KV_HEADS, GROUP, HEAD_DIM = 16, 4, 1, 64
CPU = torch.device("cpu")


def interleaved_ms(
    candidates: dict[str, Callable[[], torch.Tensor]], repeats: int
) -> dict[str, list[float]]:
    """Return the milliseconds of every candidate in every repetition, each in another order.

    The order changes because the candidate that ran just before leaves the caches warm or cold.
    """
    order = list(candidates)
    shuffle = random.Random(0).shuffle
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for candidate in candidates.values():
        candidate()
    for _ in range(repeats):
        shuffle(order)
        for name in order:
            start = time.perf_counter()
            candidates[name]()
            times[name].append((time.perf_counter() - start) * 1e3)
    return times


def table_of(num_tokens: int, num_runs: int) -> PageTable:
    """Return a page table of equal runs with a foreign page between them; the last has the rest."""
    pages = -(-num_tokens // PAGE)
    length = -(-pages // num_runs)
    runs, start = [], 3
    while pages:
        size = min(length, pages)
        runs.append(PageRun(start, start + size))
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
        return attend_ragged(layer, query, key, value, None, ragged=ragged)[0].transpose(1, 2)

    def gathered() -> list[torch.Tensor]:
        return [t[:, pages].flatten(1, 2)[None, :, :num_keys] for t in by_page]

    ours()
    contiguous = [tensor.contiguous() for tensor in gathered()]
    mask = torch.ones(rows, num_keys, dtype=torch.bool).tril(num_keys - rows)

    # Without its mask SDPA computes slightly other numbers at equal work; with it, it costs more.
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


def measure_forms(
    num_keys: int, rows: int, kv_heads: int, dtype: torch.dtype, repeats: int
) -> dict[str, Any]:
    """Time every form on the same views of a cache; the faster half of the repetitions counts."""
    torch.manual_seed(0)
    cache = torch.randn(2, 1, kv_heads, num_keys + 64, HEAD_DIM).to(dtype)
    key, value = cache[:, :, :, 32 : 32 + num_keys]
    query = torch.randn(1, kv_heads, rows, HEAD_DIM).to(dtype)
    scale = HEAD_DIM**-0.5
    exact, _ = plain_partial(query.float(), key.float(), value.float(), scale, is_causal=False)
    forms = [cpu_attention.attend_packed]
    if kv_heads % torch.get_num_threads():  # otherwise there is only one part
        forms.append(cpu_attention.split)
    if 1 < rows <= 4:
        forms.append(cpu_attention.row_by_row)
    candidates = {
        form.__name__: functools.partial(form, query, key, value, scale) for form in forms
    }
    candidates["written out"] = functools.partial(
        plain_partial, query, key, value, scale, is_causal=False
    )
    for name, candidate in candidates.items():
        difference = (candidate()[0].float() - exact).abs().max().item()
        assert difference < (1e-5 if dtype == torch.float32 else 2e-2), (name, difference)
    times = interleaved_ms(candidates, repeats)
    lower = {name: statistics.median(sorted(t)[: repeats // 2 + 1]) for name, t in times.items()}
    chosen = cpu_attention.form_for(query, key).__name__
    return {
        "threads": torch.get_num_threads(),
        "dtype": str(dtype).removeprefix("torch."),
        "kv_heads": kv_heads,
        "keys": num_keys,
        "rows": rows,
        "ms": {name: round(ms, 4) for name, ms in lower.items()},
        "chosen": chosen,
        "chosen_over_best": round(lower[chosen] / min(lower.values()), 2),
    }


def table_of_forms(cases: list[dict[str, Any]]) -> str:
    """Return a table with a row per case and the chosen form's time in bold."""
    names = ["packed", "row_by_row", "split", "written out"]

    def cell(case: dict[str, Any], name: str) -> str:
        ms = f"{case['ms'][name]:.3f}" if name in case["ms"] else ""
        return f"**{ms}**" if name == case["chosen"] else ms

    shape = ["threads", "dtype", "kv_heads", "keys", "rows"]
    rows = [
        [*(case[key] for key in shape), *(cell(case, name) for name in names),
         case["chosen_over_best"]]
        for case in cases
    ]  # fmt: skip
    return table([*shape, *(f"{name}, ms" for name in names), "chosen / best"], rows)


def table_of_runs(cases: list[dict[str, Any]]) -> str:
    """Return a table of the times through runs, and their ratios to the others'."""
    others = ["contiguous", "contiguous_masked", "gather_first"]
    rows = [
        [case["dtype"], case["keys"], case["rows"], case["runs"], case["median_ms"]["runs"],
         *(case["runs_over"][name] for name in others)]
        for case in cases
    ]  # fmt: skip
    header = ["dtype", "keys", "rows", "runs", "through runs, ms"]
    return table([*header, *(f"over {name.replace('_', ' ')}" for name in others)], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer cases, nothing kept")
    is_quick = parser.parse_args().quick
    repeats = 5 if is_quick else 9
    dtypes = (torch.float32, torch.bfloat16)
    forms: list[dict[str, Any]] = []
    with torch.inference_mode():
        for threads in range(1, min(2, os.cpu_count() or 1) + 1):
            torch.set_num_threads(threads)
            forms += [
                measure_forms(num_keys, rows, kv_heads, dtype, repeats)
                for dtype in dtypes
                for kv_heads in (1, 4)
                for num_keys in ((4096, 16384) if is_quick else (1024, 4096, 16384, 65536))
                for rows in ((1, 2, 16) if is_quick else (1, 2, 4, 8, 16, 32))
            ]
        torch.set_num_threads(1)
        runs = [
            measure(num_keys, rows, num_runs, dtype, repeats)
            for dtype in dtypes
            for num_keys in ((16384,) if is_quick else (16384, 32768))
            for rows in (1, 10)
            for num_runs in (1, 4)
        ]
    over = [case["chosen_over_best"] for case in forms]
    text = (
        f"{HEAD_DIM} wide heads, torch {torch.__version__}, {repeats} repetitions.\n\n"
        f"## Forms\n\nIn bold what `form_for` takes: {sum(each <= 1.1 for each in over)} of "
        f"{len(over)} cases within 10 % of the fastest, median {statistics.median(over):.2f}, "
        f"worst {max(over):.2f}.\n\n{table_of_forms(forms)}\n"
        f"## Runs, one thread\n\n{KV_HEADS} KV heads.\n\n{table_of_runs(runs)}"
    )
    report = {
        "torch": torch.__version__,
        "repeats": repeats,
        "shape": {"kv_heads": KV_HEADS, "group": GROUP, "head_dim": HEAD_DIM, "page_tokens": PAGE},
        "forms": forms,
        "runs": runs,
    }
    keep(None if is_quick else "cpu_attention", "Attention on a CPU", text, report)


if __name__ == "__main__":
    main()

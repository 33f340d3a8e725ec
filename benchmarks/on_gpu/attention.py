"""Attention on its own: which candidates are right, and their time against the bytes they read."""

from __future__ import annotations

from functools import partial

from benchmarks.on_gpu.bench import Bench, layout_of, told_of
from benchmarks.on_gpu.served import PAGE, questions_of, tables_of
from rapid.engines.attention.cases import (
    CaseRows,
    chunk_checks,
    make_case,
    step_checks,
    tile_timings,
)
from rapid.engines.attention.cuda import all_candidates
from rapid.engines.attention.kernel_inputs import Attend
from rapid.engines.attention.survey import TOLERANCES, Finding, Tunable, device_ms, survey
from rapid.engines.kv.cache import KVCache, PageRun, PageTable


def correctness(bench: Bench) -> None:
    """Check every candidate; those that are wrong or missing leave `bench.candidates`."""
    candidates, bench.candidates = bench.candidates, []  # empty until each is found right
    layout = layout_of(bench, "8B", 1)
    heads = bench.plan.shapes["8B"]["num_attention_heads"]
    tolerance = TOLERANCES[bench.dtype]
    found = survey(candidates, step_checks(layout, heads, PAGE), [], tolerance, device_ms)
    able = [one for one in candidates if one.is_for_chunks]
    chunks = survey(able, chunk_checks(layout, heads, PAGE), [], tolerance, device_ms)
    large = [one for one in all_candidates(256) if one.name == "pages, flash-attn 2"]
    paged = survey(large, step_checks(layout, heads, 256), [], tolerance, device_ms)
    for kind, findings in (("steps", found), ("prefill", chunks), ("pages of 256", paged)):
        for finding in findings:
            bench.say(f"{kind}: {finding.candidate.name}", verdict_of(finding, tolerance))
        bench.report[f"correctness, {kind}"] = {
            one.candidate.name: one.problem or f"{one.error:.2e}" for one in findings
        }
    refused = {one.candidate.name for one in [*found, *chunks] if one.attend is None}
    bench.candidates = [one for one in candidates if one.name not in refused]


def verdict_of(finding: Finding, tolerance: float) -> str:
    return finding.problem or f"right: {finding.error:.1e} from float32, {tolerance:.0e} allowed"


def loaded(bench: Bench) -> dict[str, Attend]:
    """Return the candidates that were found right, each in its fastest form."""
    heads, long = bench.plan.shapes["8B"]["num_attention_heads"], bench.plan.contexts[0]
    kernels = {one.name: one.load() for one in bench.candidates}
    for attend in kernels.values():
        if isinstance(attend, Tunable):
            cache = KVCache(layout_of(bench, "8B", 1), long // PAGE, PAGE)
            attend.tune(tile_timings(cache, heads, PAGE, long), bench.kernel_ms)
    return kernels


def kernels_against_bytes(bench: Bench) -> None:
    """Time one layer of the 8B on sequences of one run each, as shares of the bytes' least time."""
    plan, kernels = bench.plan, loaded(bench)
    bench.report["kernels"] = []
    for context in plan.contexts:
        for batch in (1, 4):
            for rows in (1, 8, 16):
                told = f"{batch} x {context} keys, {rows} rows"
                shape = [CaseRows(context - rows, rows)] * batch
                against_bytes(bench, kernels, told, shape, tables_of(context, batch))
    long, short = plan.contexts[0], plan.draft_context
    mixed = [PageTable([PageRun(0, long // PAGE)], PAGE)]
    mixed += [
        PageTable([PageRun((long + i * short) // PAGE, (long + (i + 1) * short) // PAGE)], PAGE)
        for i in range(5)
    ]
    for rows in (1, 8):
        shape = [CaseRows(table.num_tokens - rows, rows) for table in mixed]
        told = f"1 x {long} among 5 x {short} keys, {rows} rows"
        against_bytes(bench, kernels, told, shape, mixed)
        asked = questions_of(long)
        shape = [CaseRows(long - rows, rows)] * len(asked)
        told = f"6 questions on one document of {long} keys, {rows} rows"
        against_bytes(bench, kernels, told, shape, asked)


def against_bytes(
    bench: Bench,
    kernels: dict[str, Attend],
    told: str,
    shape: list[CaseRows],
    tables: list[PageTable],
) -> None:
    """Time one case with every candidate."""
    bench.check_time(5, "kernels")
    heads = bench.plan.shapes["8B"]["num_attention_heads"]
    last = max(run.stop for table in tables for run in table.runs)
    cache = KVCache(layout_of(bench, "8B", 1), last, PAGE)
    for tensor in cache.layers[0]:
        tensor.normal_()
    case = make_case("", cache, shape, tables, heads)
    least = case.kv_bytes / bench.peak()[0] * 1e3
    times = {}
    for name, attend in kernels.items():
        if name == "runs, written out" and shape[0].past > 8192:
            continue  # would take seconds
        try:
            times[name] = bench.kernel_ms(partial(case.run, attend))
        except Exception as error:
            bench.say(f"{name}, {told}", told_of(error))
    if not times:
        return
    best = min(times, key=lambda name: times[name])
    bench.report["kernels"].append({"case": told, "ms": times})
    # Of the first case alone, a row after the longest context: see `rapid.planning.plan.Losses`.
    bench.report.setdefault("losses", {}).setdefault("kv_share", least / times[best])
    bench.say(
        f"attention, {told}",
        f"{best} {times[best]:.3f} ms = {least / times[best]:.0%} of the bytes"
        + "".join(f"; {name} {ms:.3f}" for name, ms in times.items() if name != best),
    )


def prefill_kernels(bench: Bench) -> None:
    """Time one layer's attention of a chunk at the end of the longest context."""
    plan, kernels = bench.plan, loaded(bench)
    sizes, long = plan.shapes["8B"], plan.contexts[0]
    cache = KVCache(layout_of(bench, "8B", 1), long // PAGE, PAGE)
    for tensor in cache.layers[0]:
        tensor.normal_()
    shape = [CaseRows(long - plan.chunk, plan.chunk)]
    case = make_case("", cache, shape, tables_of(long, 1), sizes["num_attention_heads"])
    operations = 4 * sizes["hidden_size"] * plan.chunk * (long - plan.chunk / 2)
    results = bench.report["prefill kernels"] = {}
    for one in bench.candidates:
        if not one.is_for_chunks or (one.name == "runs, written out" and long > 8192):
            continue
        bench.check_time(5, "prefill kernels")
        results[one.name] = ms = bench.kernel_ms(partial(case.run, kernels[one.name]))
        per_s = operations / min(results.values()) * 1e3
        bench.report.setdefault("losses", {})["attention_flops"] = per_s
        share = operations / ms * 1e3 / bench.peak()[1]
        bench.say(
            f"{one.name}, a chunk of {plan.chunk} after {long - plan.chunk} keys",
            f"{ms:.2f} ms = {share:.0%} of the dense peak",
        )

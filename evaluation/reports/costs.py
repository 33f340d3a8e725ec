"""Report sections on the cost of answers: drafts, time and floating-point operations."""

from __future__ import annotations

from statistics import fmean

from evaluation.reports.run_results import (
    RunResults,
    acceptance,
    acceptance_at,
    speedup,
    tokens_per_round,
    tokens_per_second,
)
from evaluation.reports.tables import by_system, table, with_interval

PHASES = ("retrieval", "target_prefill", "drafter_prefill", "draft", "verify", "decode")


def drafts_accepted(run: RunResults) -> str:
    """Return the acceptance rates, the mean acceptance lengths, and the rates by position."""
    drafted = {system.name: system for system in run.systems if system.is_drafted}
    if not drafted:
        return ""
    rate = by_system(run, lambda _, results, __: with_interval(acceptance(results)), drafted)
    found = {name: run.headline(system) for name, system in drafted.items()}
    answers = [each for results in found.values() for each in results.values()]
    longest = max((len(each.by_position) for each in answers), default=0)
    rows = [
        [
            name,
            with_interval(tokens_per_round(results)),
            *(with_interval(acceptance_at(results, place)) for place in range(longest)),
        ]
        for name, results in found.items()
    ]
    header = ["system", "tokens per round", *(f"draft {place + 1}" for place in range(longest))]
    return f"{rate}\nBy position in the block, of the drafts judged there:\n\n{table(header, rows)}"


def speed(run: RunResults) -> str:
    """Return tokens per second of decoding, and the speedup over plain decoding."""
    if not run.is_timed:
        return "Not told: several answers were made at once, so that none has a time of its own.\n"
    speeds = by_system(run, lambda _, found, __: with_interval(tokens_per_second(found), ".3g"))
    told = f"Tokens per second of decoding, prefills and retrieval left out:\n\n{speeds}"
    if (plain := run.plain) is None:
        return told
    ratios = by_system(
        run,
        lambda _, results, column: with_interval(
            speedup(results, run.headline(plain, column)), ".3g"
        ),
        {system.name: system for system in run.systems if system != plain},
    )
    return f"{told}\nOver {plain.name}, on the same items:\n\n{ratios}"


def phases(run: RunResults) -> str:
    """Return the mean milliseconds per answer spent in each phase."""
    if not run.is_timed:
        return ""
    rows: list[list[str]] = []
    for system in run.systems:
        results = [each for each in run.headline(system).values() if each.error is None]
        if results:
            means = [fmean(each.ms.get(phase, 0.0) for each in results) for phase in PHASES]
            rows.append([system.name, str(len(results)), *(f"{each:.1f}" for each in means)])
    times = table(["system", "items", *(phase.replace("_", " ") for phase in PHASES)], rows)
    return f"Mean milliseconds of an answer; draft and verify are parts of decode.\n\n{times}"


def operations(run: RunResults) -> str:
    """Return the FLOPs per answer as counted here, and per block by the paper's formulas."""
    if run.shapes is None:
        return ""
    ours = by_system(run, lambda system, found, _: with_interval(run.flops(system, found), ".2e"))
    rows: list[list[str]] = []
    for system in run.systems:
        theirs = run.paper_flops(system, run.headline(system))
        rows.append([system.name, "-" if theirs is None else f"{theirs:.2e}"])
    papers = table(["system", "of a block, the paper's count"], rows)
    return (
        "Prefills, drafts and verification of an answer, as `evaluation.reports.flops` counts:\n\n"
        f"{ours}\n"
        "By the formulas of the paper's Table 4 (arXiv 2502.20330), at the mean lengths and "
        f"acceptance of this run; another quantity, not to be compared with ours:\n\n{papers}"
    )

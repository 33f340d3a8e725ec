"""The table of a fault run: one row for each fault, and whether it is as it must be."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence

from evaluation.circumstances import circumstances
from tests.faults.clients import Phase
from tests.faults.judgement import (
    Run,
    faults_of,
    first_token_s,
    is_same,
    longest_pause_s,
    ready_denied,
    ready_promised,
    ready_s,
    recovered_s,
)

HEADINGS = (
    "fault", "requests", "answered", "same text", "without", "refused", "failed", "malformed",
    "unanswered", "broken", "continued", "leaks", "/ready wrong, p99", "first token p95, p99 s",
    "longest pause s", "left alone s", "recovered s", "whole again s", "",
)  # fmt: skip


def row(run: Run, references: Sequence[str], quiet: Run | None) -> tuple[str, ...]:
    """Return the row of one fault."""
    if run.error:
        return (run.name, *[""] * (len(HEADINGS) - 2), "FAILS")
    ends = Counter(each.end for each in run.outcomes)
    phases: Mapping[Phase, int] = Counter(each.arrival.phase for each in run.outcomes)
    by_phase = "+".join(str(phases[p]) for p in ("standard", "overflow", "recovery"))  # type: ignore[index]
    same = sum(is_same(each, references) for each in run.outcomes)
    declared = sum(
        each.end == "answered" and each.is_declared and not is_same(each, references)
        for each in run.outcomes
    )
    continued = sum(each.num_broken > 0 and is_same(each, references) for each in run.outcomes)
    num_wrong = ready_denied(run) + ready_promised(run)
    return (
        run.name,
        by_phase,
        str(ends["answered"]),
        str(same),
        str(declared),
        str(ends["refused"]),
        str(ends["failed"]),
        str(sum(each.num_malformed for each in run.outcomes)),
        str(ends["unanswered"]),
        str(sum(each.num_broken for each in run.outcomes)),
        str(continued),
        str(len(run.leaks)),
        f"{num_wrong}/{len(run.ready)}, {1e3 * ready_s(run):.0f} ms",
        f"{first_token_s(run):.2f}, {first_token_s(run, 0.99):.2f}",
        f"{longest_pause_s(run):.1f}",
        "" if run.left_alone_s is None else f"{run.left_alone_s:.1f}",
        f"{recovered_s(run):.1f}",
        "never" if run.whole_again_s is None else f"{run.whole_again_s:.1f}",
        "FAILS" if faults_of(run, references, quiet) else "ok",
    )


def row_not_tried(name: str, why: str) -> tuple[str, ...]:
    """Return the row of a fault that was not tried."""
    return (name, *[""] * (len(HEADINGS) - 2), f"not tried: {why}")


def formatted(rows: Sequence[tuple[str, ...]]) -> str:
    """Return the rows under their headings, in columns."""
    lines = [HEADINGS, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADINGS))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def as_markdown(
    rows: Sequence[tuple[str, ...]], wrong: Mapping[str, Sequence[str]], about: str
) -> str:
    """Return the kept result: where and of what it was measured, the table, and what is wrong.

    Args:
        rows: The rows of the table.
        wrong: What is not as it must be, by fault.
        about: What was measured.
    """
    where = circumstances()
    lines = [
        "# Faults",
        "",
        f"{where['date']}, commit {where['commit']}, {where['machine']},",
        f"load {where['load_average_1_5_15_min']} at the end;",
        about + ".",
        "",
        *("| " + " | ".join(line) + " |" for line in (HEADINGS, ["---"] * len(HEADINGS), *rows)),
    ]
    lines += ["", "What is not as it must be:", ""] if any(wrong.values()) else []
    lines += [
        textwrap.fill(f"- {name}: {each}", 110, subsequent_indent="  ")
        for name, found in wrong.items()
        for each in found
    ]
    return "\n".join(lines) + "\n"

"""The table of a fault run: one row for each fault, and whether it is as it must be."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tests.faults.clients import Outcome, Phase

TIES = 0.01  # the share of answers whose last digit may decide a token (docs/algorithm.md)
SLOW_S = 5.0

HEADINGS = (
    "fault", "requests", "answered", "same text", "no drafter", "refused", "failed", "malformed",
    "unanswered", "broken", "continued", "leaks", "/ready wrong, p99", "first token p95 s",
    "recovered s",
    "whole again s", "",
)  # fmt: skip


@dataclass(frozen=True)
class Allowed:
    """What a fault may cost.

    Attributes:
        breaks: Whether connections in flight may break, which a proxy may also tell in its own
            words; the same requests must then be answered.
        slows: The longest p95 of the first token, as a factor of that without a fault.
    """

    breaks: bool = False
    slows: float | None = None


@dataclass
class Run:
    """What was seen during one fault.

    Attributes:
        injected: Time of the fault on the monotonic clock.
        outcomes: What became of each request.
        leaks: What was still held, or had grown, when the server was idle again.
        ready: Answers of ``/ready``: time, status (0 for none) and seconds.
        whole_again_s: Seconds until every replica was back; None if they were not.
    """

    name: str
    allowed: Allowed
    injected: float
    outcomes: list[Outcome]
    leaks: list[str] = field(default_factory=list)
    ready: list[tuple[float, int, float]] = field(default_factory=list)
    whole_again_s: float | None = None


def is_same(outcome: Outcome, references: Sequence[str]) -> bool:
    """Return whether the answer is that of the same request on a quiet server."""
    return outcome.end == "answered" and outcome.text == references[outcome.arrival.question]


def first_token_s(outcomes: Sequence[Outcome], share: float = 0.95) -> float:
    """Return a percentile of the seconds to the first text, over the answered of a quiet phase."""
    waited = sorted(
        each.first - each.began
        for each in outcomes
        if each.first is not None and each.arrival.phase == "standard"
    )
    return waited[math.ceil(share * len(waited)) - 1] if waited else math.nan


def recovered_s(run: Run) -> float:
    """Return the seconds from the fault to the end of the last request that suffered from it.

    A request suffers that is not answered, or is answered more than `SLOW_S` seconds after it
    came, outside the overflow, in which waiting is no sign of a fault.
    """
    ends = [
        each.ended - run.injected
        for each in run.outcomes
        if each.arrival.phase == "standard"
        and each.end != "left"
        and each.ended > run.injected
        and (each.end != "answered" or each.num_broken or each.ended - each.began > SLOW_S)
    ]
    return max(ends, default=0.0)


def wrong_ready(run: Run) -> int:
    """Return how often ``/ready`` did not say 200 while a request that came then was answered."""
    good = [each for each in run.outcomes if each.end == "answered" and not each.num_broken]
    return sum(
        status != 200 and any(abs(each.began - at) < 1.0 for each in good)
        for at, status, _ in run.ready
    )


def ready_s(run: Run) -> float:
    """Return the 99th percentile of the seconds that ``/ready`` took."""
    took = sorted(seconds for _, _, seconds in run.ready)
    return took[math.ceil(0.99 * len(took)) - 1] if took else math.nan


def faults_of(run: Run, references: Sequence[str], quiet: Run | None) -> list[str]:
    """Return what is not as it must be, in words; nothing if the run is as it must be."""
    wrong = []
    ends = Counter(each.end for each in run.outcomes)
    for end in ("failed", "unanswered"):
        if ends[end]:
            whys = Counter(each.why for each in run.outcomes if each.end == end)
            wrong.append(f"{ends[end]} {end}: {whys.most_common(1)[0][0][:160]}")
    shed = [e for e in run.outcomes if e.end == "refused" and e.arrival.phase != "overflow"]
    if shed:
        wrong.append(f"{len(shed)} refused outside the overflow: {shed[0].why[:160]}")
    other = [
        each.arrival.question
        for each in run.outcomes
        if each.end == "answered" and not each.is_declared and not is_same(each, references)
    ]
    if len(other) > TIES * ends["answered"]:
        wrong.append(f"{len(other)} with another text: questions {sorted(set(other))}")
    if not run.allowed.breaks:
        broken = [each for each in run.outcomes if each.num_broken]
        if broken:
            wrong.append(f"{len(broken)} with broken connections: {broken[0].why[:160]}")
    wrong += run.leaks
    if run.whole_again_s is None:
        wrong.append("the replicas did not come back")
    if (factor := run.allowed.slows) and quiet is not None:
        now, before = first_token_s(run.outcomes), first_token_s(quiet.outcomes)
        if not now <= factor * before:
            wrong.append(f"first token p95 {now:.2f} s, without the fault {before:.2f} s")
    return wrong


def row(run: Run, references: Sequence[str], quiet: Run | None) -> tuple[str, ...]:
    """Return the row of one fault."""
    ends = Counter(each.end for each in run.outcomes)
    phases: Mapping[Phase, int] = Counter(each.arrival.phase for each in run.outcomes)
    by_phase = "+".join(str(phases[p]) for p in ("standard", "overflow", "recovery"))  # type: ignore[index]
    same = sum(is_same(each, references) for each in run.outcomes)
    declared = sum(
        each.end == "answered" and each.is_declared and not is_same(each, references)
        for each in run.outcomes
    )
    continued = sum(each.num_broken > 0 and is_same(each, references) for each in run.outcomes)
    whole_again = "never" if run.whole_again_s is None else f"{run.whole_again_s:.1f}"
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
        f"{wrong_ready(run)}/{len(run.ready)}, {1e3 * ready_s(run):.0f} ms",
        f"{first_token_s(run.outcomes):.2f}",
        f"{recovered_s(run):.1f}",
        whole_again,
        "FAILS" if faults_of(run, references, quiet) else "ok",
    )


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

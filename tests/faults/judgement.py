"""What was seen during one fault, and what of it is not as it must be."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tests.faults.clients import MODES, Outcome, Phase

TIES = 0.01  # the share of answers whose last digit may decide a token (docs/algorithm.md)
SLOW_S = 5.0
SILENT_S = 5.0


@dataclass(frozen=True)
class Allowed:
    """What a fault may cost.

    Attributes:
        breaks: Whether connections in flight may break, which a proxy may also tell; the same
            requests must then be answered.
        refuses: Modes that may be refused in the standard phase.
        lasts: Whether that goes on afterwards, as nothing comes back by itself.
        slows: The longest wait for the first token, as a factor of that without a fault.
        share: The share of requests that `slows` is about.
        pause_s: The longest time without text in an answer of the standard phase.
        leaves_s: For how long a broken engine may be asked for leases after its first failure.
        alone_s: After how many seconds no answer may go on without its drafter or its documents.
        ready_s: The longest wait for ``/ready``, at its 99th percentile.
        health_s: The longest wait for ``/-/healthz``, which must always be well.
        lost_s: Where the server is lost for good: after how many seconds ``/ready`` says so, each
            time that it is asked. Nothing else is judged.
    """

    breaks: bool = False
    refuses: tuple[str, ...] = ()
    lasts: bool = False
    slows: float | None = None
    share: float = 0.95
    pause_s: float | None = None
    leaves_s: float | None = None
    alone_s: float | None = None
    ready_s: float | None = None
    health_s: float | None = None
    lost_s: float | None = None


@dataclass
class Run:
    """What was seen during one fault.

    Attributes:
        injected: Time of the fault on the monotonic clock.
        outcomes: What became of each request.
        leaks: What was still held, or had grown, when the server was idle again.
        ready: Answers of ``/ready``: time, status (0 for none) and seconds.
        health: Those of ``/-/healthz``.
        whole_again_s: Seconds until every replica was back; None if they were not.
        left_alone_s: Seconds for which a broken engine was asked for leases; None if none broke.
        error: What stopped the row itself.
    """

    name: str
    allowed: Allowed
    injected: float = 0.0
    outcomes: list[Outcome] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    ready: list[tuple[float, int, float]] = field(default_factory=list)
    health: list[tuple[float, int, float]] = field(default_factory=list)
    whole_again_s: float | None = None
    left_alone_s: float | None = None
    error: str = ""

    def in_phase(self, phase: Phase) -> list[Outcome]:
        """Return the outcomes of one phase."""
        return [each for each in self.outcomes if each.arrival.phase == phase]


def is_same(outcome: Outcome, references: Sequence[str]) -> bool:
    """Return whether the answer is that of the same request on a quiet server."""
    return outcome.end == "answered" and outcome.text == references[outcome.arrival.question]


def first_token_s(run: Run, share: float = 0.95) -> float:
    """Return a percentile of the seconds to the first text of the streams of the standard phase.

    An answer that is not streamed comes whole, so its text says how long it is.
    """
    return percentile(
        [
            each.first - each.began
            for each in run.in_phase("standard")
            if each.first is not None and each.arrival.is_streamed
        ],
        share,
    )


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that a share of all does not exceed; NaN of none."""
    return sorted(values)[math.ceil(share * len(values)) - 1] if values else math.nan


def recovered_s(run: Run) -> float:
    """Return the seconds from the fault to the end of the last request that suffered from it.

    A request suffers that is not answered, or is answered more than `SLOW_S` seconds after it
    came, outside the overflow, in which waiting is no sign of a fault.
    """
    ends = [
        each.ended - run.injected
        for each in run.in_phase("standard")
        if each.end != "left"
        and each.ended > run.injected
        and (each.end != "answered" or each.num_broken or each.ended - each.began > SLOW_S)
    ]
    return max(ends, default=0.0)


def longest_pause_s(run: Run) -> float:
    """Return the longest time without text in a streamed answer of the standard phase."""
    return max(
        (
            each.pause_s
            for each in run.in_phase("standard")
            if each.end == "answered" and each.arrival.is_streamed
        ),
        default=math.nan,
    )


def ready_denied(run: Run) -> int:
    """Return how often ``/ready`` did not say 200 while a request that came then was answered.

    Where connections may break, those of ``/ready`` may too.
    """
    good = [each for each in run.outcomes if each.end == "answered" and not each.num_broken]
    return sum(
        status != 200
        and not (status == 0 and run.allowed.breaks)
        and any(abs(each.began - at) < 1.0 for each in good)
        for at, status, _ in run.ready
    )


def ready_promised(run: Run) -> int:
    """Return how often ``/ready`` said 200 amid a silence, in which nobody who waited was told."""
    silences = list(_silences(run))
    return sum(
        status == 200 and any(start + SILENT_S < at < end - SILENT_S for start, end in silences)
        for at, status, _ in run.ready
    )


def _silences(run: Run) -> Iterator[tuple[float, float]]:
    """Yield the longest times without text for anybody, though somebody waited all along."""
    outcomes = [each for each in run.outcomes if each.end != "left"]
    heard = sorted(time for each in outcomes for time in (*each.heard, each.ended))
    for start, end in zip([run.injected, *heard], heard, strict=False):
        began = [max(start, each.began) for each in outcomes if each.began < end <= each.ended]
        if began and end - min(began) > 2 * SILENT_S:
            yield min(began), end


def ready_s(run: Run) -> float:
    """Return the 99th percentile of the seconds that ``/ready`` took."""
    return percentile([seconds for _, _, seconds in run.ready], 0.99)


def faults_of(run: Run, references: Sequence[str], quiet: Run | None) -> list[str]:
    """Return what is not as it must be, in words; nothing if the run is as it must be.

    Args:
        run: What was seen.
        references: The text of each question on a quiet server.
        quiet: The run without a fault, with which waiting is compared.
    """
    if run.error:
        return [run.error]
    if run.allowed.lost_s is not None:
        return [*_wrong_loss(run, run.injected + run.allowed.lost_s)]
    wrong = [
        *_wrong_ends(run),
        *_wrong_texts(run, references),
        *run.leaks,
        *_wrong_times(run, quiet),
        *_wrong_ready(run),
        *_wrong_health(run),
    ]
    if run.whole_again_s is None:
        wrong.append("the replicas did not come back")
    return wrong


def _wrong_ends(run: Run) -> Iterator[str]:
    for end in ("failed", "unanswered"):
        whys = Counter(each.why for each in run.outcomes if each.end == end)
        if whys:
            yield f"{whys.total()} {end}: {whys.most_common(1)[0][0][:160]}"
    malformed = [each for each in run.outcomes if each.num_malformed]
    if malformed:
        yield f"{len(malformed)} got errors that are not in OpenAI's form"
    # Some seconds after the overflow there may be no room yet.
    full_until = max((each.began + SLOW_S for each in run.in_phase("overflow")), default=0.0)
    shed = [
        each
        for each in (*run.in_phase("standard"), *run.in_phase("recovery"))
        if each.end == "refused" and not _may_be_refused(each, run.allowed, full_until)
    ]
    if shed:
        modes = Counter(
            f"{MODES[each.arrival.question % len(MODES)]} in {each.arrival.phase}" for each in shed
        )
        counted = ", ".join(f"{number} {mode}" for mode, number in modes.items())
        yield f"refused outside the overflow: {counted}: {shed[0].why[:160]}"
    broken = [each for each in run.outcomes if each.num_broken]
    if broken and not run.allowed.breaks:
        yield f"{len(broken)} with broken connections: {broken[0].why[:160]}"


def _wrong_texts(run: Run, references: Sequence[str]) -> Iterator[str]:
    answered = [each for each in run.outcomes if each.end == "answered"]
    other = [
        each.arrival.question
        for each in answered
        if not each.is_declared and not is_same(each, references)
    ]
    if len(other) > TIES * len(answered):
        yield f"{len(other)} with another text: questions {sorted(set(other))}"
    if (alone_s := run.allowed.alone_s) is not None:
        late = [each for each in answered if each.began > run.injected + alone_s]
        num_alone = sum(each.is_declared for each in late)
        if num_alone:
            yield f"{num_alone} without drafter or documents more than {alone_s:g} s later"


def _wrong_times(run: Run, quiet: Run | None) -> Iterator[str]:
    allowed = run.allowed
    if allowed.slows is not None and quiet is not None:
        now, before = first_token_s(run, allowed.share), first_token_s(quiet, allowed.share)
        if not now <= allowed.slows * before:
            yield (
                f"first token p{100 * allowed.share:.0f} {now:.2f} s, without the fault "
                f"{before:.2f} s"
            )
    if allowed.pause_s is not None and (pause_s := longest_pause_s(run)) > allowed.pause_s:
        yield f"an answer paused for {pause_s:.1f} s"
    if allowed.leaves_s is not None:
        if run.left_alone_s is None:
            yield "the broken engine was asked for nothing"
        elif run.left_alone_s > allowed.leaves_s:
            yield f"asked for leases until {run.left_alone_s:.1f} s after its first failure"


def _wrong_loss(run: Run, since: float) -> Iterator[str]:
    said = Counter(status for at, status, _ in run.ready if at > since)
    if not said:
        yield "/ready was not asked once the server was lost"
    if said[0]:
        yield f"/ready gave {said[0]} of {said.total()} times no answer"
    if said[200]:
        yield f"/ready promised {said[200]} of {said.total()} times what a lost server cannot do"


def _wrong_ready(run: Run) -> Iterator[str]:
    if denied := ready_denied(run):
        yield f"/ready denied {denied} times what the server did"
    if promised := ready_promised(run):
        yield f"/ready promised {promised} times what the server did not do"
    if run.allowed.ready_s is not None and ready_s(run) > run.allowed.ready_s:
        yield f"/ready took {1e3 * ready_s(run):.0f} ms"


def _wrong_health(run: Run) -> Iterator[str]:
    if run.allowed.health_s is None:
        return
    if not run.health:
        yield "/-/healthz was not asked"
    elif ill := [status for _, status, _ in run.health if status != 200]:
        yield f"/-/healthz was not well {len(ill)} times of {len(run.health)}: {ill[0]}"
    elif (longest := max(seconds for _, _, seconds in run.health)) > run.allowed.health_s:
        yield f"/-/healthz took {1e3 * longest:.0f} ms"


def _may_be_refused(outcome: Outcome, allowed: Allowed, full_until: float) -> bool:
    """Return whether a fault, or the overflow before it, excuses a refusal."""
    is_late = outcome.arrival.phase == "recovery"
    if is_late and outcome.began <= full_until:
        return True
    mode = MODES[outcome.arrival.question % len(MODES)]
    return mode in allowed.refuses and (allowed.lasts or not is_late)

"""The survey of attention kernels: checked against float32, then timed, and the fastest taken.

Fast kernels have been silently wrong at batch 2 or on some lengths (pytorch issue 194167).
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch

from rapid.engines.attention.cases import Case
from rapid.engines.attention.kernel_inputs import Attend
from rapid.errors import ConfigurationError, first_line

logger = logging.getLogger(__name__)

# Largest difference to float32, for outputs of magnitude 1 to 4; a lost key shows as about 0.5.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}

Measure = Callable[[Callable[[], object]], float]  # times a call, in milliseconds


@runtime_checkable
class Tunable(Protocol):
    """A kernel of several forms, of which it chooses the fastest for each shape."""

    def tune(self, cases: Sequence[Case], measure: Measure) -> None:
        """Time the forms on cases, and take the fastest from now on."""


@dataclass(frozen=True, slots=True)
class KernelCandidate:
    """An attention kernel that an engine may choose."""

    name: str
    # Function that returns the kernel; it raises where the kernel is not available.
    load: Callable[[], Attend]
    is_for_chunks: bool = True  # whether it also takes sequences of more than `MAX_STEP_ROWS` rows
    # Whether it reads nothing from the host, so that a graph can capture it.
    is_capturable: bool = False


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of the survey for one candidate."""

    candidate: KernelCandidate
    attend: Attend | None  # the loaded kernel; None when it may not be chosen
    error: float  # largest difference to float32 over the cases; NaN when it did not run
    problem: str  # reason why it may not be chosen, else empty
    ms: float  # milliseconds of all timed cases together; NaN when it was not timed

    def __str__(self) -> str:
        return f"{self.candidate.name} " + (
            self.problem or f"{self.ms:.3f} ms, within {self.error:.1e} of float32"
        )


def survey(
    candidates: Sequence[KernelCandidate],
    cases: Sequence[Case],
    timed: Sequence[Case],
    tolerance: float,
    measure: Measure,
    tuned: Sequence[Case] = (),
) -> list[Finding]:
    """Check every candidate on all cases, and time those that are correct.

    A kernel of several forms first chooses among them on the cases `tuned`.
    """
    found = []
    for candidate in candidates:
        attend, error, problem = _check(candidate, cases, tolerance, tuned, measure)
        ms = math.nan
        if attend is not None:
            try:
                ms = sum(measure(partial(case.run, attend)) for case in timed)
            except Exception as cause:  # for instance, too little memory at full length
                attend, problem = None, f"could not be timed ({_summarize(cause)})"
        found.append(Finding(candidate, attend, error, problem, ms))
    return found


def _check(
    candidate: KernelCandidate,
    cases: Sequence[Case],
    tolerance: float,
    tuned: Sequence[Case],
    measure: Measure,
) -> tuple[Attend | None, float, str]:
    try:
        attend = candidate.load()
        if isinstance(attend, Tunable):
            attend.tune(tuned, measure)
    except Exception as cause:
        return None, math.nan, f"is not available ({_summarize(cause)})"
    worst = 0.0
    for case in cases:
        assert case.expected is not None
        try:
            error = float((case.run(attend).float() - case.expected).abs().max())
        except Exception as cause:
            return None, math.nan, f"cannot run here, on {case.name} ({_summarize(cause)})"
        if not error <= tolerance:  # refuses NaN, too
            problem = f"is wrong: {error:.3g} from float32 on {case.name}"
            logger.warning("attention candidate refused: %s %s", candidate.name, problem)
            return None, error, problem
        worst = max(worst, error)
    return attend, worst, ""


def _summarize(cause: Exception) -> str:
    """Return the first sentence of an error, since torch's may run to pages."""
    return first_line(cause).split(". ")[0][:160]


def fastest(found: Sequence[Finding]) -> Finding:
    """Return the finding of the fastest correct candidate, or raise ConfigurationError."""
    right = [finding for finding in found if finding.attend is not None]
    if not right:
        raise ConfigurationError(
            "no attention is right on this device: " + "; ".join(map(str, found))
        )
    return min(right, key=lambda finding: finding.ms)


def device_ms(run: Callable[[], object], repeats: int = 7) -> float:
    """Return the median milliseconds of a call on the current CUDA device, timed by its events."""
    for _ in range(3):
        run()
    times: list[float] = []
    events: Any = torch.cuda.Event
    for _ in range(repeats):
        start, end = events(enable_timing=True), events(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)

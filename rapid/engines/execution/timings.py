"""Totals and a cost model of an engine's steps, learnt from their measured times alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rapid.engines.attention.batch import Feed
from rapid.estimators import RunningMedian

_STEPS_BETWEEN_PROBES = 48  # steps with prefill after which the base is measured again
_PROBE_STEPS = 6  # steps without prefill that end such a measurement
_COLD_STEPS = 3  # the first of them do not count
_DECAY = 0.9  # factor on the weight of older steps in the fit
_SWEEPS = 4  # Gauss-Seidel sweeps for each step


@dataclass(slots=True)
class StepTotals:
    """Sums over all steps: of steps, their seconds, their calls and the rows of these.

    `drawn` are the tokens that were drawn or judged, `specified` those that no fast form decided.
    """

    steps: int = 0
    seconds: float = 0.0
    calls: int = 0
    rows: int = 0
    drawn: int = 0
    specified: int = 0

    def add(self, seconds: float, num_calls: int, feeds: Sequence[Feed]) -> None:
        """Add one step with the rows of its calls."""
        self.steps += 1
        self.seconds += seconds
        self.calls += num_calls
        self.rows += sum(len(feed.token_ids) for feed in feeds)


class StepCosts:
    """Model of a step's seconds: a base without prefill rows, plus a cost per prefill row.

    The depth of a row is the number of tokens before it. The model is::

        seconds = base + rows * (a + b * depth)    beside other rows
        seconds = start + rows * (a + b * depth)   alone

    start, a and b are fitted to the seconds per row of the steps with prefill, by least squares
    that keeps all three non-negative and weights the latest steps most.
    """

    def __init__(self) -> None:
        # Of steps without prefill, except the first three after a step with prefill: those find the
        # caches full of the prompt and take up to half as long again.
        self.base_s = RunningMedian()
        self._former_base_s: float | None = None  # until the base is measured again
        self._num_chunks = 0  # steps with prefill since the base was last measured
        self._num_others = 0  # consecutive steps without prefill; a chunk does not end a probe
        self._fitted = [0.0] * 3  # start, a, b
        self._products = [[0.0] * 3 for _ in range(3)]  # of (1 / rows if alone, 1, depth)
        self._targets = [0.0] * 3  # products of the same with seconds per row
        self._prefilled = (0.0, 0.0)  # recent rows of prefill, and the seconds of their steps

    @property
    def is_base_due(self) -> bool:
        """Whether the base is unmeasured, or was last measured 48 steps with prefill ago."""
        return self.base_s.value is None or self._num_chunks >= _STEPS_BETWEEN_PROBES

    def forget_base(self) -> None:
        """Have the base measured again before prefill runs beside other work."""
        self._former_base_s = self.base_s.value  # by which `estimate_s` goes until then
        self.base_s.clear()

    @property
    def start_s(self) -> float:
        """Fixed seconds of a step with prefill rows only; the base until one was observed."""
        return self._fitted[0] if self._products[0][0] else self.base_s.value or 0.0

    @property
    def prefill_tokens_per_s(self) -> float:
        """Rows of prefill in a second of the recent steps with any; 0 before the first."""
        return 1.0 / self.mean_row_s if self.mean_row_s else 0.0

    def row_s(self, depth: int) -> float:
        """Return the seconds that a prefill row at `depth` adds; 0 before one was observed."""
        return self._fitted[1] + self._fitted[2] * depth

    @property
    def mean_row_s(self) -> float:
        """Seconds of a step for each row of prefill, of late; 0 before there was one."""
        rows, seconds = self._prefilled
        return seconds / rows if rows else 0.0

    def estimate_s(self, prefills: Sequence[Feed], *, is_alone: bool) -> float | None:
        """Return the seconds of a step with these prefills, alone or not; None if none was seen."""
        base_s = self._former_base_s if self.base_s.value is None else self.base_s.value
        if not prefills:
            return base_s
        if not self._products[1][1]:
            return None
        rows_s = sum(
            len(feed.token_ids) * self.row_s(feed.position + len(feed.token_ids))
            for feed in prefills
        )
        return rows_s + (self.start_s if is_alone else base_s or 0.0)

    def observe(self, seconds: float, prefills: Iterable[Feed], *, is_alone: bool) -> None:
        """Update the model with a step and its prefill rows.

        It was alone if it had no rows but those of prefill and of drafting ahead.
        """
        rows = keys = 0.0
        for feed in prefills:
            rows += len(feed.token_ids)
            keys += len(feed.token_ids) * (feed.position + len(feed.token_ids) / 2)
        if not rows:
            self._num_others += 1
            if self._num_others > _COLD_STEPS or not self._num_chunks:
                self.base_s.add(seconds)
            if self._num_others >= _PROBE_STEPS:
                self._num_chunks = 0
            return
        if not self.is_base_due:  # else sparse steps without prefill would never complete a probe
            self._num_others = 0
        self._num_chunks += 1
        recent_rows, recent_s = self._prefilled
        self._prefilled = (_DECAY * recent_rows + rows, _DECAY * recent_s + seconds)
        if is_alone:
            self._fit((1.0 / rows, 1.0, keys / rows), seconds / rows)
        elif self.base_s.value is not None:
            self._fit((0.0, 1.0, keys / rows), (seconds - self.base_s.value) / rows)

    def _fit(self, row: tuple[float, ...], seconds: float) -> None:
        """Refit by a few Gauss-Seidel sweeps from the last fit, without negative coefficients."""
        for i in range(3):
            self._targets[i] = _DECAY * self._targets[i] + row[i] * seconds
            for j in range(3):
                self._products[i][j] = _DECAY * self._products[i][j] + row[i] * row[j]
        for _ in range(_SWEEPS):
            for i, products in enumerate(self._products):
                if products[i]:
                    others = sum(products[j] * self._fitted[j] for j in range(3) if j != i)
                    self._fitted[i] = max((self._targets[i] - others) / products[i], 0.0)

"""What rounds cost and what they bring, as measured: times, acceptance, and what drafting owes.

Times lie on a line over a round's tokens, for each length of the context and each load.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from rapid.messages import Verdict

# docs/constants.md gives the source of each.
_SHARE = 0.02  # share of plain time that trials of drafting may cost
_MOST_FAILURES = 3  # most halvings of that share
_FORGET = 0.95  # factor on the weight of older rounds in a line
_SETTLED = 3  # weight of a line, in rounds, from which an outlier is cut
_SURPRISE = 2.0  # factor from the expected time to which it is cut
_RIDGE = 1.0  # squared tokens: weight of the supplied slope
_LEAST_CONTEXT = 1024  # tokens; shorter contexts cost the same
_PRIOR_TOKENS = 4.0  # weight of the acceptance before anything is judged, in judged tokens


@dataclass(slots=True)
class Line:
    """A least-squares line of seconds over tokens that forgets old rounds and never falls.

    While all rounds have the same length, it uses the slope that is supplied with each of them.
    """

    weight: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0
    slope_told: float = 0.0
    _variance: float = 0.0
    _covariance: float = 0.0

    def add(self, tokens: float, seconds: float, slope: float) -> None:
        """Add a round of `tokens` and `seconds`; `slope` is its supplied time per token."""
        if self.weight:
            expected = self.at(tokens)
            if self.weight >= _SETTLED:
                seconds = min(max(seconds, expected / _SURPRISE), expected * _SURPRISE)
            elif seconds < expected / _SURPRISE:  # the earlier rounds were warm-up
                self.weight = self._variance = self._covariance = 0.0
        kept = self.weight * _FORGET
        self.weight = kept + 1
        step, rise = tokens - self.tokens, seconds - self.seconds
        self._variance = self._variance * _FORGET + step * step * kept / self.weight
        self._covariance = self._covariance * _FORGET + step * rise * kept / self.weight
        self.slope_told = (self.slope_told * kept + slope) / self.weight
        self.tokens += step / self.weight
        self.seconds += rise / self.weight

    def at(self, tokens: float) -> float:
        """Return the expected seconds for `tokens`."""
        return self.seconds + self.slope * (tokens - self.tokens)

    @property
    def has_several(self) -> bool:
        """Whether it rests on several recent rounds."""
        return self.weight >= _SETTLED - 1

    @property
    def slope(self) -> float:
        """The seconds that one more token takes."""
        steepest = self.seconds / self.tokens if self.tokens else 0.0
        slope = (self._covariance + _RIDGE * self.slope_told) / (self._variance + _RIDGE)
        return min(max(slope, 0.0), steepest)

    def borrow(self, ratio: float = 1.0) -> Line:
        """Return a line with times scaled by `ratio`, of low weight against new measurements."""
        return Line(min(self.weight, 1.0), self.tokens, self.seconds * ratio, self.slope * ratio)


@dataclass(slots=True)
class Acceptance:
    """Decaying counts of judged draft tokens and of rounds with a draft.

    Only judged positions count: neither the positions after a rejection nor those missing from a
    block that was shorter than requested carry information.
    """

    judged: float = 0.0
    accepted: float = 0.0
    asked: float = 0.0
    offered: float = 0.0

    def observe(self, verdict: Verdict, keep: float, most_tokens: float) -> None:
        """Count a round in which a draft was requested.

        `keep` is the factor on the earlier counts, which are at most `most_tokens`, also in rounds.
        """
        is_offered = verdict.num_drafted > 0
        keep = min(keep, most_tokens / max(self.judged, 1e-9), most_tokens / max(self.asked, 1e-9))
        self.judged = self.judged * keep + (len(verdict.token_ids) if is_offered else 0)
        self.accepted = self.accepted * keep + verdict.num_accepted
        self.asked = self.asked * keep + 1
        self.offered = self.offered * keep + is_offered

    def fade(self, keep: float) -> None:
        """Multiply all counts by `keep`."""
        self.judged *= keep
        self.accepted *= keep
        self.asked *= keep
        self.offered *= keep

    def rate(self, prior: float) -> float:
        """Return the share of judged draft tokens that were accepted."""
        return (self.accepted + _PRIOR_TOKENS * prior) / (self.judged + _PRIOR_TOKENS)

    def offer_rate(self, prior: float) -> float:
        """Return the share of rounds in which there was something to propose."""
        return (self.offered + prior) / (self.asked + 1)


@dataclass(slots=True)
class LengthBucket:
    """Round times at one context length and load, and the balance of drafting there."""

    plain: Line = field(default_factory=Line)  # times of plain rounds
    drafted: Line = field(default_factory=Line)  # times of drafted rounds
    num_trials: int = 0  # number of drafted rounds
    since_plain: int = 0  # drafted rounds since the last plain one
    # Seconds that drafting owes (below zero) or that a trial may cost (above zero).
    balance: float = 0.0
    num_failures: int = 0  # successive trials that lost time, up to `_MOST_FAILURES`
    # Whether drafting owed more than its grace and has not paid it back yet.
    is_barred: bool = False
    is_borrowed: bool = False  # whether the times are those of the nearest bucket

    def book_plain(self, num_tokens: int, seconds: float) -> None:
        """Record a plain round, which pays debts back and pays for trials."""
        if self.is_borrowed:
            ratio = seconds / self.plain.at(num_tokens)
            self.drafted = self.drafted.borrow(ratio)
            self.plain = Line()
            self.is_borrowed = False
        self.plain.add(num_tokens, seconds, seconds / num_tokens)
        self.since_plain = 0
        self.balance += self.pay(seconds)
        self.is_barred = self.is_barred and self.balance < 0

    def pay(self, seconds: float) -> float:
        """Return the seconds of trials that so much plain decoding pays for."""
        return seconds * _SHARE * 0.5**self.num_failures

    def book_drafted(self, saved: float, grace: float, *, is_probe: bool) -> None:
        """Book the seconds that a drafted round saved or, below zero, lost against plain decoding.

        Args:
            grace: Debt, in seconds, beyond which drafting is barred.
            is_probe: Whether the round was a trial of drafting that looked unprofitable.
        """
        self.balance = min(self.balance + saved, 0.0)
        self.is_barred = self.is_barred or self.balance < -grace
        if saved >= 0:
            self.num_failures = 0
        elif is_probe:
            self.num_failures = min(self.num_failures + 1, _MOST_FAILURES)

    def borrow(self) -> LengthBucket:
        """Return a bucket without measurements of its own that starts with these times."""
        return replace(
            self,
            plain=self.plain.borrow(),
            drafted=self.drafted.borrow(),
            balance=0.0,
            is_borrowed=True,
        )


class RoundCosts:
    """Round times and acceptance, shared by all requests of a process.

    Times are kept per context length of the verifier, in steps of a factor of 1.4, and per number
    of concurrent answers, in steps of a factor of two.
    """

    def __init__(self) -> None:
        self._buckets: dict[tuple[int, int], LengthBucket] = {}
        self._acceptance: dict[tuple[bool, int], Acceptance] = {}
        self._num_growing = 0

    @contextmanager
    def growing(self, num_answers: int) -> Iterator[None]:
        """Count `num_answers` as concurrent answers for the duration of the context."""
        self._num_growing += num_answers
        try:
            yield
        finally:
            self._num_growing -= num_answers

    def at(self, num_context: int) -> LengthBucket:
        """Return the bucket for `num_context` tokens and the load; a new one borrows its times."""
        length = int(2 * math.log2(max(num_context, _LEAST_CONTEXT)))
        load = int(math.log2(max(self._num_growing, 1)))
        if (length, load) not in self._buckets:
            known = [
                (abs(length - near[0]) + abs(load - near[1]), near)
                for near, bucket in self._buckets.items()
                if bucket.plain.weight and not bucket.is_borrowed
            ]
            bucket = self._buckets[min(known)[1]].borrow() if known else LengthBucket()
            self._buckets[length, load] = bucket
        return self._buckets[length, load]

    def acceptance(self, *, can_rest: bool, kind: int = 0) -> Acceptance:
        """Return the acceptance of all requests that can rest, or of all that cannot.

        `kind` is that of the drafts, where they are told apart.
        """
        # More drafts are accepted under the fused distribution than under the target's own.
        return self._acceptance.setdefault((can_rest, kind), Acceptance())

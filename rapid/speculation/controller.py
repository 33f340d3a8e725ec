"""How many tokens to draft next, from measured times: the length with the most tokens a second.

A round that drafts k tokens commits ``E(k) = 1 + a + ... + a^(k-1)`` of them, where `a` is the
share of judged drafts that were accepted: there is no bonus token (``docs/algorithm.md``). It takes
``R(k)``, a line through the measured rounds. Plain decoding takes ``P`` a token. So the length
maximises ``E(k) / R(k)``, and where the contract does not need a drafter, nothing is drafted unless
that beats ``1 / P``. Times are those the loop sees, with whatever lies between it and the engines.

**Never slower than plain.** Resting *is* plain decoding: the same call, for as many tokens. What
drafting costs more than plain decoding would have is booked: each drafted round adds ``n * P - s``
seconds to a balance that never rises above zero by it, each plain round adds `_SHARE` of its time.

- Drafting that looks profitable goes on until it owes the time of `_GRACE_TOKENS` plain tokens, and
  then not before plain rounds have paid that back, whatever the model says: acceptance that does
  not follow ``E`` (all or nothing, say) cannot cost more.
- Drafting that looks unprofitable is tried once plain rounds have paid for what the trial is
  expected to cost. Each trial that loses halves the pay, down to an eighth. After a rest the
  drafter first reads what it missed: that is booked, but not taken for what a round takes.

So over ``T`` seconds drafting costs at most ``_SHARE * T`` and once the grace, the round that
overdraws it, and the `_TRIALS` rounds of a process that nobody has measured yet.

**Exactness.** A length is a function of earlier text, acceptance and times, never of the tokens
that are drawn in its own block; so every token follows its contract. Under `shared_noise`, and
greedy, the text is the same at any length. Under `maximal` resting leaves the distribution as it
is, not the text: whoever promises the same text again must not let the controller rest.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from rapid.messages import Verdict
from rapid.ports import Clock

_MARGIN = 1.05  # by how much drafting must look better than resting
_SHARE = 0.02  # of plain time, that trying to draft may cost
_MOST_FAILURES = 3  # halvings of that
_GRACE_TOKENS = 8
_TRIALS = 2  # first rounds, of different lengths, that are only measured
_TRIAL_TOKENS = 4
_PLAIN_EVERY = 64  # drafted rounds after which plain decoding is measured again,
_PLAIN_OFTEN = 8  # or sooner, while it was measured once or drafting gains little
_CLEAR_GAIN = 1.25
_FORGET = 0.95  # of every older round, in a line
_SETTLED = 3  # rounds after which an outlier is cut to half or twice what was expected
_SURPRISE = 2.0
_RIDGE = 1.0  # squared tokens: how long a line keeps to the slope it is told
_PRIOR = 0.7  # acceptance before anything is judged
_PRIOR_TOKENS = 4.0
_KEEP = 0.85  # of a request's acceptance from round to round
_MOST_TOKENS = 20.0
_MOST_TOKENS_SHARED = 400.0
_LEAST_CONTEXT = 1024  # shorter contexts cost the same


@dataclass(slots=True)
class Line:
    """Seconds over tokens: a least-squares line that forgets.

    Where all rounds had one length it takes the slope that it is told with each. Its intercept is
    never negative, its slope neither.
    """

    weight: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0
    slope_told: float = 0.0
    _variance: float = 0.0
    _covariance: float = 0.0

    def add(self, tokens: float, seconds: float, slope: float) -> None:
        """A round: `seconds` for `tokens`, of which each is said to have taken `slope`."""
        if self.weight:
            expected = self.at(tokens)
            if self.weight >= _SETTLED:
                seconds = min(max(seconds, expected / _SURPRISE), expected * _SURPRISE)
            elif seconds < expected / _SURPRISE:  # what came before was warming up
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
        """Expected seconds."""
        return self.seconds + self.slope * (tokens - self.tokens)

    @property
    def slope(self) -> float:
        """Seconds that one more token takes."""
        steepest = self.seconds / self.tokens if self.tokens else 0.0
        slope = (self._covariance + _RIDGE * self.slope_told) / (self._variance + _RIDGE)
        return min(max(slope, 0.0), steepest)

    def borrowed(self, ratio: float = 1.0) -> Line:
        """The line for rounds that take `ratio` as long, soon forgotten for what is measured."""
        return Line(1.0, self.tokens, self.seconds * ratio, self.slope * ratio)


@dataclass(slots=True)
class Acceptance:
    """Decaying counts of judged drafts, and of rounds in which something was drafted.

    Only positions that were judged count: those after a rejection say nothing, nor does a block
    that was shorter than asked for.
    """

    judged: float = 0.0
    accepted: float = 0.0
    asked: float = 0.0
    offered: float = 0.0

    def observe(self, verdict: Verdict, keep: float, most_tokens: float) -> None:
        """Count a round in which a draft was asked for; of the earlier ones `keep` stays."""
        is_offered = verdict.num_drafted > 0
        keep = min(keep, most_tokens / max(self.judged, 1e-9), most_tokens / max(self.asked, 1e-9))
        self.judged = self.judged * keep + (len(verdict.token_ids) if is_offered else 0)
        self.accepted = self.accepted * keep + verdict.num_accepted
        self.asked = self.asked * keep + 1
        self.offered = self.offered * keep + is_offered

    def rate(self, prior: float) -> float:
        """Share of judged drafts that were accepted."""
        return (self.accepted + _PRIOR_TOKENS * prior) / (self.judged + _PRIOR_TOKENS)

    def offer_rate(self, prior: float) -> float:
        """Share of rounds in which there was something to propose."""
        return (self.offered + prior) / (self.asked + 1)


@dataclass(slots=True)
class Bucket:
    """What rounds take at one context length and load, and whether drafting there has paid.

    Attributes:
        balance: seconds; below zero what drafting owes, above what may be spent on a trial.
        is_barred: it owed more than its grace and has not paid back yet.
        is_borrowed: its times are those of the nearest bucket.
    """

    plain: Line = field(default_factory=Line)
    drafted: Line = field(default_factory=Line)
    num_trials: int = 0
    since_plain: int = 0
    balance: float = 0.0
    num_failures: int = 0
    is_barred: bool = False
    is_borrowed: bool = False

    def book_plain(self, num_tokens: int, seconds: float) -> None:
        """A plain round pays back, and pays for trials."""
        if self.is_borrowed:
            ratio = seconds / self.plain.at(num_tokens)
            self.drafted = self.drafted.borrowed(ratio)
            self.plain = Line()
            self.is_borrowed = False
        self.plain.add(num_tokens, seconds, seconds / num_tokens)
        self.since_plain = 0
        self.balance += seconds * _SHARE / 2**self.num_failures
        self.is_barred = self.is_barred and self.balance < 0

    def book_drafted(self, saved: float, grace: float, *, is_probe: bool) -> None:
        """A drafted round saved seconds, or lost them."""
        self.balance = min(self.balance + saved, 0.0)
        self.is_barred = self.is_barred or self.balance < -grace
        if saved >= 0:
            self.num_failures = 0
        elif is_probe:
            self.num_failures = min(self.num_failures + 1, _MOST_FAILURES)

    def borrowed(self) -> Bucket:
        """A bucket that nothing has been measured for, next to this one."""
        return replace(
            self,
            plain=self.plain.borrowed(),
            drafted=self.drafted.borrowed() if self.drafted.weight else Line(),
            balance=0.0,
            is_borrowed=True,
        )


class RoundCosts:
    """What rounds take and how drafts fare; shared by all requests of a process.

    Times are kept by the verifier's context length, in steps of a factor of 1.4, and by how many
    answers grow at once, in steps of two.
    """

    def __init__(self) -> None:
        self._buckets: dict[tuple[int, int], Bucket] = {}
        self._acceptance: dict[bool, Acceptance] = {}
        self._num_growing = 0

    @contextmanager
    def growing(self, num_answers: int) -> Iterator[None]:
        """While these answers grow, beside whatever else does."""
        self._num_growing += num_answers
        try:
            yield
        finally:
            self._num_growing -= num_answers

    def at(self, num_context: int) -> Bucket:
        """The bucket for a context of so many tokens, now; a new one starts as its neighbour."""
        length = int(2 * math.log2(max(num_context, _LEAST_CONTEXT)))
        load = int(math.log2(max(self._num_growing, 1)))
        if (length, load) not in self._buckets:
            known = [
                (abs(length - near[0]) + abs(load - near[1]), near)
                for near, bucket in self._buckets.items()
                if bucket.plain.weight and not bucket.is_borrowed
            ]
            bucket = self._buckets[min(known)[1]].borrowed() if known else Bucket()
            self._buckets[length, load] = bucket
        return self._buckets[length, load]

    def acceptance(self, *, can_rest: bool) -> Acceptance:
        """Of all requests of a kind: fused drafts fare better than those of the target's own."""
        return self._acceptance.setdefault(can_rest, Acceptance())


class Controller:
    """Chooses the draft lengths of one choice; see `rapid.ports.Pace`.

    Args:
        costs: shared by the process.
        num_context: tokens that the verifier has read before the first round.
        max_draft: no draft is longer; and so many tokens a plain round decodes.
        can_rest: whether the contract holds without a drafter.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        costs: RoundCosts,
        num_context: int,
        max_draft: int,
        *,
        can_rest: bool,
        clock: Clock = time.perf_counter,
    ) -> None:
        self._costs = costs
        self._num_context = num_context
        self._max_draft = max_draft
        self._can_rest = can_rest
        self._clock = clock
        self._shared = costs.acceptance(can_rest=can_rest)
        self._prior = self._shared.rate(_PRIOR)
        self._offer_prior = self._shared.offer_rate(1.0)
        self._own = Acceptance()
        self._bucket = Bucket()
        self._length = 0
        self._num_rested = 0
        self._is_probe = False
        self._began = 0.0

    def next_length(self, limit: int) -> int:
        """Tokens to draft in the round that begins now; 0 rests."""
        self._began = self._clock()  # choosing is a part of the round
        self._bucket = self._costs.at(self._num_context)
        self._is_probe = False
        self._length = self._choose(self._bucket, limit)
        return self._length

    def observe(self, verdict: Verdict) -> None:
        """The round that `next_length` began has come to its verdict."""
        seconds = max(self._clock() - self._began, 1e-9)
        bucket, num_tokens = self._bucket, len(verdict.token_ids)
        self._num_context += num_tokens
        if not self._length:
            self._num_rested += num_tokens
            bucket.book_plain(num_tokens, seconds)
            return
        num_drafted = verdict.num_drafted
        is_catching_up, self._num_rested = self._num_rested > self._max_draft, 0
        if not is_catching_up or seconds < bucket.drafted.at(num_drafted):
            slope = verdict.draft_ms / 1e3 / num_drafted if num_drafted else 0.0
            bucket.drafted.add(num_drafted, seconds, slope)
        bucket.since_plain += 1
        bucket.num_trials += 1
        self._own.observe(verdict, _KEEP, _MOST_TOKENS)
        self._shared.observe(verdict, 1.0, _MOST_TOKENS_SHARED)
        if self._can_rest and bucket.num_trials > _TRIALS:
            plain = self._plain(bucket)
            bucket.book_drafted(
                num_tokens * plain - seconds, _GRACE_TOKENS * plain, is_probe=self._is_probe
            )

    def _choose(self, bucket: Bucket, limit: int) -> int:
        if self._can_rest and (limit < 2 or bucket.is_borrowed or not bucket.plain.weight):
            return 0  # a block of one token brings no more than plain decoding does
        if bucket.num_trials < _TRIALS:
            return limit if bucket.num_trials else min(limit, _TRIAL_TOKENS)
        length, rate = self._best(bucket, limit)
        if not self._can_rest:
            return length
        plain = self._plain(bucket)
        gain = rate * plain
        is_clear = gain >= _CLEAR_GAIN and bucket.plain.weight >= _SETTLED - 1
        patience = _PLAIN_EVERY if is_clear else _PLAIN_OFTEN
        if bucket.is_barred or bucket.since_plain >= patience:
            return 0
        if gain >= _MARGIN:
            return length
        length = max(length, _TRIAL_TOKENS)
        (seconds,), (tokens,) = self._seconds(bucket, [length]), self._tokens([length])
        lost = seconds - tokens * plain
        self._is_probe = length <= limit and bucket.balance >= max(lost, plain)
        return length if self._is_probe else 0

    def _best(self, bucket: Bucket, limit: int) -> tuple[int, float]:
        """The length with the most tokens a second, the shortest of equals; and how many."""
        lengths = range(1, limit + 1)
        rates = [
            tokens / seconds
            for tokens, seconds in zip(
                self._tokens(lengths), self._seconds(bucket, lengths), strict=True
            )
        ]
        rate = max(rates)
        return lengths[rates.index(rate)], rate

    def _tokens(self, lengths: Sequence[int]) -> list[float]:
        """Committed by rounds: ``E``, or one where nothing is proposed."""
        accepted, offered = self._own.rate(self._prior), self._own.offer_rate(self._offer_prior)
        share = offered / (1 - accepted)
        return [1 + share * (accepted - accepted**length) for length in lengths]

    def _seconds(self, bucket: Bucket, lengths: Sequence[int]) -> list[float]:
        """Taken by rounds: ``R``, of as many tokens as will be proposed."""
        offered, slope = self._own.offer_rate(self._offer_prior), bucket.drafted.slope
        start = bucket.drafted.at(0)
        return [start + slope * offered * length for length in lengths]

    def _plain(self, bucket: Bucket) -> float:
        """Seconds a token of plain decoding: ``P``."""
        return bucket.plain.at(self._max_draft) / self._max_draft

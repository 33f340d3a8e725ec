"""Choice of draft lengths from measured times: the length that yields the most tokens a second.

A round that drafts k tokens commits ``E(k) = 1 + a + ... + a^(k-1)`` tokens on average, where `a`
is the share of judged draft tokens that were accepted (there is no bonus token), and takes ``R(k)``
seconds, a line through the measured rounds. Plain decoding takes ``P`` seconds a token. The chosen
length maximises ``E(k) / R(k)``. Where the contract does not need a drafter, the controller rests,
which *is* plain decoding, unless that beats ``1 / P``.

A balance books what drafting costs beyond resting: a drafted round of n tokens and s seconds adds
``n * P - s``, never above zero, and a plain round `_SHARE` of its time. Drafting that looks
profitable may owe `_GRACE_TOKENS` plain tokens, and then pauses until they are paid back, whatever
``E`` predicts. Drafting that looks unprofitable is tried once its expected cost is paid for. So in
``T`` seconds drafting costs at most ``_SHARE * T`` plus, once, the grace, the round that overdraws
it, and the first `_TRIALS` rounds of a process without measurements.

A length never depends on the tokens of its own block, so every token follows its contract. Under
`maximal`, resting keeps the distribution but not the text: for that, fix the length.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from rapid.messages import Verdict
from rapid.ports import Clock
from rapid.speculation.pace.round_costs import Acceptance, LengthBucket, RoundCosts

# The constants say how fast the controller learns and what it may cost, not how fast a machine is;
# docs/constants.md gives the source of each.

# When drafting goes on.
_MARGIN = 1.05  # factor by which drafting must look better than resting
_GRACE_TOKENS = 8  # plain tokens whose time drafting may owe before it must pay back
# When drafting that looks unprofitable is tried.
_TRIALS = 2  # first rounds, of different lengths, that are only measured
_TRIAL_TOKENS = 4  # longest draft of the first of them, and shortest of later trials
# When plain decoding is measured again, in drafted rounds.
_PLAIN_EVERY = 64  # while drafting gains clearly and plain decoding has several measurements,
_PLAIN_OFTEN = 8  # otherwise
_CLEAR_GAIN = 1.25  # tokens a second over those of plain decoding
# How acceptance is learnt.
PRIOR = 0.7  # acceptance before anything is judged
_KEEP = 0.85  # factor on a request's acceptance counts per round
_MOST_TOKENS = 20.0  # most judged tokens that earlier rounds of an answer weigh,
_MOST_TOKENS_SHARED = 400.0  # and those of all requests


class Controller:
    """The `rapid.ports.Pace` that chooses the draft lengths of one choice.

    Args:
        costs: Measurements shared by the process.
        num_context: Tokens in the verifier's context before the first round.
        max_draft: Longest draft, and the number of tokens that a plain round decodes.
        can_rest: Whether the contract holds without a drafter.
        num_left: Most tokens that the answer may still get; None is without limit.
        is_read: Tells whether the drafter has read its prompt; the controller rests before.
        on_rest: Called once, when what is left is too short to pay for another trial.

    Attributes:
        gain: Expected tokens a second of the round that begins now over those of plain decoding;
            infinite for one that only measures, and 0 for one that rests.
    """

    def __init__(
        self,
        costs: RoundCosts,
        num_context: int,
        max_draft: int,
        *,
        can_rest: bool,
        num_left: int | None = None,
        is_read: Callable[[], bool] = lambda: True,
        on_rest: Callable[[], None] = lambda: None,
        clock: Clock = time.perf_counter,
    ) -> None:
        self.gain = 0.0
        self._num_left = math.inf if num_left is None else num_left
        self._is_read = is_read
        self._on_rest = on_rest
        self._rests_for_good = False
        self._costs = costs
        self._num_context = num_context
        self._max_draft = max_draft
        self._can_rest = can_rest
        self._clock = clock
        self._shared = costs.acceptance(can_rest=can_rest)
        self._prior = self._shared.rate(PRIOR)
        self._offer_prior = self._shared.offer_rate(1.0)
        self._own = Acceptance()
        self._bucket = LengthBucket()
        self._length = 0
        self._num_rested = 0
        self._is_probe = False
        self._began = 0.0

    def next_length(self, limit: int) -> int:
        """Return the number of tokens to draft in the round that begins now; 0 rests."""
        self._began = self._clock()  # the choice itself is part of the round's time
        self._bucket = self._costs.at(self._num_context)
        self._is_probe, self.gain = False, 0.0
        can_draft = not self._rests_for_good and self._is_read()
        self._length = self._choose(self._bucket, limit) if can_draft else 0
        return self._length

    def observe(self, verdict: Verdict) -> None:
        """Record the verdict of the round that `next_length` began."""
        seconds = max(self._clock() - self._began, 1e-9)
        bucket, num_tokens = self._bucket, len(verdict.token_ids)
        self._num_context += num_tokens
        self._num_left -= num_tokens
        if not self._length:
            self._num_rested += num_tokens
            bucket.book_plain(num_tokens, seconds)
            return
        num_drafted = verdict.num_drafted
        # A drafter that rested first reads what it missed: booked, but no round's time.
        is_catching_up, self._num_rested = self._num_rested > self._max_draft, 0
        if not is_catching_up or seconds < bucket.drafted.at(num_drafted):
            slope = verdict.draft_ms / 1e3 / num_drafted if num_drafted else 0.0
            bucket.drafted.add(num_drafted, seconds, slope)
        bucket.since_plain += 1
        bucket.num_trials += bucket.drafted.weight > 0  # no time is known from catching up alone
        self._own.observe(verdict, _KEEP, _MOST_TOKENS)
        self._shared.observe(verdict, 1.0, _MOST_TOKENS_SHARED)
        if self._can_rest and bucket.num_trials > _TRIALS:
            plain = self._plain(bucket)
            bucket.book_drafted(
                num_tokens * plain - seconds, _GRACE_TOKENS * plain, is_probe=self._is_probe
            )

    def skip(self, num_tokens: int) -> None:
        """Pass over a round that another drafter drafted, of which `num_tokens` were committed."""
        self._num_context += num_tokens
        self._num_left -= num_tokens
        self._num_rested += num_tokens

    def _choose(self, bucket: LengthBucket, limit: int) -> int:
        if self._can_rest and (limit < 2 or bucket.is_borrowed or not bucket.plain.weight):
            return 0  # a block of one token gains nothing over plain decoding
        if bucket.num_trials < _TRIALS:
            self.gain = math.inf
            return limit if bucket.num_trials else min(limit, _TRIAL_TOKENS)
        length, rate = self._best(bucket, limit)
        if not self._can_rest:
            return length
        plain = self._plain(bucket)
        gain = rate * plain
        is_clear = gain >= _CLEAR_GAIN and bucket.plain.has_several
        patience = _PLAIN_EVERY if is_clear else _PLAIN_OFTEN
        if bucket.is_barred:
            self._rest_for_good_below(0.0, bucket, plain)
            return 0
        if bucket.since_plain >= patience:
            return 0
        if gain >= _MARGIN:
            self.gain = gain
            return length
        length = max(length, _TRIAL_TOKENS)
        (seconds,), (tokens,) = self._seconds(bucket, [length]), self._tokens([length])
        price = max(seconds - tokens * plain, plain)
        self._is_probe = length <= limit and bucket.balance >= price
        if not self._is_probe:
            self._rest_for_good_below(price, bucket, plain)
            return 0
        self.gain = math.inf
        return length

    def _rest_for_good_below(self, price: float, bucket: LengthBucket, plain: float) -> None:
        """Rest for good if all tokens that may follow, decoded plainly, cannot pay `price`."""
        if bucket.balance + bucket.pay(self._num_left * plain) < price:
            self._rests_for_good = True
            self._on_rest()

    def _best(self, bucket: LengthBucket, limit: int) -> tuple[int, float]:
        """Return the shortest length with the most tokens per second, and that rate."""
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
        """Return ``E``, the expected tokens that a drafted round of each length commits."""
        accepted, offered = self._expect()
        share = offered / (1 - accepted)  # a round without a proposal commits one token
        return [1 + share * (accepted - accepted**length) for length in lengths]

    def _seconds(self, bucket: LengthBucket, lengths: Sequence[int]) -> list[float]:
        """Return ``R``, the expected seconds of a drafted round of each length."""
        (_, offered), slope = self._expect(), bucket.drafted.slope
        start = bucket.drafted.at(0)
        return [start + slope * offered * length for length in lengths]

    def _expect(self) -> tuple[float, float]:
        """Return the share of drafted tokens to be accepted, and of rounds that propose some."""
        return self._own.rate(self._prior), self._own.offer_rate(self._offer_prior)

    def _plain(self, bucket: LengthBucket) -> float:
        """Return ``P``, the seconds per token of plain decoding."""
        return bucket.plain.at(self._max_draft) / self._max_draft

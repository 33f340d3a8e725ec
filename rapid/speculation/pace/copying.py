"""Choice of the lengths of drafts that are copied from the text, by how much of it matches.

A long match is right whatever was before it, so it is drafted from at once, and a short one where
copying has paid lately. Where nothing matches, a round of one token follows while copying pays,
since the next tokens may match again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from typing_extensions import override

from rapid.messages import Verdict
from rapid.ports import Clock
from rapid.speculation.pace.controller import PRIOR, Controller
from rapid.speculation.pace.round_costs import LengthBucket, RoundCosts

_KEEP_PLAIN = 0.5  # factor on an answer's counts per plain round; docs/constants.md


class TextController(Controller):
    """The controller of the drafts that the text itself gives for one choice.

    Acceptance is learnt for each size of match, in steps of a factor of two, from all requests.
    """

    def __init__(
        self,
        costs: RoundCosts,
        num_context: int,
        max_draft: int,
        longest: Callable[[], int],
        *,
        num_left: int | None = None,
        clock: Clock = time.perf_counter,
    ) -> None:
        """Store what the rounds cost, those of text drafts alone, and how much may be proposed.

        Args:
            costs: See `Controller`.
            num_context: See `Controller`.
            max_draft: See `Controller`.
            longest: Returns the most tokens that are proposed next; 0 for nothing.
            num_left: See `Controller`.
            clock: See `Controller`.
        """
        super().__init__(
            costs, num_context, max_draft, can_rest=True, num_left=num_left, clock=clock
        )
        self._find_longest, self._longest = longest, 0

    @override
    def next_length(self, limit: int) -> int:
        """Return the number of tokens to draft in the round that begins now; 0 rests."""
        self._longest = self._find_longest()
        kind = self._longest.bit_length()
        self._shared = self._costs.acceptance(can_rest=True, kind=kind)
        super().next_length(min(limit, self._longest or limit))
        if not self._longest and self.gain == math.inf:  # a trial would measure nothing
            self._length = 0
        return self._length

    @override
    def observe(self, verdict: Verdict) -> None:
        super().observe(verdict)
        if not self._length:
            self._own.fade(_KEEP_PLAIN)

    @override
    def _expect(self) -> tuple[float, float]:
        if not self._longest:
            return self._own.rate(0.0), self._own.offer_rate(0.0)
        return self._own.rate(self._shared.rate(PRIOR)), 1.0

    @override
    def _seconds(self, bucket: LengthBucket, lengths: Sequence[int]) -> list[float]:
        """Return ``R``, at least a plain token's time: a fitted line may start anywhere above 0."""
        least = self._plain(bucket)
        return [max(seconds, least) for seconds in super()._seconds(bucket, lengths)]

    @override
    def _rest_for_good_below(self, price: float, bucket: LengthBucket, plain: float) -> None:
        """Go on looking: it costs next to nothing, and the next match may be a long one."""

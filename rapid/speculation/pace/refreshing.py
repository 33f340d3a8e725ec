"""The trigger for another retrieval: a rejected draft, which shows what the drafter lacks.

The paper retrieves once. This trigger was chosen among four occasions to retrieve again
(`benchmarks/results/triggered-retrieval-test.md`).
"""

from __future__ import annotations

from rapid.messages import Verdict

MAX_REFRESHES = 4  # per answer
LEAST_DISTANCE = 3  # tokens between two refreshes, and before the first


class RefreshTrigger:
    """The refresh trigger of one choice, fed with its verdicts.

    A rejection is a function of the prompt, the committed text and the seed, and ends its block. So
    refreshes do not depend on how the answer was split into blocks, but for the rule `paper`, whose
    bonus tokens are never drafted.
    """

    def __init__(self) -> None:
        self._num_refreshes = 0
        self._latest = 0

    def observe(self, verdict: Verdict) -> bool:
        """Return whether a refresh is due after this round; if so, it counts as made."""
        num_committed = verdict.position + len(verdict.token_ids)
        if "corrected" not in verdict.origins or self._num_refreshes == MAX_REFRESHES:
            return False
        if num_committed - self._latest < LEAST_DISTANCE:
            return False
        self._num_refreshes += 1
        self._latest = num_committed
        return True

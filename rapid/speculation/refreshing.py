"""When to retrieve again: after a rejected draft, for the drafter has then shown what it lacks.

The paper retrieves once, for the question. Of four occasions to do it again, for the question and
the answer so far, `benchmarks/triggered_retrieval.py` chose this one and its constants.
"""

from __future__ import annotations

from rapid.messages import Verdict

MAX_REFRESHES = 4  # of an answer
LEAST_DISTANCE = 3  # tokens between two, and before the first


class RefreshTrigger:
    """Watches one choice's verdicts.

    Where a draft is rejected is a function of the prompt, the committed text and the seed, and the
    rejection ends its block. So when a refresh is due does not depend on how the answer was split
    into blocks (not so under the rule `paper`, whose bonus tokens are never drafted).
    """

    def __init__(self) -> None:
        self._num_refreshes = 0
        self._latest = 0

    def observe(self, verdict: Verdict) -> bool:
        """Whether a refresh is due after this round; it then counts as made."""
        num_committed = verdict.position + len(verdict.token_ids)
        if "corrected" not in verdict.origins or self._num_refreshes == MAX_REFRESHES:
            return False
        if num_committed - self._latest < LEAST_DISTANCE:
            return False
        self._num_refreshes += 1
        self._latest = num_committed
        return True

"""Counters over the rounds of one choice: drafted and accepted tokens, and times."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import count

from rapid.messages import Verdict
from rapid.receipt import ChoiceStatistics, CutBy, Origin, TokenProbs
from rapid.speculation.lookup import LOOKUP


@dataclass(slots=True)
class RoundStatistics:
    """The sum of one choice's verdicts."""

    rounds: int = 0
    drafted: int = 0
    forced: int = 0
    thinking_tokens: int = 0  # told by the code that reads the text
    cut_by: CutBy | None = None  # likewise
    accepted: int = 0
    copied: int = 0  # drafted tokens that the text itself gave, and those of them
    copied_accepted: int = 0  # that were accepted
    # Number of times that the drafter's context was retrieved again; counted by the code that does
    # so.
    refreshes: int = 0
    # Those of the last judged block, with which another lease continues the answer.
    log_odds: float = 0.0
    # Position from which the answer continued without its drafter; None while the drafter is not
    # lost, even in rounds without a draft.
    plain_from: int | None = None
    plain_reason: str = ""  # cause of that loss; empty while the drafter is not lost
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    probs: dict[int, TokenProbs] = field(default_factory=dict)  # by position, where told
    # Drafted rounds by block length: entry i counts those that accepted exactly i tokens.
    histogram: dict[int, list[int]] = field(default_factory=dict)

    def observe(self, verdict: Verdict) -> None:
        """Count one round."""
        self.rounds += 1
        self.drafted += verdict.num_drafted
        self.forced += verdict.num_forced
        self.accepted += verdict.num_accepted
        probs = verdict.probs
        if verdict.lease_id == LOOKUP:
            self.copied += verdict.num_drafted
            self.copied_accepted += verdict.num_accepted
            # The text proposes without a distribution; its 1 says nothing of the drafter.
            probs = tuple(replace(each, drafter=None) for each in probs)
        self.draft_ms += verdict.draft_ms
        self.verify_ms += verdict.verify_ms
        self.probs.update(zip(count(len(self.token_ids)), probs, strict=False))
        self.token_ids.extend(verdict.token_ids)
        self.origins.extend(verdict.origins)
        if verdict.num_drafted:
            self.log_odds = verdict.log_odds
            length = verdict.num_drafted
            counts = self.histogram.setdefault(length, [0] * (length + 1))
            counts[verdict.num_accepted] += 1

    def lose_drafter(self, reason: object) -> None:
        """Record that the target decodes alone from here on; only the first call counts."""
        if self.plain_from is None:
            self.plain_from = len(self.token_ids)
            self.plain_reason = str(reason)

    def of_choice(self) -> ChoiceStatistics:
        """Return the counters in the form of the receipt."""
        return ChoiceStatistics(
            rounds=self.rounds,
            drafted=self.drafted,
            accepted=self.accepted,
            corrected=self.origins.count("corrected"),
            bonus=self.origins.count("bonus"),
            completion_tokens=len(self.token_ids),
            histogram={length: tuple(counts) for length, counts in self.histogram.items()},
            refreshes=self.refreshes,
            forced=self.forced,
            thinking_tokens=self.thinking_tokens,
            cut_by=self.cut_by,
        )

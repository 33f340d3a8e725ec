"""Counters of one choice: what the rounds drafted, kept and cost."""

from __future__ import annotations

from dataclasses import dataclass, field

from rapid.messages import ChoiceStatistics, Origin, Verdict


@dataclass(slots=True)
class RoundStatistics:
    """Adds up verdicts; the histogram counts drafted rounds by block length and accepted tokens.

    Attributes:
        refreshes: times that the drafter's context was made anew; whoever makes it counts.
        plain_from: position from which the answer went on without its drafter; None while it has
            one, whether or not it is asked.
        plain_reason: why the drafter was lost there; empty while it is not.
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    refreshes: int = 0
    plain_from: int | None = None
    plain_reason: str = ""
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    histogram: dict[int, list[int]] = field(default_factory=dict)

    def observe(self, verdict: Verdict) -> None:
        """Count one round."""
        self.rounds += 1
        self.drafted += verdict.num_drafted
        self.accepted += verdict.num_accepted
        self.draft_ms += verdict.draft_ms
        self.verify_ms += verdict.verify_ms
        self.token_ids.extend(verdict.token_ids)
        self.origins.extend(verdict.origins)
        if verdict.num_drafted:
            length = verdict.num_drafted
            counts = self.histogram.setdefault(length, [0] * (length + 1))
            counts[verdict.num_accepted] += 1

    def lose_drafter(self, reason: object) -> None:
        """Note that what comes now is decoded by the target alone, and why."""
        if self.plain_from is None:
            self.plain_from = len(self.token_ids)
            self.plain_reason = str(reason)

    def of_choice(self) -> ChoiceStatistics:
        """The counters as the receipt carries them."""
        return ChoiceStatistics(
            rounds=self.rounds,
            drafted=self.drafted,
            accepted=self.accepted,
            corrected=self.origins.count("corrected"),
            bonus=self.origins.count("bonus"),
            completion_tokens=len(self.token_ids),
            histogram={length: tuple(counts) for length, counts in self.histogram.items()},
            refreshes=self.refreshes,
        )

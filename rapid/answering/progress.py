"""What one request has come to: its mode, its answers, its draft source and what it has lost."""

from __future__ import annotations

from dataclasses import dataclass, field

from rapid.answering.answers import GrowingAnswer
from rapid.answering.receipts import Record
from rapid.answering.resolution import Decision
from rapid.answering.session import DraftSource
from rapid.messages import Failover


@dataclass(slots=True)
class Progress:
    """The state of one request, which the parts of its processing share.

    Attributes:
        request_id: Id of the request, for log lines.
        decision: The resolved mode; None while it is open.
        source: Source of the drafts; None if the answers are not drafted, or no longer.
        answers: The answers, one for each choice.
        is_started: Whether the first leases are held, after which nothing is refused any more.
        record: Prompts, chunks and failovers for the receipt.
    """

    request_id: str
    decision: Decision | None = None
    source: DraftSource | None = None
    answers: list[GrowingAnswer] = field(default_factory=list)
    is_started: bool = False
    record: Record = field(default_factory=Record)

    @property
    def committed(self) -> list[list[int]]:
        """Tokens of each choice so far, for a new lease.

        The list is empty for a request's first leases. A pool may refuse those for want of room,
        and no others.
        """
        if not (self.is_started or self.record.failovers):
            return []
        return [answer.statistics.token_ids for answer in self.answers]

    @property
    def has_lost_drafter(self) -> bool:
        """Whether an answer goes on without its drafter."""
        return any(answer.statistics.plain_from is not None for answer in self.answers)

    def lose_drafter(self, how: Failover) -> None:
        """Continue every unfinished answer without a drafter."""
        for answer in self.answers:
            if not answer.is_finished:
                self.lose_drafter_of(answer, how)
        self.source = None

    def lose_drafter_of(self, answer: GrowingAnswer, how: Failover) -> None:
        """Continue one answer without a drafter.

        All answers share the drafter, so only the first of them adds a failover to the receipt.
        """
        if not self.has_lost_drafter:
            self.record.failovers.append(how)
        answer.statistics.lose_drafter(how)

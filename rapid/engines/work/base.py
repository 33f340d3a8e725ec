"""Base classes of the calls on an engine.

A call is a small state machine on the compute thread, over one sequence (prefill: over all
sequences of a lease; a witnessed block: over one of each of two leases). Every step takes rows of
the selected work (`feeds`) and hands back their logits (`take`); questions about draws are answered
for all work of a step at once (`use`).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Literal

import torch
from typing_extensions import override

from rapid.constraints.shaping import shape_rows
from rapid.engines.attention.batch import Feed
from rapid.engines.kv.leases.lease import Lease
from rapid.errors import OutOfStep
from rapid.messages import Verdict
from rapid.speculation.draw import Draw
from rapid.speculation.questions import Answer, Question

MIN_CHUNK_TOKENS = 16  # smallest chunk of a prompt beside other rows


@dataclass(slots=True)
class Times:
    """Time that the engine has spent on a traced call so far."""

    # Time at which the call was handed in, in seconds of the performance counter.
    since: float = field(default_factory=time.perf_counter)
    num_steps: int = 0  # forwards with rows of the call
    computed_s: float = 0.0  # seconds of these forwards, with what follows on them, such as judging
    # Seconds for which the compute thread copied pages, or launched their copies, meanwhile. What
    # the call waits for copies on their way, or for a disk, is no part of it.
    copied_s: float = 0.0


class Work(ABC):
    """Call in progress on a lease, or on several together."""

    kind: Literal["step", "draft", "ahead", "prefill"] = "step"  # which verifies or decodes
    next_page: int | None = None  # of a prompt to compute, which other prefills may wait for

    def __init__(self, lease: Lease, choices: tuple[int, ...], *others: Lease) -> None:
        self.lease = lease  # the one that is answered
        self.leases = (lease, *others)
        self.choices = choices  # whose sequences it changes; no other call may be in progress there
        self.result: object = None
        self.is_done = False
        self.times = Times() if lease.request.traceparent else None
        self.began = 0.0  # in seconds of the performance counter
        self._num_fed = 0

    def begin(self) -> None:
        """Check the call and prepare the sequence; may already finish the work."""
        self.began = time.perf_counter()

    def advance(self) -> None:  # noqa: B027 (most work does not depend on other work)
        """Use KV that other work computed; called before every forward, with the engine's lock."""

    def share(self) -> None:  # noqa: B027 (most work computes nothing that others could use)
        """Publish KV for other work; called after its forwards, with the engine's lock."""

    @abstractmethod
    def feeds(self, limit: int) -> list[Feed]:
        """Return the next forward's rows of each sequence; only prefills keep to `limit` rows."""

    def prepare(self) -> None:  # noqa: B027 (most work needs nothing but its rows)
        """Write KV that the rows of `feeds` need; called before their forward, without the lock."""

    @abstractmethod
    def take(self, logits: torch.Tensor) -> Question | None:
        """Count the rows of a sequence; return what to draw from its logits [num_wanted, vocab].

        It is called after the forward, once for each of `feeds`, in their order.
        """

    def use(self, answer: Answer) -> None:  # noqa: B027 (most work asks nothing)
        """Use the answer to what `take` returned."""

    def finish(self, result: object) -> None:
        """Mark the work as done, with its result."""
        self.result = result
        self.is_done = True

    @property
    def depth(self) -> int:
        """Number of tokens before the next row; 0 except for prefills."""
        return 0

    @property
    def elapsed_ms(self) -> float:
        """Milliseconds since the work began."""
        return (time.perf_counter() - self.began) * 1e3


class SequenceWork(Work):
    """Work on one choice, which must be prefilled.

    Tokens that were committed elsewhere in the meantime are computed first, in chunks; their logits
    are not needed.
    """

    def __init__(self, lease: Lease, choice: int) -> None:
        if not 0 <= choice < len(lease.sequences):
            raise OutOfStep(f"lease {lease.lease_id!r} has no choice {choice}")
        super().__init__(lease, (choice,))
        self.choice = choice
        self.sequence = lease.sequences[choice]
        self._is_behind = False

    @override
    def begin(self) -> None:
        super().begin()
        if not self.sequence.holds_prompt:
            raise OutOfStep(f"lease {self.lease.lease_id!r} is not prefilled yet")

    @override
    def feeds(self, limit: int) -> list[Feed]:
        return [self.feed(limit)]

    def feed(self, limit: int) -> Feed:
        """Return the rows for the next forward: those left before the wanted ones, or these."""
        if not self.is_behind(limit):
            if self.sequence.shaping is not None:
                self.sequence.shaping.prepare(self._list_drafted(), self._num_wanted())
            return self._feed_wanted()
        num_rows = min(self._num_behind(), self._most_rows(limit))
        return self._rows(self.sequence.pending(num_rows), 0)

    def is_behind(self, limit: int) -> bool:
        """Return whether rows are left that do not go into one forward with the wanted ones."""
        return self._num_behind() > 0 and not self._fits(self._most_rows(limit))

    def _num_behind(self) -> int:
        """Return the number of rows left before the wanted ones."""
        return self.sequence.num_pending - self._num_wanted()

    def _most_rows(self, limit: int) -> int:
        return self.sequence.most_rows(max(limit, MIN_CHUNK_TOKENS))

    def _fits(self, limit: int) -> bool:
        """Return whether tokens committed elsewhere go into one forward with the wanted rows."""
        return self.sequence.num_pending <= limit

    def _feed_wanted(self) -> Feed:
        """Return the rows whose logits are needed, with those left before them."""
        return self._rows(self.sequence.pending(), self._num_wanted())

    def _rows(self, token_ids: list[int], num_wanted: int) -> Feed:
        """Return the rows of the next tokens to compute."""
        sequence = self.sequence
        self._num_fed, self._is_behind = len(token_ids), num_wanted == 0
        return Feed(
            token_ids, sequence.num_computed, sequence.table, num_wanted, ring=sequence.ring
        )

    @override
    def take(self, logits: torch.Tensor) -> Question | None:
        self.sequence.num_computed += self._num_fed
        if self._is_behind:
            return None
        shaping = self.sequence.shaping
        if shaping is not None:
            logits = shape_rows(shaping, logits, self._list_drafted())
        return self._ask(logits)

    def _list_drafted(self) -> list[int]:
        """Return the uncommitted tokens before the last wanted row."""
        return self.sequence.draft_ids

    def _ask(self, logits: torch.Tensor) -> Question | None:
        """Use the logits of the wanted rows [num_wanted, vocab], or return what to draw."""
        return None

    def _num_wanted(self) -> int:
        return 1

    def _draw_after(self, num_tokens: int) -> Draw:
        """Return the draw of the token that follows `num_tokens` uncommitted ones."""
        terms, position = self.lease.request.terms, self.sequence.num_generated + num_tokens
        return Draw(terms.sampling, terms.speculation, self.choice, position)

    def _explains(self) -> bool:
        """Return whether it is told how likely the next tokens were."""
        return self.lease.request.terms.explains_at(self.sequence.num_generated)

    def _check_position(self, what: str, position: int, choice: int) -> None:
        here = self.sequence.num_generated
        if position != here or choice != self.choice:
            raise OutOfStep(
                f"{what} of choice {choice} for position {position}; lease "
                f"{self.lease.lease_id!r} has choice {self.choice} at position {here}"
            )


class Commit(SequenceWork):
    """Call that commits a verdict reached elsewhere."""

    def __init__(self, lease: Lease, verdict: Verdict) -> None:
        super().__init__(lease, verdict.choice)
        self._verdict = verdict

    @override
    def begin(self) -> None:
        super().begin()
        self._check_position("verdict", self._verdict.position, self._verdict.choice)
        self.sequence.commit(self._verdict.token_ids)
        self.sequence.log_odds = self._verdict.log_odds
        self.finish(None)

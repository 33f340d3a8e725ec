"""What an engine is asked to do, as small state machines over one sequence (prefill: over a lease).

Every step an engine asks the work it selected for its next rows (`feed`) and hands back their
logits (`take`), until the work is done. All of it runs on the engine's compute thread; `begin` is
where a call is checked against the state of its sequence, because only then is that state at rest.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Literal

import torch
from typing_extensions import override

from rapid.engines.attention.batch import Feed
from rapid.engines.kv.leases import Lease
from rapid.errors import OutOfStep
from rapid.messages import Verdict

MIN_CHUNK_TOKENS = 16


class Work(ABC):
    """One call in progress.

    Attributes:
        kind: what the scheduler goes by: ``step`` verifies or decodes.
        choices: whose sequences it changes; nothing else may be in progress on them.
        result: set when done.
    """

    kind: Literal["step", "draft", "ahead", "prefill"] = "step"
    next_page: int | None = None  # of a prompt, which others may wait for too

    def __init__(self, lease: Lease, choices: tuple[int, ...]) -> None:
        self.lease = lease
        self.choices = choices
        self.result: object = None
        self.is_done = False
        self._began = 0.0
        self._num_fed = 0

    def begin(self) -> None:
        """Check the call and put the sequence in place; may already finish."""
        self._began = time.perf_counter()

    def advance(self) -> None:  # noqa: B027 (most work has nothing to note)
        """Before every forward, under the engine's guard: note what others did meanwhile."""

    def share(self) -> None:  # noqa: B027 (most work computes nothing that others could use)
        """After every forward, under the guard: note what others may use of what was computed."""

    @property
    def began(self) -> float:
        """When, in seconds of the performance counter."""
        return self._began

    @abstractmethod
    def feed(self, limit: int) -> Feed:
        """Rows for the next forward; only a prefill keeps to the limit."""

    @abstractmethod
    def take(self, logits: torch.Tensor) -> None:
        """Use the wanted logits of the rows just computed [num_wanted, vocab]."""

    def finish(self, result: object) -> None:
        """The work is done."""
        self.result = result
        self.is_done = True

    @property
    def depth(self) -> int:
        """Tokens before its next row; asked of a prefill."""
        return 0

    @property
    def elapsed_ms(self) -> float:
        """Since the work began."""
        return (time.perf_counter() - self._began) * 1e3


class SequenceWork(Work):
    """Work on one choice, which must be prefilled.

    Rows that it needs no logits of, tokens committed elsewhere meanwhile, come first and in chunks.
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
    def feed(self, limit: int) -> Feed:
        sequence, num_wanted = self.sequence, self._num_wanted()
        num_behind = sequence.num_pending - num_wanted
        self._is_behind = num_behind > 0 and sequence.num_pending > max(limit, MIN_CHUNK_TOKENS)
        if self._is_behind:
            num_wanted = 0
            token_ids = sequence.pending(min(num_behind, max(limit, MIN_CHUNK_TOKENS)))
        else:
            token_ids = sequence.pending()
        self._num_fed = len(token_ids)
        return Feed(token_ids, sequence.num_computed, sequence.table, num_wanted)

    @override
    def take(self, logits: torch.Tensor) -> None:
        self.sequence.num_computed += self._num_fed
        if not self._is_behind:
            self._use(logits)

    def _use(self, logits: torch.Tensor) -> None:
        """The wanted rows' logits are here [num_wanted, vocab]."""

    def _num_wanted(self) -> int:
        return 1

    def _check_position(self, what: str, position: int, choice: int) -> None:
        here = self.sequence.num_generated
        if position != here or choice != self.choice:
            raise OutOfStep(
                f"{what} of choice {choice} for position {position}; lease "
                f"{self.lease.lease_id!r} has choice {self.choice} at position {here}"
            )


class Commit(SequenceWork):
    """Append a verdict that was reached elsewhere."""

    def __init__(self, lease: Lease, verdict: Verdict) -> None:
        super().__init__(lease, verdict.choice)
        self._verdict = verdict

    @override
    def begin(self) -> None:
        super().begin()
        self._check_position("verdict", self._verdict.position, self._verdict.choice)
        self.sequence.commit(self._verdict.token_ids)
        self.finish(None)

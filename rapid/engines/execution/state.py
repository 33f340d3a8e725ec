"""The state that callers and the compute thread share: open leases and calls in progress."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Literal

from rapid.engines.execution.replies import Reply
from rapid.engines.execution.scheduling import Scheduler
from rapid.engines.kv.leases.lease import Lease
from rapid.engines.kv.leases.lease_ledger import LeaseLedger
from rapid.engines.kv.sequences import Sequence
from rapid.engines.work.base import Work
from rapid.engines.work.drafting import Draft, DraftAhead
from rapid.errors import EngineFailed, LeaseNotFound, OutOfStep

Ending = Literal["released", "expired", "failed", "closed"]


@dataclass(eq=False, slots=True)
class Erasing:
    """Documents that are to be forgotten, and who waits for what was found of them."""

    documents: Collection[str]
    reply: Reply
    found: dict[str, int] = field(default_factory=dict)  # by tier; empty before it begins
    awaited: set[int] = field(default_factory=set)  # pages of which copies are on their way
    had_readers: bool = False  # whether leases had or awaited parts when it began


class EngineState:
    """Leases, calls in progress and who waits for what; every method needs the guard."""

    def __init__(self, ledger: LeaseLedger, scheduler: Scheduler, *, draft_ahead: bool) -> None:
        self.guard = threading.Condition()  # the compute thread waits on it while it is idle
        self.ledger = ledger
        self.scheduler = scheduler
        self.ahead_hits = self.ahead_misses = 0  # blocks that what was drafted ahead began, or not
        self.is_closed = False
        self._draft_ahead = draft_ahead
        self._inbox: list[Work] = []
        self._replies: dict[Work, Reply] = {}
        self._ahead: dict[Sequence, DraftAhead] = {}  # these have no caller
        self._endings: dict[Lease, list[Reply]] = {}
        self._closings: list[Reply] = []
        self.erasing: list[Erasing] = []

    def check_running(self) -> None:
        """Raise EngineFailed if the engine is closed."""
        if self.is_closed:
            raise EngineFailed("the engine is closed")

    # --- for callers ------------------------------------------------------------------------------

    def submit(self, lease_ids: Iterable[str], make: Callable[..., Work], reply: Reply) -> Work:
        """Hand in and return the call that `make` returns for some leases.

        Raises:
            LeaseNotFound: One of them is not open.
            OutOfStep: Its choice has another call in progress.
        """
        self.check_running()
        work = make(*map(self.ledger.get, lease_ids))
        for lease in work.leases:
            if lease.busy.intersection(work.choices):
                raise OutOfStep(
                    f"lease {lease.lease_id!r} has another call in progress on this choice"
                )
        for lease in work.leases:
            lease.busy.update(work.choices)
        self._replies[work] = reply
        self._inbox.append(work)
        self.guard.notify()
        return work

    def forget(self, work: Work) -> None:
        """Drop work without answering its caller; its sequence keeps the committed tokens."""
        if self._replies.pop(work, None) is None:
            return
        self.scheduler.drop(work)
        if work in self._inbox:
            self._inbox.remove(work)
        for lease in work.leases:
            lease.busy.difference_update(work.choices)
            self.ledger.touch(lease)

    def await_ending(self, lease_id: str, reply: Reply) -> None:
        """Settle `reply` with the ending of a lease, once it ends."""
        self.check_running()
        self._endings.setdefault(self.ledger.get(lease_id), []).append(reply)

    def await_closing(self, reply: Reply) -> None:
        """Settle `reply` once the engine is closed."""
        if self.is_closed:
            reply.settle()
        else:
            self._closings.append(reply)

    def erase(self, documents: Collection[str], reply: Reply) -> None:
        """Have the compute thread forget documents, and settle `reply` when it has."""
        self.check_running()
        self.erasing.append(Erasing(documents, reply))
        self.guard.notify()

    def end(self, lease: Lease, ending: Ending, error: Exception | None = None) -> None:
        """Close a lease: answer its calls and those who await its end, and free its pages."""
        for work in [work for work in self._replies if lease in work.leases]:
            self.settle(work, error or LeaseNotFound(f"lease {lease.lease_id!r} was {ending}"))
        for reply in self._endings.pop(lease, []):
            reply.settle(ending)
        self.stop_ahead(lease.sequences)
        self.scheduler.forget(lease)
        self.ledger.release(lease.lease_id)
        self.wake()

    def expire(self) -> None:
        """End the leases that were not used for their time-to-live."""
        for lease in self.ledger.find_expired():
            self.end(lease, "expired")

    def wake(self) -> None:
        """Wake an idle compute thread for the page copies that opening or ending leases ordered."""
        if self.is_due():
            self.guard.notify()

    def look(self) -> None:
        """Wake the compute thread, from any thread without the guard."""
        with self.guard:
            self.guard.notify()

    # --- for the compute thread -------------------------------------------------------------------

    def is_due(self) -> bool:
        """Return whether the compute thread has calls to begin or pages to copy."""
        prefixes = self.ledger.prefixes
        is_erasing = bool(self.erasing) or prefixes.is_dirty
        return is_erasing or prefixes.is_due or any(map(self._may_begin, self._inbox))

    def is_quiet(self) -> bool:
        """Return whether nothing but the selected work is to be done, nor will be by itself."""
        prefixes = self.ledger.prefixes
        others = self.is_closed or self.is_due() or self.scheduler.waiting()
        return not (others or prefixes.is_copying or prefixes.is_reading)

    def arrivals(self) -> list[Work]:
        """Return the calls that were handed in since the last time and may begin."""
        arrived = [work for work in self._inbox if self._may_begin(work)]
        self._inbox = [work for work in self._inbox if work not in arrived]
        return arrived

    def in_progress(self) -> list[Work]:
        """Return all work that has not ended."""
        return [*self._replies, *self._ahead.values()]

    def is_wanted(self, work: Work) -> bool:
        """Return whether work was neither dropped nor ended, so that its logits are of use."""
        if isinstance(work, DraftAhead):
            return self._ahead.get(work.sequence) is work
        return work in self._replies

    def settle(self, work: Work, error: Exception | None = None) -> None:
        """Answer the caller of ended work, and go on drafting behind a block handed out."""
        if isinstance(work, DraftAhead):
            self.stop_ahead([work.sequence])
            return
        reply = self._replies.get(work)
        if reply is not None:  # first, so that the caller is answered even if the rest raises
            reply.settle(work.result, error)
        self.forget(work)
        if reply is not None and error is None and isinstance(work, Draft) and work.is_done:
            self._go_ahead(work)

    def stop_ahead(self, sequences: Iterable[Sequence]) -> None:
        """Stop drafting ahead; tokens already drafted stay until the sequence's next call."""
        for sequence in sequences:
            ahead = self._ahead.pop(sequence, None)
            if ahead is not None:
                self.scheduler.drop(ahead)

    def close(self) -> None:
        """End all leases and take no more calls."""
        self.is_closed = True
        self.ledger.close()
        for lease in self.ledger.leases():
            self.end(lease, "closed", EngineFailed("the engine is closed"))
        for each in self.erasing:
            each.reply.settle(None, EngineFailed("the engine is closed"))
        self._announce_closing()
        self.guard.notify()

    def abandon(self, error: EngineFailed) -> None:
        """Close the engine and answer every caller, touching nothing that may raise."""
        if self.is_closed:
            return
        self.is_closed = True
        for reply in self._replies.values():
            reply.settle(None, error)
        for reply in itertools.chain(*self._endings.values()):
            reply.settle("failed")
        for each in self.erasing:
            each.reply.settle(None, error)
        self._replies.clear()
        self._endings.clear()
        self.ledger.close()
        self._announce_closing()

    def _may_begin(self, work: Work) -> bool:
        # A call waits while pages that its leases will write are copied between the tiers.
        return not any(map(self.ledger.awaits_copies, work.leases))

    def _announce_closing(self) -> None:
        for reply in self._closings:
            reply.settle()
        self._closings.clear()

    def _go_ahead(self, draft: Draft) -> None:
        """Start drafting ahead, behind a block that was handed out."""
        self.ahead_hits += draft.is_hit is True
        self.ahead_misses += draft.is_hit is False
        # A lease beside its target's does not: this same engine judges its blocks.
        if self._draft_ahead and draft.lease.request.beside is None:
            ahead = draft.ahead(self.scheduler.costs.base_s.value)
            if ahead is not None:
                self._ahead[draft.sequence] = ahead
                self.scheduler.add(ahead)

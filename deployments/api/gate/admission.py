"""Admission of chat requests to one ingress: how many at once, and how many of a tenant."""

from __future__ import annotations

import asyncio
import bisect
import random
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import NamedTuple

from deployments.api.gate.shares import Shares
from rapid.errors import Overloaded, TooManyRequests
from rapid.estimators import Turnover
from rapid.ports import Clock
from rapid.work_shares import WorkShares

_WAIT_S = 5.0
_LOOK_S = 0.2  # shares grow by themselves, too
_LONGEST_WAIT_S = 60.0  # the longest Retry-After that the SDK of OpenAI follows
_SOONEST_S = 1.0  # the shortest one that is sent
_PATIENT_S = 60.0  # that who has had less than its share of work waits; clients wait for minutes
_LATEST_S = 5.0  # that who was told a time may come after it
_ANYBODY = ""


class _RefusalNote(NamedTuple):
    """A refusal: when it was made, and when its caller may come again."""

    at: float
    due: float


class Usage(NamedTuple):
    """Tokens of one request, over all choices."""

    prompt_tokens: int
    completion_tokens: int


class _QueuedRequest(asyncio.Event):
    """A request in its tenant's line, which is set when it may look again."""

    def __init__(self, priority: int) -> None:
        super().__init__()
        self.priority = priority


class Ticket:
    """A place that a request holds, to be settled with what the request used.

    Attributes:
        usage: None until the answer is complete.
        work_s: Seconds of target and drafter; None until then.
    """

    def __init__(self) -> None:
        self.usage: Usage | None = None
        self.work_s: float | None = None

    def settle(self, usage: Usage, work_s: float = 0.0) -> None:
        """Take the usage of the complete answer, and what it took of target and drafter."""
        self.usage, self.work_s = usage, work_s


class Admission:
    """Places for the chat requests in progress, of which a tenant may take its share.

    Who finds no place waits up to five seconds for one, in the line of its tenant. So a burst is
    answered, and clients that ask again at once ask every few seconds: a refusal costs Serve's
    proxy and this process as much as a request that is let in. The waits differ, so that a crowd
    that came at once is not refused at once. A line is no longer than there is room for others.
    Requests whose bodies are being read count as if they stood in it.

    A tenant that has had less than its share of the engines' work here may have a place more, and
    waits for longer instead of being refused, as does one that has no place at all, or fewer
    requests here than another that waits: how slow others make its answers is not its fault. So
    does one for whose places nobody else waits, with as many requests as it may have at most. What
    an answer used is known at its end; of one that has none, its whole time counts. Each ingress
    goes by the answers that it gave itself, which are a sample of all.

    Refusals say when a place becomes free, by the pace at which the requests before it ended. Those
    of about one second name one place after the other, so that a crowd does not come back all at
    once. A later one takes the place of the oldest: callers cannot be told apart, and those that
    ask earlier than they were told would lengthen the line for ever.

    Attributes:
        shares: The tenants' shares, which other replicas of the ingress add to.
    """

    def __init__(self, *, clock: Clock = time.monotonic, wait_s: float | None = None) -> None:
        """Create no places; `limit` gives their number.

        Args:
            clock: Monotonic seconds, by which paces are measured.
            wait_s: Longest wait for a place, in seconds; None is the usual one.
        """
        self.shares = Shares(clock)
        self._clock = clock
        self._wait_s = _WAIT_S if wait_s is None else wait_s
        self._max_requests = self._num_held = 0
        self._turnover = Turnover(clock)
        self._work = WorkShares()  # seconds of target and drafter
        self._lines: dict[str, list[_QueuedRequest]] = {}
        self._num_read: Counter[str] = Counter()  # bodies that are being read, by tenant
        self._told: dict[str, deque[_RefusalNote]] = {}  # by tenant, in their order

    def limit(
        self,
        max_requests: int,
        max_per_tenant: int,
        shared: int | None = None,
        weights: Mapping[str, int] | None = None,
        most_of: Mapping[str, int] | None = None,
    ) -> None:
        """Set the numbers of places; requests that hold one keep it.

        Args:
            max_requests: Most requests here at once, those that wait included.
            max_per_tenant: Most requests at once of one tenant, at all replicas.
            shared: Requests that tenants share; None if there is one tenant only.
            weights: How many shares of one tenant another has; who is not named has one.
            most_of: Most requests of the tenants that have another number of their own.
        """
        self._max_requests = max_requests
        self.shares.configure(max_per_tenant, shared, weights, most_of)

    @contextmanager
    def room_to_read(self, tenant: str) -> Iterator[None]:
        """Count a request whose body is being read; it has no place yet.

        Raises:
            TooManyRequests: The tenant's requests that are read or wait leave no room for others',
                or it holds as many places as it may and its line is full.
            Overloaded: There is no room.
        """
        has_room = tenant not in self._lines and self._admits(tenant)
        num_waiting = len(self._lines.get(tenant, ())) + self._num_read[tenant]
        may_wait = num_waiting < self._num_free
        if not (may_wait or (has_room and not self.shares.are_shared)):
            raise self._refusal(tenant)
        self._check_free()
        self._num_read[tenant] += 1
        try:
            yield
        finally:
            self._num_read[tenant] -= 1
            self._num_read += Counter()  # forgets tenants that have none

    @asynccontextmanager
    async def place(self, tenant: str, priority: int = 0) -> AsyncIterator[Ticket]:
        """Hold a place for the duration of the context, which is given its ticket.

        In the line of its tenant a smaller `priority` comes first.

        Raises:
            TooManyRequests: The tenant holds as many places as it may.
            Overloaded: All places are held.
        """
        line = self._lines.get(tenant, ())
        may_wait = len(line) < self._num_free
        self._work.enter(tenant, self.shares.weight(tenant))
        try:
            has_room = not line and self._admits(tenant)
            if not (has_room or (may_wait and await self._comes_first(tenant, priority))):
                raise self._refusal(tenant)
            self._check_free()
            async with self._hold(tenant) as ticket:
                yield ticket
        finally:
            self._work.leave(tenant)

    @asynccontextmanager
    async def _hold(self, tenant: str) -> AsyncIterator[Ticket]:
        self._num_held += 1
        ticket, began = Ticket(), self._clock()
        try:
            with self._turnover.hold(), self.shares.hold(tenant):
                yield ticket
        finally:
            self._num_held -= 1
            held_s = self._clock() - began
            self._work.charge(tenant, held_s if ticket.work_s is None else ticket.work_s)
            for line in self._lines.values():
                line[0].set()

    async def _comes_first(self, tenant: str, priority: int) -> bool:
        """Wait in the tenant's line; return whether the tenant may have one more place now."""
        line, look = self._lines.setdefault(tenant, []), _QueuedRequest(priority)
        bisect.insort(line, look, key=lambda each: each.priority)
        began = self._clock()
        wait_s = self._wait_s * random.uniform(0.5, 1.0)
        try:
            while line[0] is not look or not self._admits(tenant):
                left_s = wait_s - (self._clock() - began)
                num_before = self.shares.num_held(tenant) + line.index(look)
                is_owed = (
                    self._work.is_below(tenant)
                    or not self.shares.num_held(tenant)
                    or self._num_here(tenant) < max(map(self._num_here, self._lines))
                )
                is_alone = len(self._lines) == 1 and num_before < self.shares.most(tenant)
                is_patient = (is_owed or is_alone) and left_s > wait_s - _PATIENT_S
                if left_s <= 0 and not is_patient:
                    return False
                look.clear()
                looks_on = line[0] is look or left_s <= 0
                await _set_within(look, _LOOK_S if looks_on else max(left_s, _LOOK_S))
        finally:
            line.remove(look)
            if line:
                line[0].set()
            else:
                del self._lines[tenant]
        return True

    def _num_here(self, tenant: str) -> int:
        """Return the requests of a tenant that hold a place or wait for one."""
        return self.shares.num_held(tenant) + len(self._lines.get(tenant, ()))

    def _admits(self, tenant: str) -> bool:
        """Return whether the tenant may have one more place now, by its share and by its work."""
        # Where a share is not even one place, tenants take turns at it by what they have had.
        takes_turns = not self.shares.share(tenant) and not self._work.is_above(tenant)
        return self.shares.admits(tenant, int(takes_turns or self._work.is_below(tenant)))

    @property
    def _num_free(self) -> int:
        num_waiting = sum(map(len, self._lines.values())) + self._num_read.total()
        return self._max_requests - self._num_held - num_waiting

    def _check_free(self) -> None:
        if self._num_free <= 0:
            raise Overloaded("The server is busy.", self.next_place_s())

    def _refusal(self, tenant: str) -> TooManyRequests:
        num_own = self.shares.num_held(tenant)
        return TooManyRequests(
            f"You have {num_own} requests in progress, which is the most that one tenant may have "
            "now: wait for one of them.",
            self._next_place_s(tenant, num_own),
        )

    def next_place_s(self) -> float | None:
        """Return in how many seconds a place becomes free that nobody was told of yet.

        None is returned while no place is held.
        """
        return self._next_place_s(_ANYBODY, None)

    def _next_place_s(self, who: str, num_own: int | None) -> float | None:
        now = self._clock()
        told = self._told.setdefault(who, deque())
        while told and told[0].due <= now - _LATEST_S:
            told.popleft()
        if told and told[0].at <= now - _SOONEST_S:
            told.popleft()  # this is its caller, or somebody in its place
        num_before = len(self._lines.get(who, ())) + sum(each.due > now for each in told)
        wait_s = self._turnover.seconds_until(num_before + 1, share=num_own)
        if wait_s is None:
            return None
        wait_s = min(wait_s, _LONGEST_WAIT_S)
        told.append(_RefusalNote(now, max(now + wait_s, told[-1].due if told else 0.0)))
        return wait_s


async def _set_within(event: asyncio.Event, seconds: float) -> None:
    """Wait until an event is set, or for so many seconds."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        pass

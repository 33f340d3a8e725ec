"""The shares of tenants in what the server can answer at once, over all replicas of the ingress.

The places at which the target's pool is not yet crowded are shared by max-min fairness: a tenant
has what it wants, or as much as any other that wants more, times its weight. Who asks alone has all
of them, and no more, so that a newcomer finds no crowd in front of it. What counts is what tenants
wanted in the last seconds, so that a place that one leaves for a moment is still there when it asks
again.

A tenant below its share gains credit, which lets it go beyond for a while: so far that its credit
would last for a second. So a burst of questions is answered, and a crowd that arrives is not.

A share is a whole number of places, and none where there are more tenants than places, or heavier
ones. Who knows what work the tenants have had says which of them may have a place more
(`deployments.api.gate.admission`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from rapid.ports import Clock

_WANTED_FOR_S = 2.5  # twice as long at most: peaks are kept for this period and the last one
_CREDIT_S = 4.0  # that a whole unused share is saved for
_LOAN_S = 1.0  # for which credit must suffice for each place beyond the share

Use = dict[str, tuple[int, int]]
"""Requests in progress at a replica, and the most that were wanted of late at all, by tenant."""


@dataclass
class _Tenant:
    """A tenant's requests at this replica, its recent peaks, and its credit, in place-seconds.

    A peak is what the tenant had at all replicas, and one more, when it asked at this one.
    """

    num_held: int = 0
    period: int = 0
    peak: int = 0
    last_peak: int = 0
    credit: float = 0.0
    settled_at: float = 0.0


class Shares:
    """The requests in progress by tenant, here and at the other replicas, and their bounds."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        """Create no bounds; `configure` gives them."""
        self._clock = clock
        self._tenants: dict[str, _Tenant] = {}
        self._elsewhere: Mapping[str, tuple[int, int]] = {}
        self._most = 0
        self._shared: int | None = None
        self._weights: Mapping[str, int] = {}
        self._most_of: Mapping[str, int] = {}

    def configure(
        self,
        most: int,
        shared: int | None,
        weights: Mapping[str, int] | None = None,
        most_of: Mapping[str, int] | None = None,
    ) -> None:
        """Set the bounds; who holds more keeps it.

        Args:
            most: Most requests of one tenant, even with credit.
            shared: Requests that tenants share; None if there is one tenant only.
            weights: How many shares of one tenant another has; who is not named has one.
            most_of: Most requests of the tenants that have another bound than `most`.
        """
        self._most, self._shared, self._weights = most, shared, weights or {}
        self._most_of = most_of or {}

    @property
    def are_shared(self) -> bool:
        """Whether places are shared, because the server has keys of several tenants."""
        return self._shared is not None

    def num_held(self, tenant: str) -> int:
        """Return the tenant's requests in progress at all replicas."""
        known = self._tenants.get(tenant)
        return (known.num_held if known else 0) + self._elsewhere.get(tenant, (0, 0))[0]

    def admits(self, tenant: str, num_extra: int = 0) -> bool:
        """Return whether the tenant may have one more request in progress; note that it asks.

        It may have `num_extra` places beyond its share.
        """
        known = self._settle(tenant)
        num_held = self.num_held(tenant)
        known.peak = max(known.peak, num_held + 1)
        if num_held >= self.most(tenant):
            return False
        num_beyond = num_held + 1 - self.share(tenant) - num_extra
        return num_beyond * _LOAN_S <= known.credit

    def most(self, tenant: str) -> int:
        """Return the most requests of the tenant, whatever others want."""
        return self._most_of.get(tenant, self._most)

    def share(self, tenant: str) -> int:
        """Return how many requests the tenant may have in progress for good; it may be none."""
        others = {each: self._demand(each) for each in self._names() if each != tenant}
        if self._shared is None:
            return self.most(tenant)
        weighed = [(wanted, self.weight(each)) for each, wanted in others.items()]
        own = fair_share(self._shared, weighed, self.weight(tenant))
        return min(self.most(tenant), own)

    def weight(self, tenant: str) -> int:
        """Return how many shares of one tenant this one has."""
        return self._weights.get(tenant, 1)

    @contextmanager
    def hold(self, tenant: str) -> Iterator[None]:
        """Count one request of the tenant for the duration of the context."""
        known = self._settle(tenant)
        known.num_held += 1
        known.peak = max(known.peak, self.num_held(tenant))
        try:
            yield
        finally:
            self._settle(tenant).num_held -= 1

    def use(self) -> Use:
        """Return what the tenants have at this replica and what they want, for the others."""
        found = {
            name: (known.num_held, self._demand_here(known))
            for name, known in self._tenants.items()
        }
        return {name: each for name, each in found.items() if any(each)}

    def learn(self, elsewhere: Mapping[str, tuple[int, int]]) -> None:
        """Take what the tenants have at the other replicas, in sum, and the most they want."""
        self._elsewhere = elsewhere

    def _names(self) -> set[str]:
        return self._tenants.keys() | self._elsewhere.keys()

    def _demand(self, tenant: str) -> int:
        known = self._tenants.get(tenant)
        here = self._demand_here(known) if known else 0
        return max(here, self._elsewhere.get(tenant, (0, 0))[1], self.num_held(tenant))

    def _demand_here(self, known: _Tenant) -> int:
        age = int(self._clock() / _WANTED_FOR_S) - known.period
        peaks = (known.peak, known.last_peak)[: max(0, 2 - age)]
        return max(known.num_held, *peaks, 0)

    def _settle(self, tenant: str) -> _Tenant:
        """Return a tenant whose credit and peaks have been brought to the present."""
        now = self._clock()
        known = self._tenants.get(tenant)
        if known is None:
            known = self._tenants[tenant] = _Tenant(settled_at=now)
        share = self.share(tenant)
        gained = (share - self.num_held(tenant)) * (now - known.settled_at)
        known.credit = min(max(0.0, known.credit + gained), _CREDIT_S * share)
        known.settled_at = now
        period = int(now / _WANTED_FOR_S)
        if period != known.period:
            is_next = period == known.period + 1
            known.last_peak = max(known.num_held, known.peak if is_next else 0)
            known.peak, known.period = known.num_held, period
        return known


def fair_share(places: int, others: Iterable[tuple[int, int]], weight: int = 1) -> int:
    """Return how many whole places max-min fairness gives to one that wants everything.

    Args:
        places: What is shared.
        others: What each of the others wants, and its weight.
        weight: The weight of the one.
    """
    wanted = sorted((each for each in others if each[0]), key=lambda each: each[0] / each[1])
    weight_left = weight + sum(each for _, each in wanted)
    for each, own in wanted:
        if each * weight_left > places * own:
            break
        places -= each
        weight_left -= own
    return places * weight // weight_left

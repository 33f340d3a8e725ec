"""Who is next where several tenants want work done: who has had the least of it, by weight.

Each tenant has a **level**: the work that it was charged, divided by its weight. Who comes first is
the one with the lowest. A tenant that comes back after a pause begins at the lowest level of those
that are there, less a credit where the queue gives one: so a short question after a pause comes
before the work of a crowd. What was done while nobody else was there counts against nobody, except
that who comes back at once has no credit.

Levels are the virtual time of start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996), and
the counters of Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024, algorithm 2.
Here they count seconds that were measured instead of tokens. The credit is the warp of Duda and
Cheriton's borrowed virtual time (SOSP 1999), which pauses earn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping


class WorkShares:
    """The levels of the tenants of one queue, in any unit of work; it has no clock."""

    def __init__(self, most_credit: float = 0.0) -> None:
        """Know no tenant. After a pause one has credit for as much work, times its weight."""
        self._most_credit = most_credit
        self._levels: dict[str, float] = {}
        self._present = Counter[str]()
        self._weights: dict[str, float] = {}
        self._lowest = 0.0  # level of those present; it never falls

    def enter(self, tenant: str, weight: float = 1.0) -> None:
        """Count a tenant as present, once more; `leave` takes it back."""
        self._raise_lowest()
        self._levels[tenant] = self.level(tenant)
        self._weights[tenant] = weight
        self._present[tenant] += 1

    def leave(self, tenant: str) -> None:
        """Count a tenant as present once less; without anybody left, all are even."""
        self._raise_lowest()
        self._present[tenant] -= 1
        if self._present[tenant]:
            return
        del self._present[tenant]
        if not self._present:
            self._lowest = max(self._levels.values())
        # Of who has left stays only what it has had more than those present.
        self._levels = {
            name: level
            for name, level in self._levels.items()
            if name in self._present or level > self._lowest - self._most_credit
        }
        self._weights = {name: self._weights[name] for name in self._levels}

    def charge(self, tenant: str, work: float) -> None:
        """Charge work to a tenant, present or not, by the weight that it last came with."""
        if self._present:
            weight = self._weights.setdefault(tenant, 1.0)
            self._levels[tenant] = self.level(tenant) + work / weight

    def level(self, tenant: str) -> float:
        """Return the level of a tenant; the lowest is next."""
        least = self._lowest - self._most_credit
        return max(self._levels.get(tenant, least), least)

    def credit(self, tenant: str) -> float:
        """Return the work that a tenant may have before others that are present; 0 if none is."""
        if not self._present.keys() - {tenant}:
            return 0.0
        return max(self._lowest - self.level(tenant), 0.0) * self._weights.get(tenant, 1.0)

    def is_below(self, tenant: str) -> bool:
        """Return whether a tenant has had less than its share of the work of those present."""
        return self._lead(tenant) < 0.0

    def is_above(self, tenant: str) -> bool:
        """Return whether a tenant has had more than its share of the work of those present."""
        return self._lead(tenant) > 0.0

    def _lead(self, tenant: str) -> float:
        """Return how far the tenant's level is above the mean of those present, by weight."""
        self._raise_lowest()
        weights = {name: self._weights[name] for name in self._present}
        # From the lowest level on, as sums of equal levels would be rounded to unequal ones.
        above = {name: self.level(name) - self._lowest for name in weights}
        mean = sum(weights[name] * above[name] for name in weights) / (sum(weights.values()) or 1.0)
        return self.level(tenant) - self._lowest - mean

    def divide(self, work: float, tenants: Collection[str]) -> Mapping[str, float]:
        """Return how much of some work each tenant gets, the lowest first.

        Those that get any have the same level afterwards, and no other one has a lower level.
        """
        found: dict[str, float] = {}
        order = sorted(tenants, key=self.level)
        weight = reached = 0.0
        for place, tenant in enumerate(order):
            own = self._weights.get(tenant, 1.0)
            reached += own * self.level(tenant)
            weight += own
            common = (work + reached) / weight
            if place + 1 == len(order) or common <= self.level(order[place + 1]):
                break
        for tenant in order:
            missing = self._weights.get(tenant, 1.0) * (common - self.level(tenant))
            found[tenant] = max(missing, 0.0)
        return found

    def _raise_lowest(self) -> None:
        levels = [self._levels[name] for name in self._present]
        self._lowest = max(self._lowest, min(levels, default=0.0))

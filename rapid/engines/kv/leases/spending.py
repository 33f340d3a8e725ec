"""What leases use of an engine: its seconds, told once, and charged to their tenants.

What is used after a lease has told, or of one that ended untold, is told with a later lease of its
tenant. So over all leases of a tenant nothing is left out, and nothing is told twice.
"""

from __future__ import annotations

from rapid.engine_status import LeaseUsage
from rapid.engines.kv.leases.lease import Lease
from rapid.ports import Clock
from rapid.work_shares import WorkShares

_CREDIT_S = 0.25  # of the engine, after a pause: a gap in others' answers that a reader hardly sees


class Spending:
    """The usage of an engine's leases; the engine guards it.

    Attributes:
        shares: Whose turn it is. A lease counts with its part of the steps, in seconds, and with
            the seconds for which it holds its part of all pages.
    """

    def __init__(self, clock: Clock, num_pages: int, page_bytes: int) -> None:
        """Charge nothing yet.

        Args:
            clock: Monotonic seconds.
            num_pages: Pages of the pool.
            page_bytes: Bytes of each.
        """
        self.shares = WorkShares(_CREDIT_S)
        self._clock = clock
        self._num_pages, self._page_bytes = num_pages, page_bytes
        self._untold: dict[str, LeaseUsage] = {}  # of ended leases, by tenant

    def charge(self, lease: Lease, busy_s: float) -> None:
        """Charge seconds of a step, which may have ended after the lease."""
        tenant = lease.request.terms.tenant
        self.shares.charge(tenant, busy_s)
        if lease.is_over:
            self._untold[tenant] = self._untold.get(tenant, LeaseUsage()) + LeaseUsage(busy_s)
        else:
            lease.used += LeaseUsage(busy_s)

    def settle(self, lease: Lease) -> LeaseUsage:
        """Return what a lease used since it last told, with what its tenant has untold."""
        self._book_pages(lease)
        used, lease.used = lease.used, LeaseUsage()
        return used + self._untold.pop(lease.request.terms.tenant, LeaseUsage())

    def end(self, lease: Lease) -> None:
        """Keep what a lease that ends has not told."""
        lease.used = self.settle(lease)
        lease.is_over = True
        if lease.used != LeaseUsage():
            self._untold[lease.request.terms.tenant] = lease.used

    def _book_pages(self, lease: Lease) -> None:
        now = self._clock()
        page_s = lease.num_pages * (now - lease.booked_at)
        lease.booked_at = now
        lease.used += LeaseUsage(kv_byte_s=page_s * self._page_bytes)
        self.shares.charge(lease.request.terms.tenant, page_s / self._num_pages)

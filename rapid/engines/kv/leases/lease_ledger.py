"""Leases on an engine's pages, with their time-to-live and the queue for them.

A lease gets all pages that its choices can ever need at once, so nothing is preempted. Among
tenants, the one is next that has had the least work of the engine, by weight (`Spending`), with
what its open leases hold. A first lease opens only if there is also room for its own **companion**,
the second lease of a request that drafts for itself, and for all companions still expected.

What does not fit lets leases pass that do, at most `MOST_OVERTAKEN` of them. Then it comes first,
and until it fits no tenant opens a lease that holds as many pages as its own: none waits for ever.

An eighth of the places is kept for tenants that asked of late and hold none. So who asks now and
then need not wait until an answer of a tenant that always asks has ended.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np

from rapid.constraints.request_shaping import open_shaping
from rapid.constraints.shaping import Shaping
from rapid.engine_status import EngineStatus, LeaseUsage
from rapid.engines.kv.cache import PagePool, PageTable, as_runs, pages_of
from rapid.engines.kv.leases.lease import Lease
from rapid.engines.kv.leases.lease_limits import LeaseLimits
from rapid.engines.kv.leases.lines import Lines, Waiter
from rapid.engines.kv.leases.spending import Spending
from rapid.engines.kv.page_names import page_names
from rapid.engines.kv.prefix_cache import PrefixCache
from rapid.engines.kv.rings import Ring, RingPool
from rapid.engines.kv.sequences import Sequence
from rapid.engines.kv.tiers.disk_tier import DiskTier
from rapid.engines.kv.tiers.host_tier import HostTier
from rapid.errors import EngineFailed, LeaseNotFound, OutOfStep
from rapid.messages import LeaseRequest
from rapid.ports import Clock


@dataclass
class LeaseLedger:
    """Open leases, and the queue of those that wait for pages or for one of `max_leases` places.

    The ledger is not thread-safe: its methods are called with the engine's lock held.
    """

    pool: PagePool
    page_tokens: int
    max_leases: int  # number of leases that may be open at once
    max_context: int  # longest prompt plus answer of one sequence, in tokens
    ttl_s: float  # seconds after which an unused lease expires
    clock: Clock  # monotonic clock in seconds
    host: HostTier | None = None  # second tier of the prefix cache, in host memory, if any
    disk: DiskTier | None = None  # third tier, below `host`, if any
    # The rings of layers with a sliding window, one for each choice of a lease; None where all
    # layers have pages.
    rings: RingPool | None = None
    eos_ids: Collection[int] = ()  # tokens that end an answer
    open_grammar: Callable[[str], Shaping] | None = None  # where answers can follow grammars
    page_bytes: int = 0
    prefixes: PrefixCache = field(init=False)
    spending: Spending = field(init=False)
    _open: dict[str, Lease] = field(default_factory=dict)
    _lines: Lines = field(init=False)
    _limits: LeaseLimits = field(init=False)

    def __post_init__(self) -> None:
        self.prefixes = PrefixCache(self.pool, self.host, self.disk, self.clock)
        self.spending = Spending(self.clock, self.pool.num_pages, self.page_bytes)
        num_rings = None if self.rings is None else self.rings.plan.num_rings
        sizes = self.pool.num_pages, self.page_tokens, self.max_leases, self.max_context
        self._limits = LeaseLimits(*sizes, num_rings)
        self._lines = Lines(self.spending.shares)
        # The tenants that asked of late, counted in requests: so that a turn depends on no clock.
        self._asked: deque[str] = deque(maxlen=16 * self.max_leases)

    def prepare(
        self, request: LeaseRequest, on_open: Callable[[Lease | Exception], None]
    ) -> Waiter:
        """Return a waiter for a request, with its prompt's pages named; it needs no lock.

        Raises:
            BadRequest: The engine cannot follow the request's grammar.
        """
        tenant, salt = request.terms.tenant, request.terms.cache_salt
        owner = f"{tenant}\0{salt}" if salt else tenant
        is_apart = bool(request.passages)
        names = page_names(request.prompt_ids, self.page_tokens, owner, is_apart=is_apart)
        sampling = request.terms.sampling
        shapings = [
            open_shaping(sampling, self.eos_ids, self.open_grammar, request.terms.prompt_set)
            for _ in range(request.terms.num_choices)
        ]
        return Waiter(request, on_open, names, shapings)

    def submit(self, waiter: Waiter) -> None:
        """Open a lease now, or as soon as those before it have opened and there is room.

        Raises:
            BadRequest: The request is malformed.
            PromptTooLong: The request can never fit.
            OutOfStep: The lease id is taken.
            LeaseNotFound: The lease named by `request.beside` is not open.
        """
        lease_id, beside = waiter.request.lease_id, waiter.request.beside
        if lease_id in self._open or any(w.request.lease_id == lease_id for w in self._lines):
            raise OutOfStep(f"lease {lease_id!r} is open already")
        first = None if beside is None else self.get(beside)
        self._limits.check(waiter.request, None if first is None else first.request)
        if first is not None:
            self._limits.check_companion(waiter, first)
        self._asked.append(waiter.request.terms.tenant)
        self._lines.join(waiter)
        self.admit()

    def withdraw(self, waiter: Waiter) -> bool:
        """Remove a waiter from its line, which keeps its turn; False if it is not waiting."""
        if waiter not in self._lines:
            return False
        self._lines.leave(waiter)
        self.admit()
        return True

    def forgo_companion(self, lease_id: str) -> None:
        """Give back the room kept for a companion of this lease. No-op if it is not open."""
        lease = self._open.get(lease_id)
        if lease is not None and lease.expects_companion:
            lease.expects_companion = False
            self.admit()

    def admit(self) -> None:
        """Open leases, in the order that the module describes, for as long as one fits."""
        while (waiter := self._next()) is not None:
            try:
                lease = self._reserve(waiter)
            except Exception as error:  # its own: those behind it, and who called, are not at fault
                self._lines.leave(waiter)
                waiter.on_open(error)
                continue
            self._lines.serve(waiter)
            self._open[lease.lease_id] = lease
            first = self._open.get(waiter.request.beside or "")
            if first is not None:
                first.expects_companion = waiter.request.companion_tokens > 0
            waiter.on_open(lease)

    def get(self, lease_id: str) -> Lease:
        """Return the open lease of this id.

        Raises:
            LeaseNotFound: The lease was released, has expired or never existed.
        """
        lease = self._open.get(lease_id)
        if lease is None:
            raise LeaseNotFound(f"no lease {lease_id!r} on this engine: take a new one")
        return lease

    def is_open(self, lease: Lease) -> bool:
        """Return whether this lease, and not a later one with the same id, is open."""
        return self._open.get(lease.lease_id) is lease

    def awaits_copies(self, lease: Lease) -> bool:
        """Return whether pages that a lease will write are being copied between the tiers."""
        return self.prefixes.awaits_copies(itertools.chain.from_iterable(lease.runs))

    def touch(self, lease: Lease) -> None:
        """Restart the time-to-live of a lease."""
        lease.last_used = self.clock()

    def release(self, lease_id: str) -> Lease | None:
        """Free a lease's pages, open waiting leases and return it; None if it is not open."""
        lease = self._open.pop(lease_id, None)
        if lease is not None:
            self.spending.end(lease)
            for runs in lease.runs:
                self.prefixes.free(runs)
            for ring in lease.rings:
                assert self.rings is not None
                self.rings.free(ring)
            self.admit()
        return lease

    def settle(self, lease_id: str) -> LeaseUsage:
        """Return what a lease used since it was last asked; see `Spending.settle`.

        Raises:
            LeaseNotFound: As for `get`.
        """
        return self.spending.settle(self.get(lease_id))

    def leases(self) -> list[Lease]:
        """Return all open leases."""
        return list(self._open.values())

    def close(self) -> None:
        """Refuse all waiting requests."""
        for waiter in list(self._lines):
            waiter.on_open(EngineFailed("the engine is closed"))
        self._lines = Lines(self.spending.shares)

    def find_expired(self) -> list[Lease]:
        """Return the leases that are idle and unrenewed for longer than the time-to-live."""
        now = self.clock()
        return [
            lease
            for lease in self._open.values()
            if lease.expires and not lease.busy and now - lease.last_used > self.ttl_s
        ]

    def take_stale(self) -> list[tuple[int, int]]:
        """Return slots of pages that leases hold and only earlier holders have written."""
        size, valid = self.page_tokens, self.prefixes.count_valid(self.page_tokens)
        is_held = np.zeros(self.pool.num_pages, dtype=bool)
        for lease in self._open.values():
            for runs, sequence in zip(lease.runs, lease.sequences, strict=True):
                pages = pages_of(runs, self.pool.num_pages)
                written = sequence.num_computed - size * np.arange(len(pages))
                valid[pages] = np.maximum(valid[pages], written.clip(0, size))
                is_held[pages] = True
        stale = np.flatnonzero(self.pool.is_stale & is_held & (valid < size)).tolist()
        self.pool.is_stale[stale] = False
        for page in stale:
            self.prefixes.tags[page] = None
        return [(page * size + int(valid[page]), (page + 1) * size) for page in stale]

    def take_stale_rings(self) -> list[tuple[int, int]]:
        """Return slots of rings that are free or in use and only earlier holders have written."""
        if self.rings is None:
            return []
        held = [ring for lease in self._open.values() for ring in lease.rings]
        return [*self.rings.take_dirty(), *self.rings.take_stale(held)]

    def has_readers(self, documents: Collection[str]) -> bool:
        """Return whether leases, open or waiting, are of requests with any of some documents."""
        requests = [each.request for each in (*self._open.values(), *self._lines)]
        wanted = set(documents)
        return any(not wanted.isdisjoint(each.terms.documents) for each in requests)

    def status(self) -> EngineStatus:
        """Return the counts of leases, pages and what waits."""
        kept = [each.request for each in self._open.values() if each.expects_companion]
        waiting = [waiter.request for waiter in self._lines]
        documents = {each.affinity or each.lease_id: len(each.prompt_ids) for each in waiting}
        return EngineStatus(
            leases_open=len(self._open),
            max_leases=self.max_leases,
            kv_pages_in_use=self.pool.num_in_use - self.prefixes.num_idle,
            kv_pages_total=self.pool.num_pages,
            page_tokens=self.page_tokens,
            max_context=self.max_context,
            leases_kept=len(kept),
            kv_pages_kept=sum(self._limits.num_pages(each, each.companion_tokens) for each in kept),
            leases_waiting=len(waiting),
            tokens_waiting=self.prefixes.num_unread * self.page_tokens + sum(documents.values()),
        )

    def check_integrity(self) -> None:
        """Raise AssertionError unless pages add up and no lease waits though it fits."""
        self.prefixes.check_integrity(runs for lease in self._open.values() for runs in lease.runs)
        if self.rings is not None:
            self.rings.check_integrity(r for each in self._open.values() for r in each.rings)
        if len(self._open) > self.max_leases:
            raise AssertionError("lease ledger: more leases open than allowed")
        self._lines.check_integrity()
        if (waiter := self._next()) is not None:
            raise AssertionError(f"lease ledger: {waiter.request.lease_id!r} waits though it fits")

    def _next(self) -> Waiter | None:
        """Return the waiter that can open now: a companion, else the first that fits, or None."""
        companion = self._lines.companion()
        if companion is not None:
            return companion if self._fits(companion) else None
        heads = self._lines.heads()
        held = {head: self._num_held(head.request.terms.tenant) for head in heads}

        def order(head: Waiter) -> tuple[bool, float]:
            # What a tenant holds now counts as if it held it for a second more.
            level = self.spending.shares.level(head.request.terms.tenant)
            later = level + held[head] / self.pool.num_pages
            return not head.is_due, head.number if head.is_due else later

        heads.sort(key=order)
        least_kept_back = self.pool.num_pages + 1
        for head in heads:
            if held[head] < least_kept_back:
                if self._fits(head):
                    return head
                if head.is_due:
                    least_kept_back = held[head]
        return None

    def _num_held(self, tenant: str) -> int:
        """Return the number of pages that a tenant's open leases hold, shared ones counted once."""
        is_held = np.zeros(self.pool.num_pages, dtype=bool)
        for lease in self._open.values():
            if lease.request.terms.tenant == tenant:
                for run in itertools.chain.from_iterable(lease.runs):
                    is_held[run.start : run.stop] = True
        return int(is_held.sum())

    def _fits(self, waiter: Waiter) -> bool:
        """Return whether a lease fits, beside the room kept for expected companions."""
        request = waiter.request
        num_leases, num_kept, num_choices = 1, 0, request.terms.num_choices
        if request.beside is None and self._open:  # an empty engine opens any lease that can fit
            kept = [each.request for each in self._open.values() if each.expects_companion]
            for each in (request, *kept):
                if each.companion_tokens:
                    num_leases += 1
                    num_choices += each.terms.num_choices
                    num_kept += self._limits.num_pages(each, each.companion_tokens)
            num_leases += self._num_kept_from(request.terms.tenant)
        is_place_left = len(self._open) + num_leases <= self.max_leases
        if self.rings is not None and num_choices > self.rings.num_free:
            return False
        num_pages = self._limits.num_pages(request, len(request.prompt_ids))
        return is_place_left and self.prefixes.fits(waiter.page_names, num_pages, num_kept)

    def _num_kept_from(self, tenant: str) -> int:
        """Return the places that a tenant leaves to others, which asked of late and hold none."""
        holders = {each.request.terms.tenant for each in self._open.values()}
        has_others = not {tenant, *holders}.issuperset(self._asked)
        return self.max_leases // 8 if tenant in holders and has_others else 0

    def _reserve(self, waiter: Waiter) -> Lease:
        """Return a lease with all it can ever need; where that fails, nothing stays taken."""
        with ExitStack() as undoing:
            lease = self._reserve_for(waiter, undoing)
            undoing.pop_all()
        return lease

    def _reserve_for(self, waiter: Waiter, undoing: ExitStack) -> Lease:
        request, terms = waiter.request, waiter.request.terms
        num_prompt = len(request.prompt_ids)
        capacity = self._limits.capacity(request, num_prompt)
        num_pages = -(-capacity // self.page_tokens)
        num_shared = self._limits.num_shared(request, num_prompt)
        first = self.prefixes.take(waiter.page_names, num_pages, terms.tenant, terms.documents)
        undoing.callback(self.prefixes.free, first)
        held = [first]
        shared = as_runs(pages_of(first, num_shared))
        for _ in range(terms.num_choices - 1):
            own = self.prefixes.take((), num_pages - num_shared, terms.tenant)
            self.pool.share(shared)
            held.append((*shared, *own))
            undoing.callback(self.prefixes.free, held[-1])
        rings: list[Ring | None] = [None] * len(held)
        if self.rings is not None:
            for index in range(len(held)):
                rings[index] = ring = self.rings.take()
                undoing.callback(self.rings.free, ring)
        committed = request.committed or ((),) * terms.num_choices
        log_odds = request.log_odds or (0.0,) * terms.num_choices
        names = [f"{terms.answer_id}/{choice}" for choice in range(terms.num_choices)]
        shapings = waiter.shapings or (None,) * terms.num_choices
        sequences = [
            Sequence(
                request.prompt_ids,
                ids,
                PageTable(runs, self.page_tokens),
                capacity,
                odds,
                ring,
                name,
                shaping,
            )
            for runs, ids, odds, ring, name, shaping in zip(
                held, committed, log_odds, rings, names, shapings, strict=True
            )
        ]
        prompt_pages = pages_of(first, len(waiter.page_names))
        return Lease(
            request,
            sequences,
            held,
            prompt_pages,
            waiter.page_names,
            now := self.clock(),
            booked_at=now,
            num_shared=num_shared,
            expects_companion=request.companion_tokens > 0 and request.beside is None,
        )

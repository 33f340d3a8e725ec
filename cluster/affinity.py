"""The Serve request router of the pools, a thin layer over `cluster.routing`.

Every process that has a handle of a pool has a router, which callers find by `find_router`. Serve
is given `cluster.copied_router`.
"""

from __future__ import annotations

import time
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

from ray.serve.request_router import PendingRequest, ReplicaID, RunningReplica

from cluster.circuit_breaker import CIRCUITS
from cluster.reports import REPORTS_STALE_S, EngineReport, document_name
from cluster.routing import Candidate, Need, has_room, rank_candidates, seems_free
from cluster.serve_internals import PoolRequestRouter
from rapid.messages import GenerateRequest, LeaseRequest

_SINGLES = 3  # replicas that are tried one by one before all others together
_NEW_S = 2.0  # until Serve has told a router of the replicas that run
_MOST_SENT = 4096  # requests of which a router remembers where they are
_TRANSIT_S = 0.5  # from an assignment to the engine's count of it
_TAKEN_S = 3.0  # in which a replica says that it has taken what it was sent
_TAKEN_AGAIN_S = 1.0  # the same for a replica that has just failed

Call = LeaseRequest | GenerateRequest | str
"""The first argument of a call of a pool: a request, which has a unique id, or a unique id."""


@dataclass(frozen=True, slots=True)
class _Sent:
    """A request: the replica it was sent to, since when, and whether that has taken it."""

    name: str
    replica: str
    since: float
    is_taken: bool


class AffinityRouter(PoolRequestRouter):
    """A Serve request router that sends leases where their document is and there is room."""

    def initialize_state(
        self, *, target_ongoing_requests: float, first_token_goal_s: float, **_: Any
    ) -> None:
        """Store the router's configuration, which Serve passes; see `routing.rank_candidates`."""
        self._target_ongoing_requests = target_ongoing_requests
        self._first_token_goal_s = first_token_goal_s
        self._assigned: dict[str, tuple[str, Need, float]] = {}  # by the request's id
        self._sent: dict[str, _Sent] = {}  # by the request's id, the oldest first
        self._reported: dict[str, tuple[float | None, float]] = {}  # last report, since when known
        self._clock = time.monotonic
        self._created = self._clock()
        self._empty_since: float | None = self._created
        add_router(self.pool, self)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take the replicas that run, which Serve passes whenever they change."""
        super().update_replicas(replicas)
        if replicas:
            self._empty_since = None

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return groups of replicas to try, in order of preference."""
        need = _need_of(pending_request)
        candidate_replicas = CIRCUITS.spare(self._moving(candidate_replicas))
        by_id = {each.replica_id.unique_id: each for each in candidate_replicas}
        candidates = self._candidates(candidate_replicas)
        order = rank_candidates(
            need,
            candidates,
            target_ongoing=self._target_ongoing_requests,
            first_token_goal_s=self._first_token_goal_s,
        )
        if pending_request is not None and order:  # until it is known who took it
            self._assign(pending_request, order[0], need)
            first = next(each for each in candidates if each.replica == order[0])
            may_take = _may_take(by_id[order[0]], first)
            self._note(pending_request, order[0], is_taken=False, may_take=may_take)
        replicas = [by_id[replica] for replica in order]
        rest = replicas[_SINGLES:]
        return [[each] for each in replicas[:_SINGLES]] + ([rest] if rest else [])

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """Note which replica took a request."""
        self._assign(pending_request, replica_id.unique_id, _need_of(pending_request))
        self._note(pending_request, replica_id.unique_id, is_taken=True)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Forget a request that has ended or was not taken."""
        self._assigned.pop(internal_request_id, None)
        self._sent.pop(internal_request_id, None)

    def can_move(self, request: Call) -> bool:
        """Return whether a request would begin at once elsewhere, but not where it was sent.

        There it waits in an engine's queue, or the replica reports no more, or has not said for
        three seconds that it has taken the request, though it has room. Any thread may call this.
        """
        sent = self._find(request)
        if sent is None:
            return False
        moving = self._moving(self.running)
        candidates = {each.replica: each for each in self._candidates(self.running)}
        here = candidates.pop(sent.replica, None)
        is_silent = self._is_untaken(sent, _TAKEN_S)
        if here is not None:
            running = {each.replica_id.unique_id: each for each in self.running}
            is_silent = is_silent and _may_take(running[sent.replica], here)
            waits = sent.is_taken and here.report is not None and here.report.leases_waiting > 0
            is_moving = any(each.replica_id.unique_id == sent.replica for each in moving)
            if is_moving and not waits and not is_silent:
                return False
        # beside a silent one any that answers is good
        good = moving if is_silent else CIRCUITS.spare(moving)
        names = {each.replica_id.unique_id for each in good}
        others = [each for each in candidates.values() if each.replica in names]
        target = self._target_ongoing_requests
        if isinstance(request, LeaseRequest):
            need = Need.of(request)
            begins = any(has_room(need, each, target) for each in others)
        else:
            is_left = here is None and not sent.is_taken
            begins = (is_silent or is_left) and any(seems_free(each, target) for each in others)
        # The network to it may be cut for this process, while Serve's controller reaches both.
        if begins and is_silent:
            CIRCUITS.put(sent.replica)
        return begins

    def is_stranded(self, request: Call) -> bool:
        """Return whether no replica takes a request: none runs, or all have failed or are silent.

        A replica that has no room is neither. Any thread may call this.
        """
        running = {each.replica_id.unique_id: each for each in self.running}
        if not running:
            return (self.empty_s or 0.0) > _TAKEN_S
        sent = self._find(request)
        if sent is None or sent.replica not in running:
            return False
        here = running[sent.replica]
        limit_s = _TAKEN_AGAIN_S if CIRCUITS.is_open(sent.replica) else _TAKEN_S
        (known,) = self._candidates([here])
        if not self._is_untaken(sent, limit_s) or not _may_take(here, known):
            return False
        CIRCUITS.put(sent.replica)  # so that the next call does not wait for it as long
        return all(map(CIRCUITS.is_open, running))

    def _is_untaken(self, sent: _Sent, limit_s: float) -> bool:
        return not sent.is_taken and self._clock() - sent.since > limit_s

    def replica_of(self, request: Call) -> str | None:
        """Return the unique id of the replica that has taken a request; None if none has."""
        sent = self._find(request)
        return sent.replica if sent is not None and sent.is_taken else None

    def forget(self, request: Call) -> None:
        """Forget a request that its caller has given up, which Serve may never complete."""
        for request_id, sent in [*self._sent.items()]:
            if sent.name == _name_of(request):
                self._sent.pop(request_id, None)

    def _find(self, request: Call) -> _Sent | None:
        name, sent = _name_of(request), [*self._sent.values()]
        # The newest, as a request that was given up may have been sent again.
        return next((each for each in reversed(sent) if each.name == name), None)

    @property
    def is_empty(self) -> bool:
        """Whether the pool has no running replica; a router that is new does not know yet."""
        is_new = self._clock() - self._created < _NEW_S
        return not self.running and not is_new

    @property
    def empty_s(self) -> float | None:
        """Seconds that the pool has had no running replica for; None while it has one."""
        if self.running:
            return None
        if self._empty_since is None:  # its last replica has died since Serve named those that run
            self._empty_since = self._clock()
        return self._clock() - self._empty_since

    def _assign(self, request: PendingRequest, replica: str, need: Need) -> None:
        self._assigned[request.metadata.internal_request_id] = (replica, need, time.time())

    def _note(
        self, request: PendingRequest, replica: str, *, is_taken: bool, may_take: bool = True
    ) -> None:
        """Remember where a request was sent; while it may not be taken, the time does not run."""
        name = _name_of(*request.args)
        if name is not None:
            request_id = request.metadata.internal_request_id
            before = self._sent.get(request_id)
            is_there = before is not None and before.replica == replica
            since = before.since if before and is_there and may_take else self._clock()
            self._sent[request_id] = _Sent(name, replica, since, is_taken)
        while len(self._sent) > _MOST_SENT:
            self._sent.pop(next(iter(self._sent)))

    def _moving(self, replicas: list[RunningReplica]) -> list[RunningReplica]:
        """Return the replicas without those that report no more, or all if there is no other."""
        # What counts is for how long this process has known a report: clocks of machines differ.
        now = self._clock()
        moving = []
        for each in replicas:
            name, at = each.replica_id.unique_id, each.routing_stats.get("at")
            known_at, since = self._reported.get(name, (None, now))
            self._reported[name] = at, (since if at == known_at else now)
            if at is None or at != known_at or now - since <= REPORTS_STALE_S:
                moving.append(each)
        return moving or replicas

    def _candidates(self, replicas: list[RunningReplica]) -> list[Candidate]:
        now = time.time()
        reports = {
            each.replica_id.unique_id: EngineReport.from_stats(each.routing_stats, now)
            for each in replicas
        }
        assigned: dict[str, list[Need]] = {replica: [] for replica in reports}
        for request_id, (replica, need, since) in list(self._assigned.items()):
            report = reports.get(replica)
            known_at = report.at - _TRANSIT_S if report else now - REPORTS_STALE_S
            if since < known_at or replica not in reports:
                self._assigned.pop(request_id, None)
            else:
                assigned[replica].append(need)
        return [
            Candidate(
                each.replica_id.unique_id,
                self.replica_queue_len_cache.get(each.replica_id),
                reports[each.replica_id.unique_id],
                assigned[each.replica_id.unique_id],
            )
            for each in replicas
        ]


_routers: WeakValueDictionary[Hashable, AffinityRouter] = WeakValueDictionary()


def add_router(deployment: Hashable, router: AffinityRouter) -> None:
    """Remember the router of a deployment in this process for as long as it lives."""
    _routers[deployment] = router


def find_router(deployment: Hashable) -> AffinityRouter | None:
    """Return the router of a deployment; None if this process has not called it yet."""
    return _routers.get(deployment)


def _may_take(replica: RunningReplica, known: Candidate) -> bool:
    has_lease = known.report is None or known.report.leases_free > 0
    return has_lease and (known.num_ongoing or 0) < replica.max_ongoing_requests


def _name_of(*args: object) -> str | None:
    match args:
        case (LeaseRequest(lease_id=name), *_) | (GenerateRequest(call_id=name), *_):
            return name
        case (str() as name, *_):
            return name
    return None


def _need_of(request: PendingRequest | None) -> Need:
    """Return what a request needs; a call that is not for a lease needs no room in KV."""
    if request is None:
        return Need()
    if request.args and isinstance(request.args[0], LeaseRequest):
        return Need.of(request.args[0])
    name = request.metadata.session_id
    return Need(document_name(name) if name else "")

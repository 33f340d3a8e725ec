"""The Serve request router of the engine pools, a thin layer over `cluster.routing`.

It uses Serve's request router API (alpha in Ray 2.60). Every process that has a handle of a pool
has a router, which gets the replicas' reports from Serve's controller about once a second. What it
assigned itself since a report was made, it adds. Replicas that have just failed a request are left
alone (`cluster.blame`).

A lease that waits in an engine's queue can ask its router whether it would open elsewhere at once
(`AffinityRouter.can_move`). Serve copies this class with its module into each process, so the
process finds its routers through `cluster.routers`, which is imported.
"""

from __future__ import annotations

import time
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from cluster import routers
from cluster.blame import BLAME
from cluster.reports import REPORTS_STALE_S, EngineReport, document_name
from cluster.routing import Candidate, Need, has_room, ranked
from rapid.messages import LeaseRequest

_SINGLES = 3  # replicas that are tried one by one before all others together
_NEW_S = 2.0  # until Serve has told a router of the replicas that run
_TRANSIT_S = 0.5  # from an assignment to the engine's count of it


class AffinityRouter(RequestRouter):  # type: ignore[misc]  # Ray has no types here
    """A Serve request router that sends leases where their document is and there is room."""

    def initialize_state(
        self, *, target_ongoing_requests: float, first_token_goal_s: float, **_: Any
    ) -> None:
        """Store the router's configuration, which Serve passes.

        Args:
            target_ongoing_requests: The number of requests from which a replica is crowded.
            first_token_goal_s: The pool's goal for the first token, in seconds.
        """
        self._target_ongoing_requests = target_ongoing_requests
        self._first_token_goal_s = first_token_goal_s
        self._assigned: dict[str, tuple[str, Need, float]] = {}  # by the request's id
        self._taken_by: dict[str, tuple[str, str]] = {}  # replica and lease id, by the request's id
        self._created = time.monotonic()
        routers.add(self._deployment_id, self)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return groups of replicas to try, in order of preference."""
        need = _need_of(pending_request)
        candidate_replicas = BLAME.spared(candidate_replicas)
        by_id = {each.replica_id.unique_id: each for each in candidate_replicas}
        order = ranked(
            need,
            self._candidates(candidate_replicas),
            target_ongoing=self._target_ongoing_requests,
            first_token_goal_s=self._first_token_goal_s,
        )
        if pending_request is not None and order:  # until it is known who took it
            self._assign(pending_request, order[0], need)
        replicas = [by_id[replica] for replica in order]
        rest = replicas[_SINGLES:]
        return [[each] for each in replicas[:_SINGLES]] + ([rest] if rest else [])

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """Note which replica took a request."""
        self._assign(pending_request, replica_id.unique_id, _need_of(pending_request))
        if pending_request.args and isinstance(request := pending_request.args[0], LeaseRequest):
            taken = (replica_id.unique_id, request.lease_id)
            self._taken_by[pending_request.metadata.internal_request_id] = taken

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Forget a request that has ended or was not taken."""
        self._assigned.pop(internal_request_id, None)
        self._taken_by.pop(internal_request_id, None)

    def can_move(self, request: LeaseRequest) -> bool:
        """Return whether a lease that was asked for waits in a queue, and would open elsewhere.

        A replica that has left the pool only finishes what it has: what waits there moves, too.
        Any thread may call this.
        """
        takers = [
            taker for taker, lease_id in [*self._taken_by.values()] if lease_id == request.lease_id
        ]
        spared = {each.replica_id.unique_id for each in BLAME.spared(self._replicas_list)}
        candidates = {each.replica: each for each in self._candidates(self._replicas_list)}
        if not takers:
            return False
        here = candidates.pop(takers[0], None)
        if here is not None and not (here.report and here.report.leases_waiting):
            return False
        need, target = Need.of(request), self._target_ongoing_requests
        others = (each for each in candidates.values() if each.replica in spared)
        return any(has_room(need, each, target) for each in others)

    @property
    def is_empty(self) -> bool:
        """Whether the pool has no running replica; a router that is new does not know yet."""
        is_new = time.monotonic() - self._created < _NEW_S
        return not self._replicas_list and not is_new

    def _assign(self, request: PendingRequest, replica: str, need: Need) -> None:
        self._assigned[request.metadata.internal_request_id] = (replica, need, time.time())

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


def _need_of(request: PendingRequest | None) -> Need:
    """Return what a request needs; a call that is not for a lease needs no room in KV."""
    if request is None:
        return Need()
    if request.args and isinstance(request.args[0], LeaseRequest):
        return Need.of(request.args[0])
    name = request.metadata.session_id
    return Need(document_name(name) if name else "")

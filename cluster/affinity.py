"""Requests about one document go to the replica that has read it.

A router of Ray Serve (its request router API, alpha in Ray 2.60). A request that names what it
reads as its ``session_id`` goes to the replica that owns this name, as long as that has no more to
do than the autoscaler aims at; beyond, and without a name, the less busy of two replicas at random
takes it. So an idle pool reads a document once, and a busy one never queues for the sake of it.

The owner is the replica with the highest hash of name and replica (rendezvous hashing): every
process finds the same one without asking, and a new replica takes over only what it then owns.
"""

from __future__ import annotations

import random
from hashlib import blake2b
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica


class AffinityRouter(RequestRouter):  # type: ignore[misc]  # Ray has no types here
    """See the module."""

    def initialize_state(self, *, target_ongoing_requests: float, **_: Any) -> None:
        """Args of the router's configuration: what the autoscaler aims at for a replica."""
        self._target_ongoing_requests = target_ongoing_requests

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Whom to ask first, and then."""
        if not candidate_replicas:
            return []
        two = random.sample(candidate_replicas, min(2, len(candidate_replicas)))
        name = pending_request.metadata.session_id if pending_request else ""
        if not name:
            return [two]
        owner = max(candidate_replicas, key=lambda each: weight(name, each.replica_id))
        num_ongoing = self.replica_queue_len_cache.get(owner.replica_id)
        is_busy = num_ongoing is not None and num_ongoing >= self._target_ongoing_requests
        return [two] if is_busy else [[owner], two]


def weight(name: str, replica: ReplicaID) -> bytes:
    """Of a replica, for the owner of a name to have the highest."""
    return blake2b(f"{name} {replica.unique_id}".encode(), digest_size=8).digest()

"""A Ray Serve router that sends requests about one document to the replica that has read it.

It uses Serve's request router API (alpha in Ray 2.60). A request whose ``session_id`` names what it
reads goes to the replica that owns this name, as long as that replica is below the autoscaler's
target load. At or above it, and for a request without a name, the less busy of two random replicas
takes the request. So an idle pool reads a document once, and a busy one never queues for affinity.
Replicas that have just failed a request are left alone (`cluster.blame`).

The owner is the replica with the highest hash of name and replica (rendezvous hashing): every
process finds the same owner without communication, and a new replica takes over only the names that
it then owns.
"""

from __future__ import annotations

import random
from hashlib import blake2b
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from cluster.blame import BLAME


class AffinityRouter(RequestRouter):  # type: ignore[misc]  # Ray has no types here
    """A Serve request router that prefers the replica that owns a request's ``session_id``."""

    def initialize_state(self, *, target_ongoing_requests: float, **_: Any) -> None:
        """Store the router's configuration, which Serve passes.

        Args:
            target_ongoing_requests: The autoscaler's target load of a replica.
        """
        self._target_ongoing_requests = target_ongoing_requests

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return groups of replicas to try, in order of preference."""
        if not candidate_replicas:
            return []
        candidate_replicas = BLAME.spared(candidate_replicas)
        two = random.sample(candidate_replicas, min(2, len(candidate_replicas)))
        name = pending_request.metadata.session_id if pending_request else ""
        if not name:
            return [two]
        owner = max(candidate_replicas, key=lambda each: weight(name, each.replica_id))
        num_ongoing = self.replica_queue_len_cache.get(owner.replica_id)
        is_busy = num_ongoing is not None and num_ongoing >= self._target_ongoing_requests
        return [two] if is_busy else [[owner], two]


def weight(name: str, replica: ReplicaID) -> bytes:
    """Return the hash of a name and a replica; the replica with the highest owns the name."""
    return blake2b(f"{name} {replica.unique_id}".encode(), digest_size=8).digest()

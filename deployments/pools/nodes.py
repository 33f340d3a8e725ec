"""The other nodes of an engine that is spread over several: an actor on each, with its ranks.

The nodes are the bundles of the replica's placement group, and the engine's actor owns the others.
So an actor ends with the engine, by Ray, and its ranks' processes with the actor, by the kernel;
where neither is left to see to it, ranks end by themselves when they no longer hear of the first.
"""

from __future__ import annotations

import logging
import subprocess
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rapid.engines.parallel.machines import Invitation, join
from rapid.engines.parallel.starting import Process

logger = logging.getLogger(__name__)


class RankHost:
    """A Ray actor that has the ranks of one node."""

    def join(self, invitation: Invitation) -> None:
        """Start the ranks that the node is invited to have; return when all have ended."""
        join(invitation)


class Nodes:
    """The nodes of an engine; see `rapid.engines.parallel.machines.Machines`.

    Attributes:
        number: How many they are, with the engine's own.
        host: Address of the engine's own.
    """

    def __init__(self, number: int, group: PlacementGroup, options: dict[str, Any]) -> None:
        """Describe the nodes, on the engine's own.

        Args:
            number: How many they are.
            group: A placement group with a bundle on each, the engine's first.
            options: What the engine has on each, as options of an actor.
        """
        self.number = number
        self.host: str = ray.util.get_node_ip_address()
        self._group = group
        self._options = options

    def start(self, machine: int, invitation: Invitation) -> Process:
        """Start a node's actor; return the node's ranks together."""
        host = ray.remote(RankHost).options(**self._options, **in_bundle(self._group, machine))
        return _Ranks(host.remote(), invitation)


def in_bundle(group: PlacementGroup, index: int) -> dict[str, Any]:
    """Return the options of an actor that runs in a bundle of a placement group."""
    return {"scheduling_strategy": PlacementGroupSchedulingStrategy(group, index)}


class _Ranks:
    """The ranks of another node; once they are killed, nobody waits for its word."""

    def __init__(self, host: ActorHandle, invitation: Invitation) -> None:
        self._host = host
        self._ended = host.join.remote(invitation)
        self._is_over = False

    def wait(self, timeout: float | None = None) -> None:
        if self._is_over:
            return
        if not ray.wait([self._ended], timeout=timeout)[0]:
            raise subprocess.TimeoutExpired("the ranks of another node", timeout or 0)
        try:
            ray.get(self._ended)
        except RayError as error:
            logger.error("the ranks of another node ended: %s", error)
        self.kill()

    def kill(self) -> None:
        self._is_over = True
        if ray.is_initialized():  # else Ray has ended it
            ray.kill(self._host)

"""The command ``rapid drain``, which empties the Ray node of a machine before it goes.

Kubernetes runs it before it ends a pod, which ends when the command does.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from deployments.cli.terminal import fail, note

if TYPE_CHECKING:
    from rapid.ports import Clock

_LOOK_S = 2.0  # between two looks at what is left on the node
_MOST_FAILURES = 5  # looks in a row; then Ray's head is gone as well, and nothing will move
_MOST_LISTED = 10_000  # Ray lists no more


class DrainableNode(Protocol):
    """A node of a Ray cluster."""

    def drain(self, notice_s: int) -> None:
        """Have Ray move everything away; the node goes in so many seconds."""
        ...

    def num_serving(self) -> int:
        """Return the number of replicas and proxies here; ConnectionError if Ray is silent."""
        ...


def drain(
    notice: Annotated[
        int, typer.Option(help="Seconds until the machine goes, at most.", min=1)
    ] = 900,
) -> None:
    """Move everything that this machine's Ray node runs to others, and wait until it has gone.

    With a notice longer than a pool's graceful_shutdown_timeout_s its replicas here serve until
    others run elsewhere. The head cannot be drained.
    """
    try:
        node = _RayNode.here()
    except ConnectionError:
        fail("Ray does not answer: there is nobody to move anything")
    if node is None:
        note("this machine has no Ray node that could be drained: it has gone, or is the head")
        return
    if leave(node, notice):
        note("nothing runs here any more")
    else:
        note("the time is over, or Ray does not answer any more")


def leave(
    node: DrainableNode,
    notice_s: int,
    *,
    clock: Clock = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Drain a node and wait for it; return whether it is empty."""
    ends = clock() + notice_s
    node.drain(notice_s)
    num_failures = 0
    while clock() < ends and num_failures < _MOST_FAILURES:
        try:
            if not node.num_serving():
                return True
            num_failures = 0
        except ConnectionError:
            num_failures += 1
        sleep(_LOOK_S)
    return False


class _RayNode:
    def __init__(self, node_id: str) -> None:
        self._node_id = node_id

    @classmethod
    def here(cls) -> _RayNode | None:
        """Return the worker node of this machine, if it has one."""
        from ray.util import get_node_ip_address
        from ray.util.state import list_nodes

        nodes = _ask(list_nodes, ("node_ip", "=", get_node_ip_address()))
        workers = [each.node_id for each in nodes if not each.is_head_node]
        return cls(workers[0]) if workers else None

    def drain(self, notice_s: int) -> None:
        command = [
            *(sys.executable, "-m", "ray.scripts.scripts", "drain-node"),
            f"--node-id={self._node_id}",
            "--reason=DRAIN_NODE_REASON_PREEMPTION",
            "--reason-message=the machine goes",
            f"--deadline-remaining-seconds={notice_s}",
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            fail(f"Ray does not drain the node: {done.stderr.strip()[-300:]}")

    def num_serving(self) -> int:
        from ray.util.state import list_actors

        from cluster.serve_internals import SERVE_ACTORS

        actors = _ask(list_actors, ("node_id", "=", self._node_id))
        return sum(each.class_name.startswith(SERVE_ACTORS) for each in actors)


def _ask(listing: Callable[..., list[Any]], which: tuple[str, str, str]) -> list[Any]:
    """Return what lives of a kind of Ray's; ConnectionError if Ray does not say."""
    filters = [which, ("state", "=", "ALIVE")]
    try:
        return listing(filters=filters, limit=_MOST_LISTED, raise_on_missing_output=False)
    except Exception as error:  # of its HTTP client, its control store, or its dashboard
        raise ConnectionError from error

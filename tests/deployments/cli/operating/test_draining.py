"""A node that is to go is drained, and the command waits until nothing of Serve is on it."""

from __future__ import annotations

import pytest

from deployments.cli.operating.draining import leave


class Node:
    """A node on which fewer and fewer run; `None` is a cluster that does not answer."""

    def __init__(self, *serving: int | None) -> None:
        self.looks, self.drained, self.now = list(serving), [], 0.0

    def drain(self, notice_s: int) -> None:
        self.drained.append(notice_s)

    def num_serving(self) -> int:
        assert self.drained, "looked at before it was drained"
        found = self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]
        if found is None:
            raise ConnectionError
        return found

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize(
    ("node", "is_empty", "ends_at"),
    [
        (Node(0), True, 0.0),  # nothing ran here
        (Node(3, 3, 1, 0), True, 6.0),
        (Node(3, None, 1, None, 0), True, 8.0),  # the head was away for a moment
        (Node(2), False, 60.0),  # answers take longer than the notice
        (Node(2, None), False, 12.0),  # the whole cluster ends, and nobody moves anything
    ],
)
def test_it_waits_until_the_node_is_empty(node: Node, is_empty: bool, ends_at: float) -> None:
    assert leave(node, 60, clock=lambda: node.now, sleep=node.sleep) is is_empty
    assert (node.drained, node.now) == ([60], ends_at)

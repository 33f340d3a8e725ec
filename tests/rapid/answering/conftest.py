"""The loop of the conformance walk, whose clock takes no time."""

from __future__ import annotations

from tests.virtual_time import virtual_loop

__all__ = ["virtual_loop"]

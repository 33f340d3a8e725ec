"""When work counts as stuck: by ticks, not by the clock; nothing here is timed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from rapid.engines.execution.watchdog import Watchdog


def watched(limit_s: float) -> tuple[Any, Watchdog]:
    work = SimpleNamespace(num_turns=0, limit_s=limit_s)
    return work, Watchdog(work, lambda: None)


def test_a_turn_is_stuck_after_its_limit_in_ticks_of_a_second() -> None:
    _, watchdog = watched(3.0)
    assert [watchdog.is_stuck() for _ in range(5)] == [False, False, False, True, True]


def test_every_turn_starts_anew_with_a_limit_of_its_own() -> None:
    work, watchdog = watched(2.0)
    for _ in range(10):
        assert not watchdog.is_stuck()
        work.num_turns += 1
    assert not watchdog.is_stuck()
    work.limit_s = 4.0
    assert [watchdog.is_stuck() for _ in range(5)] == [False, False, False, False, True]

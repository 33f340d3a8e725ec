"""When work counts as stuck: by ticks, not by the clock; nothing here is timed."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

from rapid.engines.execution.compute import _LEAST_LIMIT_S
from rapid.engines.execution.watchdog import _TICK_S, Watchdog


def watched(limit_s: float) -> tuple[Any, Watchdog]:
    work = SimpleNamespace(num_turns=0, limit_s=limit_s)
    return work, Watchdog(work, lambda: None)


def test_a_turn_is_stuck_after_its_limit_in_ticks_of_half_a_second() -> None:
    _, watchdog = watched(1.5)
    assert [watchdog.is_stuck() for _ in range(5)] == [False, False, False, True, True]


def test_every_turn_starts_anew_with_a_limit_of_its_own() -> None:
    work, watchdog = watched(1.0)
    for _ in range(10):
        assert not watchdog.is_stuck()
        work.num_turns += 1
    assert not watchdog.is_stuck()
    work.limit_s = 2.0
    assert [watchdog.is_stuck() for _ in range(5)] == [False, False, False, False, True]


def test_an_engine_that_hangs_closes_early_enough_to_be_out_of_rotation_in_15_seconds() -> None:
    """Its replica ends at once, and Serve, which looks every second, tells the routers."""
    work, watchdog = watched(_LEAST_LIMIT_S)
    work.num_turns += 1  # just after a tick, a step begins that does not end
    num_ticks = next(number for number in itertools.count(1) if watchdog.is_stuck())
    assert num_ticks * _TICK_S <= 11.0

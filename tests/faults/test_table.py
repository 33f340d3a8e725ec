"""The fault run's verdicts, on outcomes made by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.faults.clients import Arrival, Outcome, arrivals, is_well_formed
from tests.faults.table import (
    HEADINGS,
    Allowed,
    Run,
    faults_of,
    first_token_s,
    formatted,
    recovered_s,
    row,
    wrong_ready,
)

TEXTS = ["red", "blue"]


def outcome(at: float = 1.0, question: int = 0, **fields: Any) -> Outcome:
    arrival = Arrival(at, fields.pop("phase", "standard"), question)
    made = Outcome(arrival, began=at, end="answered", first=at + 0.2, ended=at + 1.0)
    return replace(made, **{"text": TEXTS[question]} | fields)


def run(*outcomes: Outcome, **fields: Any) -> Run:
    made = Run("kill it", Allowed(), 2.0, list(outcomes), whole_again_s=3.0)
    return replace(made, **fields)


def test_all_answered_with_the_same_text_is_as_it_must_be() -> None:
    seen = run(outcome(), outcome(question=1))
    assert faults_of(seen, TEXTS, None) == []
    assert row(seen, TEXTS, None)[:4] == ("kill it", "2+0+0", "2", "2")
    assert row(seen, TEXTS, None)[-1] == "ok"


@pytest.mark.parametrize(
    ("seen", "said"),
    [
        (run(outcome(), outcome(end="failed", why="a bug")), "1 failed: a bug"),
        (run(outcome(end="unanswered")), "unanswered"),
        (run(outcome(end="refused", why="503")), "refused outside the overflow"),
        (run(outcome(text="green")), "another text: questions [0]"),
        (run(outcome(num_broken=1)), "1 with broken connections"),
        (run(outcome(), leaks=["leases held: (1, 4)"]), "leases held"),
        (run(outcome(), whole_again_s=None), "did not come back"),
    ],
)
def test_whatever_is_wrong_is_said_and_fails_the_row(seen: Run, said: str) -> None:
    (found,) = faults_of(seen, TEXTS, None)
    assert said in found
    assert row(seen, TEXTS, None)[-1] == "FAILS"


@pytest.mark.parametrize(
    "seen",
    [
        run(outcome(phase="overflow", end="refused")),
        run(outcome(end="left")),
        run(outcome(text="green", is_declared=True)),
        run(outcome(num_broken=2), allowed=Allowed(breaks=True)),
        run(*(outcome() for _ in range(100)), outcome(text="green")),  # a tie in a hundred
    ],
)
def test_what_a_fault_may_cost_is_no_failure(seen: Run) -> None:
    assert faults_of(seen, TEXTS, None) == []


@pytest.mark.parametrize(("waited", "is_slow"), [(0.3, False), (0.5, True)])
def test_a_hostile_tenant_may_slow_the_others_by_a_factor(waited: float, is_slow: bool) -> None:
    quiet = run(outcome())
    seen = run(outcome(first=1.0 + waited), allowed=Allowed(slows=2.0))
    assert bool(faults_of(seen, TEXTS, quiet)) == is_slow


def test_the_first_token_is_measured_where_nothing_overflows() -> None:
    slow = outcome(phase="overflow", first=9.0)
    assert first_token_s([outcome(), slow]) == pytest.approx(0.2)


def test_recovery_ends_with_the_last_request_that_suffered() -> None:
    seen = run(
        outcome(at=2.5, num_broken=1, ended=4.0),
        outcome(at=3.0, ended=9.5),
        outcome(at=9.6, ended=9.9),
        outcome(at=10.0, ended=40.0, phase="overflow"),
    )
    assert recovered_s(seen) == 7.5
    assert recovered_s(run(outcome())) == 0.0


def test_a_refusal_of_ready_is_wrong_while_requests_are_answered() -> None:
    probes = [(1.2, 503, 0.1), (1.3, 200, 0.1), (30.0, 503, 0.1), (1.4, 0, 5.0)]
    assert wrong_ready(run(outcome(at=1.0), ready=probes)) == 2
    assert wrong_ready(run(outcome(at=1.0, end="failed"), ready=probes)) == 0


def test_arrivals_come_again_with_their_seed_and_follow_the_rates() -> None:
    phases: Any = [("standard", 100.0, 1.0), ("overflow", 100.0, 5.0)]
    load = arrivals(phases, 2.0, 7, share_leaving=0.5)
    assert load == arrivals(phases, 2.0, 7, share_leaving=0.5) != arrivals(phases, 2.0, 8)
    counts = {p: sum(each.phase == p for each in load) for p in ("standard", "overflow")}
    assert 70 <= counts["standard"] <= 140
    assert 420 <= counts["overflow"] <= 580
    assert sum(each.at == 1.7 and each.question % 2 == 0 for each in load) == 6
    leaving = sum(each.leaves_after_s is not None for each in load) / len(load)
    assert 0.35 < leaving < 0.65


@pytest.mark.parametrize(
    ("said", "is_openais"),
    [
        (b'{"error": {"message": "m", "type": "t", "param": null, "code": null}}', True),
        (b'{"error": "m"}', False),
        (b"Internal Server Error", False),
        (b"[]", False),
    ],
)
def test_an_error_is_well_formed_or_not(said: bytes, is_openais: bool) -> None:
    assert is_well_formed(said) is is_openais


def test_columns_line_up() -> None:
    table = formatted([row(run(outcome()), TEXTS, None)] * 2).splitlines()
    assert len(table) == 3
    assert table[0].split("  ")[0] == HEADINGS[0]

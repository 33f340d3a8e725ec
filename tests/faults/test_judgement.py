"""The fault run's verdicts, on outcomes made by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.faults.breakages import QUICK, faults
from tests.faults.clients import MODES, Arrival, Outcome, arrivals, is_well_formed
from tests.faults.judgement import (
    Allowed,
    Run,
    faults_of,
    first_token_s,
    longest_pause_s,
    ready_denied,
    ready_promised,
    recovered_s,
)

TEXTS = ["red", "blue", "grey", "green", "gold"]


def outcome(at: float = 1.0, question: int = 0, **fields: Any) -> Outcome:
    arrival = Arrival(at, fields.pop("phase", "standard"), question)
    made = Outcome(arrival, began=at, end="answered", first=at + 0.2, ended=at + 1.0)
    return replace(made, **{"text": TEXTS[question]} | fields)


def run(*outcomes: Outcome, **fields: Any) -> Run:
    made = Run("kill it", Allowed(), 2.0, list(outcomes), whole_again_s=3.0)
    return replace(made, **fields)


def lost(*ready: tuple[float, int]) -> Run:
    """A server that is lost at 2 s, and may need until 17 s to know."""
    asked = [(at, status, 0.1) for at, status in ready]
    return run(outcome(end="unanswered"), ready=asked, allowed=Allowed(lost_s=15.0))


def test_a_server_that_is_lost_has_to_say_so_and_no_more() -> None:
    assert faults_of(lost((3.0, 200), (4.0, 0), (20.0, 503)), TEXTS, None) == []


def test_all_answered_with_the_same_text_is_as_it_must_be() -> None:
    assert faults_of(run(outcome(), outcome(question=1)), TEXTS, None) == []


FUSED = MODES.index("fused")


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
        (run(error="TimeoutError: "), "TimeoutError"),
        (run(outcome(), ready=[(1.5, 503, 0.1)]), "/ready denied 1 times"),
        (lost((20.0, 0), (20.5, 503)), "gave 1 of 2 times no answer"),
        (lost((18.0, 503), (20.0, 200)), "promised 1 of 2 times"),
        (lost((16.0, 503)), "was not asked"),
        (run(outcome(), allowed=Allowed(leaves_s=5.0)), "asked for nothing"),
        (run(outcome(), allowed=Allowed(leaves_s=5.0), left_alone_s=5.5), "until 5.5 s"),
        (run(outcome(ended=17.0), allowed=Allowed(pause_s=15.0)), "paused for 16.0 s"),
        (run(outcome(num_malformed=1), allowed=Allowed(breaks=True)), "not in OpenAI's form"),
        (run(outcome(9.0, is_declared=True), allowed=Allowed(alone_s=5.0)), "1 without drafter"),
        (run(outcome(), ready=[(1.5, 200, 0.2)], allowed=Allowed(ready_s=0.1)), "took 200 ms"),
        (run(outcome(), allowed=Allowed(health_s=1.0)), "was not asked"),
        (run(outcome(), health=[(1.5, 0, 0.2)], allowed=Allowed(health_s=1.0)), "not well 1 times"),
        (run(outcome(), health=[(1.5, 200, 2.0)], allowed=Allowed(health_s=1.0)), "took 2000 ms"),
        (
            run(outcome(phase="recovery", question=FUSED, end="refused"),
                allowed=Allowed(refuses=("fused",))),
            "refused outside",
        ),
    ],
)  # fmt: skip
def test_whatever_is_wrong_is_said(seen: Run, said: str) -> None:
    (found,) = faults_of(seen, TEXTS, None)
    assert said in found


@pytest.mark.parametrize(
    "seen",
    [
        run(outcome(phase="overflow", end="refused")),
        run(outcome(end="left")),
        run(outcome(text="green", is_declared=True)),
        run(outcome(num_broken=2), allowed=Allowed(breaks=True)),
        run(*(outcome() for _ in range(100)), outcome(text="green")),  # a tie in a hundred
        run(outcome(), allowed=Allowed(leaves_s=5.0), left_alone_s=4.5),
        run(outcome(6.0, is_declared=True), allowed=Allowed(alone_s=5.0)),
        run(outcome(question=1, ended=17.0), allowed=Allowed(pause_s=15.0)),  # not streamed
        run(outcome(question=FUSED, end="refused"), allowed=Allowed(refuses=("fused",))),
        run(
            outcome(phase="recovery", question=FUSED, end="refused"),
            allowed=Allowed(refuses=("fused",), lasts=True),
        ),
        run(outcome(), ready=[(1.5, 0, 0.1)], allowed=Allowed(breaks=True)),
        run(outcome(phase="overflow"), outcome(5.9, phase="recovery", end="refused")),
    ],
)
def test_what_a_fault_may_cost_is_no_failure(seen: Run) -> None:
    assert faults_of(seen, TEXTS, None) == []


@pytest.mark.parametrize(("waited", "is_slow"), [(0.3, False), (0.5, True)])
def test_a_fault_may_slow_the_others_by_a_factor(waited: float, is_slow: bool) -> None:
    quiet = run(outcome())
    seen = run(outcome(first=1.0 + waited), allowed=Allowed(slows=2.0))
    assert bool(faults_of(seen, TEXTS, quiet)) == is_slow


def test_the_first_token_is_that_of_streams_where_nothing_overflows() -> None:
    overflowing, whole = outcome(phase="overflow", first=9.0), outcome(question=1, first=9.0)
    assert first_token_s(run(outcome(), overflowing, whole)) == pytest.approx(0.2)


def test_a_pause_is_a_time_without_text_from_the_request_on() -> None:
    assert longest_pause_s(run(outcome(heard=[1.2, 1.9]))) == pytest.approx(0.7)
    assert longest_pause_s(run(outcome(heard=[1.9]))) == pytest.approx(0.9)


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
    assert ready_denied(run(outcome(at=1.0), ready=probes)) == 2
    assert ready_denied(run(outcome(at=1.0, end="failed"), ready=probes)) == 0


def test_a_promise_of_ready_is_wrong_amid_a_silence() -> None:
    waiting = outcome(at=10.0, heard=[31.0], ended=32.0)
    probes = [(12.0, 200, 0.1), (20.0, 200, 0.1), (21.0, 503, 0.1), (30.0, 200, 0.1)]
    assert ready_promised(run(waiting, ready=probes)) == 1
    heard_by_another = outcome(at=15.0, heard=[20.5], ended=20.6)
    assert ready_promised(run(waiting, heard_by_another, ready=probes)) == 0
    assert ready_promised(run(outcome(at=10.0, ended=10.5), ready=probes)) == 0


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


def test_the_short_form_is_part_of_the_long_one() -> None:
    assert set(QUICK) < set(faults())

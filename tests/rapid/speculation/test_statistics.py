"""Counters over the rounds of a choice, from verdicts that are written down."""

from __future__ import annotations

from dataclasses import replace

from rapid.messages import Verdict
from rapid.receipt import ChoiceStatistics, TokenProbs
from rapid.speculation.lookup import LOOKUP
from rapid.speculation.statistics import RoundStatistics


def verdict(position: int, num_tokens: int, num_drafted: int, num_accepted: int) -> Verdict:
    return Verdict(
        "a",
        0,
        position,
        tuple(range(position, position + num_tokens)),
        num_drafted,
        num_accepted,
        is_finished=False,
        draft_ms=2.0,
        verify_ms=5.0,
    )


def test_a_copied_token_has_no_number_of_a_drafter() -> None:
    statistics = RoundStatistics()
    probs = (TokenProbs(0.5, 1.0, 0.5), TokenProbs(0.25, 0.5, 0.25))
    statistics.observe(replace(verdict(0, 1, 1, 1), lease_id=LOOKUP, probs=probs[:1]))
    statistics.observe(replace(verdict(1, 1, 1, 1), probs=probs[1:]))
    assert statistics.probs == {0: TokenProbs(0.5, None, 0.5), 1: probs[1]}


def test_rounds_add_up_to_the_receipt() -> None:
    statistics = RoundStatistics(refreshes=1)
    for each in (
        verdict(0, 3, 3, 3),  # all accepted
        verdict(3, 2, 3, 1),  # one accepted, one corrected
        verdict(5, 3, 2, 2),  # all accepted, and a bonus
        verdict(8, 2, 0, 0),  # plain
    ):
        statistics.observe(each)
    assert statistics.token_ids == list(range(10))
    assert (statistics.draft_ms, statistics.verify_ms) == (8.0, 20.0)
    assert statistics.of_choice() == ChoiceStatistics(
        rounds=4,
        drafted=8,
        accepted=6,
        corrected=1,
        bonus=1,
        completion_tokens=10,
        histogram={3: (0, 1, 0, 1), 2: (0, 0, 1)},
        refreshes=1,
    )


def test_a_drafter_is_lost_once_at_the_token_that_comes_next() -> None:
    statistics = RoundStatistics()
    statistics.observe(verdict(0, 2, 2, 2))
    statistics.lose_drafter(TimeoutError("it hung"))
    statistics.observe(verdict(2, 1, 0, 0))
    statistics.lose_drafter("again")
    assert (statistics.plain_from, statistics.plain_reason) == (2, "it hung")

"""Lengths of copied drafts on traces: what matched, how much of it was right, and what it cost."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from rapid.messages import Verdict
from rapid.speculation.pace.copying import TextController
from rapid.speculation.pace.round_costs import RoundCosts

Trace = Callable[[int], tuple[int, int]]
"""Longest draft that the text gives at a position of the answer, and how much of it is right."""

PLAIN, CALL = 0.010, 0.0005  # seconds of a token alone, and of a round


class TracedTarget:
    """A target on a clock that is moved by hand; a further drafted row costs `row` seconds."""

    def __init__(self, row: float) -> None:
        self.row, self.now = row, 0.0

    def answer(
        self, costs: RoundCosts, trace: Trace, num_tokens: int = 256, max_draft: int = 10
    ) -> list[int]:
        """One answer's drafted tokens, by round."""
        position, lengths = 0, []
        controller = TextController(
            costs, 2000, max_draft, lambda: trace(position)[0],
            num_left=num_tokens, clock=lambda: self.now,
        )  # fmt: skip
        while position < num_tokens:
            longest, right = trace(position)
            limit = min(max_draft, num_tokens - position)
            asked = controller.next_length(limit)
            block = min(asked, longest)
            accepted = min(block, right)
            committed = limit if not asked else min(accepted + 1, block) if block else 1
            seconds = committed * PLAIN if not asked else PLAIN + max(block - 1, 0) * self.row
            self.now += CALL + seconds
            lengths.append(block)
            verdict = Verdict("t", 0, position, (5,) * committed, block, accepted, False)
            controller.observe(verdict)
            position += committed
        return lengths

    def gain(self, num_tokens: int, max_draft: int = 10) -> float:
        """Speed over plain decoding of the same tokens."""
        return (num_tokens * PLAIN + -(-num_tokens // max_draft) * CALL) / self.now


def quoting(position: int) -> tuple[int, int]:
    """Quotes of 30 tokens: two tokens of a quote match, and everything but its end is right."""
    done = position % 30
    return (0, 0) if done < 2 else (2 * done, 30 - done)


def own_words(position: int) -> tuple[int, int]:
    """Now and then two or three tokens match by chance, and what followed them is wrong."""
    return random.Random(position).choice([(0, 0), (0, 0), (4, 0), (6, 1)])


@pytest.mark.parametrize("row", [0.0002, 0.0025])
def test_quotes_are_copied_and_nothing_else_costs_more_than_a_few_tokens(row):
    target, costs = TracedTarget(row), RoundCosts()
    target.answer(costs, quoting)
    target.now = 0.0
    target.answer(costs, quoting)
    assert target.gain(256) > (3.0 if row < 0.001 else 2.0)
    other = TracedTarget(row)
    for _ in range(20):
        other.answer(costs, own_words)
    assert other.gain(20 * 256) > 0.97


@pytest.mark.parametrize("row", [0.0002, 0.0025])
def test_a_long_match_is_drafted_from_at_once_however_little_copying_paid_before(row):
    target, costs = TracedTarget(row), RoundCosts()
    target.answer(costs, quoting)
    for _ in range(50):
        target.answer(costs, own_words)
    lengths = target.answer(costs, lambda _: (64, 64), 60)
    assert lengths[0] >= 4
    assert sorted(lengths)[2] >= 9  # but for a round that measures plain decoding


def test_nobody_drafts_where_nothing_matches_and_drafted_rounds_took_time_by_the_token():
    """The line of their times begins at zero; a round takes at least a plain token's time."""
    costs = RoundCosts()
    bucket = costs.at(2000)
    bucket.plain.add(10, 10 * PLAIN, PLAIN)
    for tokens in (2, 8):
        bucket.drafted.add(tokens, tokens * PLAIN, PLAIN)
        bucket.num_trials += 1
    assert TextController(costs, 2000, 10, lambda: 0).next_length(10) == 0


def test_where_nothing_matches_nobody_drafts():
    target = TracedTarget(0.0002)
    assert not any(target.answer(RoundCosts(), lambda _: (0, 0)))
    assert target.gain(256) == pytest.approx(1.0)


def test_matches_that_are_never_right_cost_little_in_an_answer_of_any_length():
    for num_tokens in (64, 256, 2000):
        costs = RoundCosts()
        for _ in range(3):
            target = TracedTarget(0.0025)
            target.answer(costs, lambda _: (64, 0), num_tokens)
        assert target.gain(num_tokens) > 0.97


def test_a_quote_amid_own_words_is_found_again_within_a_few_rounds():
    """The counts of an answer fade while it is decoded plainly."""
    target, costs = TracedTarget(0.0002), RoundCosts()
    target.answer(costs, quoting)

    def mixed(position: int) -> tuple[int, int]:
        return own_words(position) if position < 120 else (64, 64)

    lengths = target.answer(costs, mixed, 200)
    assert lengths[-7:-1] == [10] * 6

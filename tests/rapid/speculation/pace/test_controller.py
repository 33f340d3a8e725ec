"""Draft lengths on recorded traces: what rounds took and what they accepted, and what followed.

A trace is a machine with known times and a drafter with a known acceptance; its clock is moved by
hand, so every decision is a function of the trace.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from rapid.messages import Verdict
from rapid.speculation.pace.controller import Controller
from rapid.speculation.pace.round_costs import LengthBucket, Line, RoundCosts


@dataclass
class Machine:
    """Plain tokens take `plain`; a round `verify` and, for each drafted token, `draft` and `row`.

    Attributes:
        accepted: how many tokens of the next block are right, at most.
        noise: rounds take up to so much of their time more or less.
        caught_up_s: a token that the drafter missed while it rested.
    """

    plain: float = 0.010
    verify: float = 0.011
    draft: float = 0.0
    row: float = 0.0
    call: float = 0.001
    noise: float = 0.0
    catch_up: float = 0.0
    longest: int = 64
    now: float = 0.0
    seed: int = 0
    lengths: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def clock(self) -> float:
        return self.now

    def right(self, rate: float) -> int:
        """A run of tokens, each accepted with this probability."""
        run = 0
        while run < 64 and self.random.random() < rate:
            run += 1
        return run

    def answer(
        self,
        costs: RoundCosts,
        num_tokens: int,
        rate: float | list[float],
        *,
        max_draft: int = 10,
        can_rest: bool = True,
        context: int = 2000,
    ) -> list[int]:
        """One answer's draft lengths, by round; `rate` may differ from token to token."""
        rates = rate if isinstance(rate, list) else [rate] * num_tokens
        controller = Controller(costs, context, max_draft, can_rest=can_rest, clock=self.clock)
        lengths: list[int] = []
        done = missed = 0
        while done < num_tokens:
            limit = min(max_draft, num_tokens - done)
            length = controller.next_length(limit)
            assert 0 <= length <= limit
            lengths.append(length)
            block = min(length, self.longest)
            accepted = min(block, self.right(rates[done]))
            if length:
                num_committed = min(accepted + 1, block) if block else 1
                seconds = self.call + self.verify + block * (self.draft + self.row)
                seconds += missed * self.catch_up
                missed = 0
            else:
                num_committed = limit
                seconds = self.call + limit * self.plain
                missed += limit
            self.now += seconds * (1 + self.noise * self.random.uniform(-1, 1))
            controller.observe(
                Verdict(
                    "trace", 0, done, (5,) * num_committed, block, accepted, False,
                    draft_ms=block * self.draft * 1e3,
                )
            )  # fmt: skip
            done += num_committed
        self.lengths += lengths
        return lengths

    def plainly(self, num_tokens: int, max_draft: int = 10) -> float:
        """Seconds that plain decoding takes for an answer."""
        return num_tokens * self.plain + -(-num_tokens // max_draft) * self.call


def test_a_free_drafter_that_is_right_drafts_as_much_as_it_may():
    machine, costs = Machine(), RoundCosts()
    lengths = machine.answer(costs, 300, 1.0)
    assert lengths[:3] == [0, 4, 10]
    assert set(lengths[2:-1]) == {0, 10}
    assert lengths[2:-1].count(0) <= 3  # plain decoding is measured again
    assert machine.now < 0.3 * machine.plainly(300)


def test_a_slow_drafter_is_given_up_after_two_rounds():
    machine, costs = Machine(draft=0.012), RoundCosts()
    lengths = machine.answer(costs, 128, 0.5)
    assert [length for length in lengths if length] == [4, 10]
    machine.now = 0.0
    assert not any(machine.answer(costs, 50, 0.5))
    assert machine.now == pytest.approx(machine.plainly(50))


def test_rounds_in_which_drafters_only_caught_up_are_no_measurement():
    machine, costs = Machine(), RoundCosts()
    is_read = False
    answers = [
        Controller(costs, 2000, 10, can_rest=True, is_read=lambda: is_read, clock=machine.clock)
        for _ in range(2)
    ]

    def verdict(num_drafted: int) -> Verdict:
        return Verdict("trace", 0, 0, (5,) * (num_drafted or 10), num_drafted, num_drafted, False)

    for answer in answers * 2:  # the drafters read their prompts meanwhile
        assert answer.next_length(10) == 0
        machine.now += 10 * machine.plain
        answer.observe(verdict(0))
    is_read = True
    for answer in answers:  # both drafters first read the twenty tokens that they missed
        assert answer.next_length(10) == 4
        machine.now += 0.5
        answer.observe(verdict(4))
    assert answers[0].next_length(10) == 4  # the first trial is still due


def test_a_length_that_borrows_times_borrows_none_that_were_not_measured():
    bucket = LengthBucket()
    bucket.book_plain(10, 0.1)
    longer = bucket.borrow()
    longer.book_plain(10, 0.2)
    assert longer.plain.at(10) == 0.2
    assert longer.drafted == Line()


def test_the_length_is_the_one_with_the_most_tokens_a_second():
    machine, costs = Machine(verify=0.011, draft=0.002), RoundCosts()
    for _ in range(20):
        machine.answer(costs, 200, 0.8)
    best = max(range(1, 11), key=lambda k: sum(0.8**i for i in range(k)) / (0.012 + 0.002 * k))
    drafted = [length for length in machine.lengths[-300:] if length]
    assert abs(sorted(drafted)[len(drafted) // 2] - best) <= 1


def test_when_acceptance_collapses_drafts_become_shorter_then_stop():
    machine, costs = Machine(draft=0.001), RoundCosts()
    machine.answer(costs, 500, 0.95)
    lengths = machine.answer(costs, 400, [0.95] * 200 + [0.0] * 200)
    before, after = lengths[:20], lengths[-20:]
    assert max(before) == 10
    first_rest = len(lengths) - next(i for i, n in enumerate(reversed(lengths)) if n > 4)
    assert any(0 < length < 10 for length in lengths)
    assert sum(map(bool, after)) <= 2
    assert first_rest < len(lengths) - 10


def test_an_answer_that_recovers_is_drafted_again():
    machine, costs = Machine(draft=0.001), RoundCosts()
    machine.answer(costs, 3000, 0.0)
    lengths = machine.answer(costs, 3000, 1.0)
    assert lengths[-2] == 10
    assert lengths.index(10) < 60  # plain rounds of ten tokens until a trial was paid for


def test_trials_become_rarer_while_they_fail():
    machine, costs = Machine(draft=0.004), RoundCosts()
    trials, since = [], 0
    for length in machine.answer(costs, 40_000, 0.0):
        since += 1
        if length:
            trials.append(since)
            since = 0
    gaps = trials[2:]
    assert gaps[:4] == sorted(gaps[:4])
    assert min(gaps[4:]) >= 4 * gaps[0]


LAPTOP = {"verify": 0.012, "row": 0.006}  # a second row costs nearly what a first one does


@pytest.mark.parametrize("rate", [0.0, 0.5, 0.8, 0.95])
@pytest.mark.parametrize(
    "machine",
    [
        {"draft": 0.012},
        {"draft": 0.030},
        {"draft": 0.001},
        {"draft": 0.002, **LAPTOP},
        {"call": 0.003, "longest": 0},
        {"call": 0.003, "longest": 2},
        {"draft": 0.002, "catch_up": 0.002, **LAPTOP},
    ],
    ids=["slow", "slower", "fast", "laptop", "nothing found", "little found", "catching up"],
)
@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_it_never_takes_more_than_three_percent_over_plain(machine, rate, noise):
    trace, costs = Machine(**machine, noise=noise), RoundCosts()
    trace.answer(costs, 256, rate)  # a process that nobody has measured yet pays for its trials
    trace.now = 0.0
    for _ in range(15):
        trace.answer(costs, 256, rate)
    assert trace.now < trace.plainly(15 * 256) / 0.97


def test_all_or_nothing_costs_no_more_than_the_grace():
    """Half the blocks are kept whole, half not at all: E promises more than comes."""
    machine, costs = Machine(draft=0.0034), RoundCosts()
    rates = [1.0 if token // 20 % 2 else 0.0 for token in range(256)]
    for _ in range(15):
        machine.answer(costs, 256, rates)
    assert machine.now < machine.plainly(15 * 256) / 0.97


def test_where_drafting_is_part_of_the_contract_it_never_rests():
    machine, costs = Machine(draft=0.030), RoundCosts()
    lengths = machine.answer(costs, 300, 0.3, can_rest=False)
    assert min(lengths) >= 1
    assert sorted(lengths)[len(lengths) // 2] <= 3


def test_what_one_request_learns_the_next_one_knows():
    machine, costs = Machine(draft=0.012), RoundCosts()
    machine.answer(costs, 256, 0.3)
    assert machine.answer(costs, 64, 0.3)[0] == 0
    fast, costs = Machine(), RoundCosts()
    fast.answer(costs, 256, 1.0)
    assert fast.answer(costs, 64, 1.0)[0] == 10


def test_times_are_kept_by_context_and_begin_with_the_nearest():
    machine, costs = Machine(draft=0.012), RoundCosts()
    machine.answer(costs, 256, 0.8, context=2_000)
    machine.plain, machine.verify = 0.1, 0.1  # 64K: reading the KV costs more than the drafter
    long = machine.answer(costs, 400, 0.9, context=64_000)
    assert long[0] == 0
    machine.plain, machine.verify = 0.010, 0.011
    assert not any(machine.answer(costs, 64, 0.8, context=2_000))


def test_an_early_end_of_a_block_is_no_rejection():
    machine, costs = Machine(longest=3), RoundCosts()
    lengths = machine.answer(costs, 400, 1.0)
    assert lengths[-2] > 2


def test_load_has_its_own_times():
    machine, costs = Machine(), RoundCosts()
    machine.answer(costs, 200, 1.0)
    with costs.growing(8):
        machine.verify, machine.draft = 0.2, 0.05
        assert machine.answer(costs, 400, 0.7)[-10:].count(0) >= 8
    machine.verify, machine.draft = 0.011, 0.0
    assert machine.answer(costs, 100, 1.0)[0] == 10


def test_context_lengths_do_not_spoil_each_others_times():
    """Short ones go on resting and long ones drafting, however often they take turns."""
    short, long = {"plain": 0.010, "verify": 0.011}, {"plain": 0.1, "verify": 0.1}
    machine, costs = Machine(draft=0.030), RoundCosts()

    def answer(times: dict[str, float], num_tokens: int, context: int) -> list[int]:
        machine.plain, machine.verify = times["plain"], times["verify"]
        return machine.answer(costs, num_tokens, 0.9, context=context)

    answer(short, 256, 2_000)
    answer(long, 2_000, 64_000)
    for _ in range(3):
        assert not any(answer(short, 64, 2_000))
        assert answer(long, 64, 64_000)[0] > 2


def test_an_answer_too_short_to_pay_for_a_trial_rests_for_good():
    machine, costs = Machine(draft=0.012), RoundCosts()
    machine.answer(costs, 128, 0.5)
    rests: list[str] = []

    def asked(num_left: int | None, *, is_read: bool = True, can_rest: bool = True) -> Controller:
        return Controller(
            costs, 2000, 10, can_rest=can_rest, num_left=num_left, is_read=lambda: is_read,
            on_rest=lambda: rests.append("for good"), clock=machine.clock,
        )  # fmt: skip

    for controller in (asked(None), asked(100_000), asked(50, is_read=False)):
        assert controller.next_length(10) == 0
        assert rests == []
    short = asked(50)
    assert [short.next_length(10) for _ in range(3)] == [0, 0, 0]
    assert rests == ["for good"]
    assert asked(50, can_rest=False).next_length(10) > 0


def test_where_drafting_pays_no_answer_rests_for_good():
    machine, costs = Machine(), RoundCosts()
    machine.answer(costs, 300, 1.0)
    rests: list[str] = []
    controller = Controller(
        costs, 2000, 10, can_rest=True, num_left=20, on_rest=lambda: rests.append("for good"),
        clock=machine.clock,
    )  # fmt: skip
    assert controller.next_length(10) == 10
    assert rests == []

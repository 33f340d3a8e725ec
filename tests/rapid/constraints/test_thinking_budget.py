"""Thinking that ends by its budget, and grammars behind it: rows as defined, answers as plain's."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from typing_extensions import override

import rapid
from rapid.config import SamplingConfig, SpeculationConfig, ThinkingRule
from rapid.constraints.request_shaping import open_shaping
from rapid.constraints.shaping import Shaping, shape_rows
from rapid.constraints.thinking_budget import ThinkingShaping
from tests.rapid.tiny_models import EOS, VOCAB, loaded, random_prompt

OPENING, CLOSING = 4, 6
LONG, SHORT = random_prompt(90, seed=1).tolist(), random_prompt(30, seed=2).tolist()
NUM_TOKENS = 24


class Counter(Shaping):
    """Stands for a grammar: the token after n of the answer is 10 + n."""

    def __init__(self) -> None:
        self.num = 0
        self.prepared = set[int]()

    @override
    def count_allowed(self, token_ids: Sequence[int]) -> int:
        wanted = range(10 + self.num, 10 + self.num + len(token_ids))
        same = (one == other for one, other in zip(token_ids, wanted, strict=True))
        return next((at for at, is_same in enumerate(same) if not is_same), len(token_ids))

    @override
    def prepare(self, token_ids: Sequence[int], num_rows: int) -> None:
        last = self.num + len(token_ids)
        self.prepared = set(range(last - num_rows + 1, last + 1))

    @override
    def shape(self, row: torch.Tensor) -> torch.Tensor:
        return torch.full_like(row, -torch.inf).index_fill_(0, torch.tensor([10 + self.num]), 1.0)

    @override
    def advance(self, token_ids: Sequence[int]) -> None:
        self.num += len(token_ids)

    @override
    def roll_back(self, num_tokens: int) -> None:
        self.num -= num_tokens

    @override
    def find_forced(self) -> int | None:
        return 10 + self.num


def find_allowed(rule: ThinkingRule, said: list[int], *, has_grammar: bool) -> set[int]:
    """The definition: what may follow some tokens, from the first one on."""
    everything = set(range(VOCAB))
    if not said and not rule.is_open:
        first = {10} if has_grammar else everything
        return first - {OPENING} if rule.budget == 0 else first | {OPENING}
    thoughts = said if rule.is_open else said[1:]
    if not rule.is_open and said[0] != OPENING:
        answer = said
    elif CLOSING in thoughts:
        answer = thoughts[thoughts.index(CLOSING) + 1 :]
    elif rule.budget is not None and len(thoughts) >= rule.budget:
        return {CLOSING}
    else:
        return everything - {EOS} if has_grammar else everything
    return {10 + len(answer)} if has_grammar else everything


def count_allowed(
    rule: ThinkingRule, said: list[int], tried: list[int], *, has_grammar: bool
) -> int:
    """The definition: how many tokens come before the first one that may not."""
    for count, token in enumerate(tried):
        if token not in find_allowed(rule, said + tried[:count], has_grammar=has_grammar):
            return count
    return len(tried)


def check_prepared(
    shaping: ThinkingShaping, rule: ThinkingRule, said: list[int], drafted: list[int], num_rows: int
) -> None:
    """The grammar is told of exactly those rows that come in the answer."""
    grammar = shaping._grammar
    assert isinstance(grammar, Counter)
    grammar.prepared = set()
    shaping.prepare(drafted, num_rows)
    told, first = said + drafted, 0 if rule.is_open else 1
    begins: int | None = None
    if not rule.is_open and told[:1] != [OPENING]:
        begins = 0
    elif CLOSING in told[first:]:
        begins = told.index(CLOSING, first) + 1
    rows = range(len(told) - num_rows + 1, len(told) + 1)
    wanted = {row - begins for row in rows if begins is not None and row >= begins}
    assert grammar.prepared == wanted


@pytest.mark.parametrize("has_grammar", [True, False])
@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize("budget", [None, 0, 1, 4])
def test_rows_allow_what_is_defined_however_the_answer_got_there(
    budget: int | None, is_open: bool, has_grammar: bool
) -> None:
    rule = ThinkingRule(opening=OPENING, closing=CLOSING, is_open=is_open, budget=budget)
    for seed in range(12):
        rng, said = random.Random(seed), list[int]()
        shaping = ThinkingShaping(rule, Counter() if has_grammar else None, {EOS})

        def draw(said: list[int], rng: random.Random = rng) -> int:
            allowed = find_allowed(rule, said, has_grammar=has_grammar)
            likely = sorted(allowed & {OPENING, CLOSING, 10, 11, 12, 7})
            return rng.choice(likely or sorted(allowed))

        for _ in range(12):
            drafted = list[int]()
            for _ in range(rng.randint(0, 4)):
                drafted.append(draw(said + drafted))
            if has_grammar:
                check_prepared(shaping, rule, said, drafted, rng.randint(1, len(drafted) + 1))
            tried = drafted + [rng.choice([OPENING, CLOSING, EOS, 7, 10, 11])] * rng.randint(0, 2)
            assert shaping.count_allowed(tried) == count_allowed(
                rule, said, tried, has_grammar=has_grammar
            )
            rows = shape_rows(shaping, torch.randn(len(drafted) + 1, VOCAB), drafted)
            for index, row in enumerate(rows):
                want = find_allowed(rule, said + drafted[:index], has_grammar=has_grammar)
                assert set(row.isfinite().nonzero().flatten().tolist()) == want
            if (forced := shaping.find_forced()) is not None:
                assert {forced} == find_allowed(rule, said, has_grammar=has_grammar)
            shaping.advance(drafted)
            said += drafted
            back = len(said) if len(said) > 20 else rng.randint(0, min(3, len(said)))
            shaping.roll_back(back)
            del said[len(said) - back :]


def answer(drafter: Any, rule: ThinkingRule, **settings: Any) -> tuple[int, ...]:
    reads = drafter is not None and not isinstance(
        drafter, rapid.PromptLookup | rapid.WindowDrafting
    )
    bias = ((CLOSING, -100.0), (OPENING, 100.0 if settings.pop("opens", False) else 0.0))
    sampling: dict[str, Any] = {"temperature": 0.8, "seed": 5, "logit_bias": bias}
    return rapid.generate(
        loaded(),
        drafter,
        LONG,
        SHORT if reads else (),
        max_tokens=NUM_TOKENS,
        sampling=SamplingConfig(**sampling, thinking=rule, min_tokens=NUM_TOKENS),
        speculation=SpeculationConfig(max_draft=4, coupling="shared_noise", **settings),
    ).token_ids


@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize("budget", [0, 3, 6])
def test_a_budget_ends_the_thinking_and_lossless_is_plain(budget: int, is_open: bool) -> None:
    rule = ThinkingRule(opening=OPENING, closing=CLOSING, is_open=is_open, budget=budget)
    plain = answer(None, rule, eta=0.0, opens=not is_open)
    for drafter in (loaded(seed=1), loaded(), rapid.PromptLookup(), rapid.WindowDrafting(window=8)):
        assert answer(drafter, rule, eta=0.0, opens=not is_open) == plain
    if budget == 0 and not is_open:
        assert plain[0] != OPENING
    else:
        assert plain.index(CLOSING) == budget + (not is_open)
    for transfer in ("adaptive", "boost", "mixture"):
        eta = 1.0 if transfer == "mixture" else 10.0
        fused = answer(loaded(seed=1), rule, transfer=transfer, eta=eta, opens=not is_open)
        assert (CLOSING in fused) == (CLOSING in plain)
        if CLOSING in plain:
            assert fused.index(CLOSING) == budget + (not is_open)


def test_without_a_rule_nothing_is_shaped() -> None:
    assert open_shaping(SamplingConfig()) is None
    rule = ThinkingRule(opening=1, closing=2)
    assert isinstance(open_shaping(SamplingConfig(thinking=rule)), ThinkingShaping)

"""Transfer rules that a program registers for itself: exact, named, and refused where unknown."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

import rapid
from rapid.config import SamplingConfig, SpeculationConfig
from rapid.errors import BadRequest, ConfigurationError
from rapid.pair.pair import Pair
from rapid.speculation.fusion import fuse_probs
from rapid.transfers import OWN_RULES, run_rules
from tests.branches import Branches, assert_same, branches
from tests.rapid.speculation.test_rule_proofs import (
    answers,
    draft_probs,
    models,
    own_probs,
    texts,
)

__all__ = ["branches"]

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_transfer.py"
FACTS = "The banner of Tezawe is sozo sema 40. The well of Ruki is dry. " * 3
QUESTION = "What is the banner of Tezawe?"


@pytest.fixture(autouse=True)
def _the_examples_rule() -> Iterator[None]:
    runpy.run_path(str(EXAMPLE), run_name="rules")
    yield
    OWN_RULES.clear()


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with rapid.open("embedded:target", drafter="embedded:drafter") as opened:
        yield opened


@pytest.mark.parametrize("draft_top_k", [None, 2])
async def test_chains_of_rounds_follow_the_rules_own_formula(branches: Branches, draft_top_k):
    target, drafter = models(seed=2, vocab=3)
    sampling = SamplingConfig(temperature=0.9)
    speculation = SpeculationConfig(
        transfer="geometric", eta=3, max_draft=2, draft_top_k=draft_top_k
    )

    def promised(prefix):
        p = own_probs(target, prefix, sampling)
        q = draft_probs(drafter, prefix, sampling, speculation)
        weights = p**0.25 * q**0.75
        return weights / weights.sum()

    got = await answers(branches, target, drafter, sampling, speculation, 3)
    assert_same(got, dict(texts(promised, 3)))


def test_an_answer_names_its_rule_and_is_the_same_with_its_seed(pair):
    asked = {"documents": [FACTS], "mode": "fused", "transfer": "geometric", "eta": 1}
    greedy = pair.answer(QUESTION, **asked)
    assert (greedy.receipt.contract, greedy.receipt.transfer) == ("fused", "geometric")
    assert greedy.receipt.choices[0].accepted
    warm = {"seed": 7, "temperature": 1.5, "max_tokens": 12} | asked
    texts_by_length = {pair.answer(QUESTION, max_draft=n, **warm).text for n in (1, 4, 10)}
    assert len(texts_by_length) == 1


def test_a_rule_replaces_an_earlier_one_of_its_name_and_decides_what_is_said(pair):
    asked = {"documents": [FACTS], "mode": "fused", "transfer": "mine", "max_tokens": 8}
    said = {}
    for whose, rule in (("target", lambda p, q, eta: p), ("drafter", lambda p, q, eta: q)):
        rapid.register_transfer("mine", rule)
        said[whose] = pair.answer(QUESTION, **asked).text
    assert said["target"] == pair.answer(QUESTION, **asked | {"mode": "plain"}).text
    assert said["drafter"] == pair.answer(QUESTION, **asked | {"mode": "rag"}).text


@pytest.mark.parametrize(
    ("rule", "told"),
    [
        (lambda p, q: p, "the transfer rule 'mine' failed (TypeError"),
        (lambda p, q, eta: p[..., :-1], "returned the shape"),
        (lambda p, q, eta: q - p, "returned weights that are not finite, at least 0"),
        (lambda p, q, eta: p / 0 * 0, "returned weights that are not finite, at least 0"),
        (lambda p, q, eta: 0 * p, "returned weights that are not finite, at least 0"),
    ],
)
def test_a_rule_that_gives_no_distribution_ends_its_own_answer_alone(pair, rule, told):
    rapid.register_transfer("mine", rule)
    asked = {"documents": [FACTS], "mode": "fused", "max_tokens": 8}
    with pytest.raises(BadRequest, match="transfer rule 'mine'") as refused:
        pair.answer(QUESTION, transfer="mine", **asked)
    assert told in str(refused.value)
    assert refused.value.param == "transfer"
    assert pair.answer(QUESTION, **asked).text


def test_a_rule_may_not_allow_what_both_models_rule_out():
    rapid.register_transfer("mine", lambda p, q, eta: p + 0.1)
    logits = torch.tensor([1.0, 0.0, -torch.inf])
    with pytest.raises(BadRequest, match="rule out, as a grammar does"):
        fused(logits, torch.tensor([0.5, 0.5, 0.0]))
    assert fused(logits, torch.tensor([0.5, 0.4, 0.1]))[2] > 0


def fused(logits: torch.Tensor, draft: torch.Tensor) -> torch.Tensor:
    return fuse_probs(logits, draft, temperature=1.0, transfer="mine", eta=1, plausibility=0)


def test_a_rule_that_writes_into_its_arguments_does_not_change_what_is_judged():
    def rule(target_probs, draft_probs, eta):
        draft_probs += target_probs
        return draft_probs

    rapid.register_transfer("mine", rule)
    draft = torch.tensor([0.5, 0.5], dtype=torch.float64)
    assert fused(torch.tensor([2.0, 0.0]), draft)[0] > 0.5
    assert draft.tolist() == [0.5, 0.5]


@pytest.mark.parametrize("name", ["boost", "", "a b", "a/b"])
def test_names_of_the_method_and_what_is_no_name_are_refused(name):
    with pytest.raises(ValueError, match=r"rule of the method|is no name"):
        rapid.register_transfer(name, lambda p, q, eta: p)


def test_an_unknown_rule_is_refused_with_what_to_do(pair):
    with pytest.raises(ValidationError, match=r"'mixture', or a name .*rapid.register_transfer"):
        SpeculationConfig(transfer="nobody's")
    with pytest.raises(BadRequest, match=r"^transfer must be .*rapid.register_transfer"):
        pair.answer(QUESTION, transfer="nobody's")
    with pytest.raises(BadRequest, match="left out with mode 'paper'"):
        pair.answer(QUESTION, mode="paper", transfer="geometric")


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "FileNotFoundError"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("import rapid", "registers no rule: call rapid.register_transfer"),
    ],
)
def test_a_file_without_rules_is_refused(tmp_path, content, told):
    path = tmp_path / "rules.py"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigurationError, match=r"rules\.py") as refused:
        run_rules(path)
    assert told in str(refused.value)

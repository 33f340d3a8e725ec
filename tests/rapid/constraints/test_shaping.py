"""Shaped logits: every drafter's answers against the slow reference, and what shaping may cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import rapid
from rapid.config import SamplingConfig, SpeculationConfig
from rapid.constraints.request_shaping import open_shaping
from rapid.constraints.shaping import Shaping, shape_rows
from rapid.errors import BadRequest
from rapid.speculation.fast.step import answer_together
from tests.rapid.tiny_models import EOS, VOCAB, checkpoint, loaded, random_prompt
from tests.reference import Reference, Settings, load_reference

LONG, SHORT = random_prompt(90, seed=1).tolist(), random_prompt(30, seed=2).tolist()
NUM_TOKENS = 24
BIAS = ((3, -100.0), (5, 1.5), (8, -0.5), (13, 2.0))


@pytest.fixture(params=["one by one", pytest.param("together", marks=pytest.mark.slow)])
def way(request: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """Rows are drawn by the fast code of a CPU, and by CUDA's kernels in the interpreter."""
    monkeypatch.setattr("rapid.speculation.fast.step._LONG", 0)
    monkeypatch.setattr("rapid.speculation.fast.contenders._SPARSE", 0)
    if request.param == "together":
        name = "rapid.engines.execution.compute.answer_questions"
        monkeypatch.setattr(name, answer_together)
    return str(request.param)


def answer(
    drafter: Any,
    bias: tuple[tuple[int, float], ...] = BIAS,
    shaping: dict[str, Any] | None = None,
    **settings: Any,
) -> Any:
    temperature = settings.pop("temperature", 0.8)
    return rapid.generate(
        loaded(),
        drafter,
        LONG,
        SHORT if drafter is not None and not _reads_no_text(drafter) else (),
        max_tokens=NUM_TOKENS,
        sampling=SamplingConfig(
            **{"temperature": temperature, "seed": 5, "logit_bias": bias} | (shaping or {})
        ),
        speculation=SpeculationConfig(max_draft=4, coupling="shared_noise", **settings),
    ).token_ids


def _reads_no_text(drafter: Any) -> bool:
    return isinstance(drafter, rapid.PromptLookup | rapid.WindowDrafting)


def slow(settings: Settings, *, is_fused: bool) -> Reference:
    return Reference(
        load_reference(checkpoint(seed=0)),
        LONG,
        settings,
        num_tokens=NUM_TOKENS,
        drafter=load_reference(checkpoint(seed=1)) if is_fused else None,
        drafter_prompt=SHORT,
        witness_prompt=SHORT if is_fused and settings.transfer == "adaptive" else None,
        eos_ids=[EOS],
        vocab=VOCAB,
        logit_bias=BIAS,
    )


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_whoever_drafts_the_answer_is_that_of_the_biased_target(way: str, temperature: float):
    want = slow(Settings(seed=5, temperature=temperature), is_fused=False)
    drafters = (None, loaded(seed=1), rapid.PromptLookup(), rapid.WindowDrafting(window=8))
    for drafter in drafters:
        got = answer(drafter, temperature=temperature, eta=0.0)
        assert not want.is_tied(got)
    assert answer(None, (), temperature=temperature, eta=0.0) != got


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    ("transfer", "eta"), [("adaptive", 20.0), ("boost", 10.0), ("distill", 10.0), ("mixture", 1.0)]
)
def test_target_drafter_and_witness_are_biased_alike(
    way: str, temperature: float, transfer: Any, eta: float
):
    settings = Settings(seed=5, temperature=temperature, transfer=transfer, eta=eta)
    got = answer(loaded(seed=1), temperature=temperature, transfer=transfer, eta=eta)
    assert not slow(settings, is_fused=True).is_tied(got)


@pytest.mark.parametrize("temperature", [0.0, 2.0])
@pytest.mark.parametrize("eta", [0.0, 10.0])
def test_a_token_at_minus_100_never_comes_and_one_at_100_always_does(
    way: str, temperature: float, eta: float
):
    settings = {"temperature": temperature, "eta": eta}
    half = tuple((token, -100.0) for token in range(0, VOCAB, 2))
    assert all(token % 2 for token in answer(loaded(seed=1), half, **settings))
    always = answer(loaded(seed=1), ((9, 100.0),), **settings)
    assert always == (9,) * NUM_TOKENS


def test_an_answer_without_a_constraint_never_calls_one(monkeypatch: pytest.MonkeyPatch):
    calls: list[int] = []

    def counted(shaping: Any, logits: torch.Tensor, drafted: Sequence[int]) -> torch.Tensor:
        calls.append(len(logits))
        return shape_rows(shaping, logits, drafted)

    monkeypatch.setattr("rapid.engines.work.base.shape_rows", counted)
    assert open_shaping(SamplingConfig()) is None
    assert len(answer(loaded(seed=1), ())) > 0
    assert not calls
    answer(loaded(seed=1))
    assert len(calls) > NUM_TOKENS / 4


def test_a_token_that_the_models_lack_is_refused():
    with pytest.raises(BadRequest, match="beyond the vocabulary"):
        answer(None, ((VOCAB, 1.0),), eta=0.0)


class NoRepeat(Shaping):
    """Forbids the end and every token that was said, so that its state must follow every token."""

    def __init__(self) -> None:
        self.tokens = [EOS]

    def shape(self, row: torch.Tensor) -> torch.Tensor:
        shaped = row.clone()
        shaped[self.tokens] = -torch.inf
        return shaped

    def advance(self, token_ids: Sequence[int]) -> None:
        self.tokens += token_ids

    def roll_back(self, num_tokens: int) -> None:
        del self.tokens[len(self.tokens) - num_tokens :]


@pytest.mark.parametrize(("drafted", "num_rows"), [([], 1), ([1, 2], 3), ([1, 2], 1)])
def test_each_row_is_shaped_behind_its_tokens_and_the_state_stays(
    drafted: list[int], num_rows: int
):
    shaping, logits = NoRepeat(), torch.zeros(num_rows, 4)
    rows = shape_rows(shaping, logits, drafted)
    said = [EOS, *drafted]
    forbidden = [set(row.isinf().nonzero().flatten().tolist()) for row in rows]
    assert forbidden == [set(said[: len(said) - after]) for after in reversed(range(num_rows))]
    assert shaping.tokens == [EOS]
    assert not logits.any()


@pytest.fixture
def no_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rapid.engines.kv.leases.lease_ledger.open_shaping", lambda *_: NoRepeat())


@pytest.mark.usefixtures("no_repeats")
def test_a_shaping_with_a_state_is_exact_for_every_drafter():
    plain = answer(None, eta=0.0)
    for drafter in (loaded(seed=1), loaded(), rapid.PromptLookup(), rapid.WindowDrafting(window=8)):
        assert answer(drafter, eta=0.0) == plain
    assert len(set(plain)) == NUM_TOKENS

"""Penalties and bounds that follow the answer: by their definition, and exact for every drafter."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import rapid
from rapid.checkpoints.vocabulary import pack_tokens
from rapid.config import SamplingConfig
from rapid.constraints.request_shaping import open_shaping
from rapid.constraints.shaping import shape_rows
from rapid.errors import BadRequest
from tests.rapid.constraints.test_shaping import LONG, NUM_TOKENS, answer, slow
from tests.rapid.tiny_models import EOS, VOCAB, loaded
from tests.reference import Settings

SETTINGS: list[dict[str, Any]] = [
    {"presence_penalty": 1.5},
    {"frequency_penalty": -0.75},
    {"presence_penalty": -0.5, "frequency_penalty": 2.0, "min_tokens": 9},
    {"min_tokens": 5, "allowed_token_ids": (1, 4, 9, 11, EOS)},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.8, "presence_penalty": 1.0, "stop_token_ids": (7,), "min_tokens": 6},
    {"bad_words": ((5,), (8, 9), (9, 9, 12)), "allowed_token_ids": (5, 7, 8, 9, 12, 20)},
    {"min_p": 0.3},
    {"min_p": 0.05, "frequency_penalty": 1.0},
    {"ignore_eos": True, "logit_bias": ((EOS, 3.0),)},
    {"stop_token_ids": (6, 11), "min_tokens": 3},
]


def define(row: torch.Tensor, said: Sequence[int], settings: dict[str, Any]) -> torch.Tensor:
    """Return a row behind these tokens, token by token as the definitions have it."""
    shaped = row.clone()
    for token, bias in settings.get("logit_bias", ()):
        shaped[token] += bias
    ends = {EOS, *settings.get("stop_token_ids", ())}
    ends -= {EOS} if settings.get("ignore_eos") else set()
    forbidden = {
        word[-1]
        for word in settings.get("bad_words", ())
        if list(word[:-1]) == list(said)[len(said) - len(word) + 1 :]
    }
    for token in range(len(row)):
        count = said.count(token)
        if count or token in LONG:
            penalty = settings.get("repetition_penalty", 1)
            shaped[token] *= penalty if shaped[token] < 0 else 1 / penalty
        shaped[token] -= settings.get("presence_penalty", 0) * (count > 0)
        shaped[token] -= settings.get("frequency_penalty", 0) * count
        is_early = token in ends and len(said) < settings.get("min_tokens", 0)
        allowed = settings.get("allowed_token_ids")
        if is_early or (allowed and token not in allowed) or token in forbidden:
            shaped[token] = -torch.inf
    return shaped


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_rows_are_shaped_as_defined_however_the_answer_got_there(settings: dict[str, Any]):
    rng, said = random.Random(3), list[int]()
    shaping = open_shaping(SamplingConfig(**settings), {EOS}, None, pack_tokens(LONG))
    if shaping is None:  # a filter, or ends
        assert settings.keys() <= {"min_p", "ignore_eos", "stop_token_ids"}
        return
    for _ in range(60):
        drafted = [rng.randrange(VOCAB) for _ in range(rng.randint(0, 4))]
        logits = torch.randn(len(drafted) + 1, VOCAB)
        rows = shape_rows(shaping, logits, drafted)
        want = [define(row, said + drafted[:index], settings) for index, row in enumerate(logits)]
        torch.testing.assert_close(rows, torch.stack(want))
        shaping.advance(drafted)
        said += drafted
        back = rng.randint(0, min(3, len(said)))
        shaping.roll_back(back)
        del said[len(said) - back :]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_answer_is_plains_whoever_drafts(settings: dict[str, Any]):
    plain = answer(None, (), settings, eta=0.0)
    for drafter in (loaded(seed=1), loaded(), rapid.PromptLookup(), rapid.WindowDrafting(window=8)):
        assert answer(drafter, (), settings, eta=0.0) == plain
    assert len(plain) >= settings.get("min_tokens", 0)
    assert set(plain) <= {*settings.get("allowed_token_ids", range(VOCAB))}
    ends = {EOS, *settings.get("stop_token_ids", ())}
    if settings.get("ignore_eos"):
        assert EOS in plain
        ends -= {EOS}
    assert not ends & {*plain[:-1]}
    assert plain[-1] in ends or len(plain) == NUM_TOKENS


def test_a_strong_penalty_lets_no_token_come_twice_and_min_tokens_no_end_early():
    settings = {"presence_penalty": 2.0, "frequency_penalty": 2.0, "min_tokens": NUM_TOKENS}
    for eta in (0.0, 10.0):
        told = answer(loaded(seed=1), (), settings, eta=eta, temperature=0.0)
        assert len(told) == NUM_TOKENS
        assert EOS not in told
        assert len(set(told)) > len(set(answer(loaded(seed=1), (), {}, eta=eta, temperature=0.0)))


def test_bounds_that_leave_no_token_end_the_answer_with_their_names():
    with pytest.raises(BadRequest, match="leave no token"):
        answer(None, (), {"allowed_token_ids": (5,), "bad_words": ((5, 5),)}, eta=0.0)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(("transfer", "eta"), [("adaptive", 10.0), ("boost", 10.0)])
def test_min_p_filters_what_is_sampled_as_the_reference_does(
    temperature: float, transfer: Any, eta: float
):
    settings = Settings(seed=5, temperature=temperature, transfer=transfer, eta=eta, min_p=0.2)
    got = answer(
        loaded(seed=1),
        shaping={"min_p": 0.2},
        temperature=temperature,
        transfer=transfer,
        eta=eta,
    )
    assert not slow(settings, is_fused=True).is_tied(got)

"""The public API in process, against the slow reference."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import threading

import pytest

import rapid
from rapid.config import SamplingConfig, SpeculationConfig
from rapid.engines.engine import Engine
from rapid.errors import ConfigurationError, DrafterUnavailable, PromptTooLong
from tests.rapid.tiny_models import (
    EOS,
    VOCAB,
    checkpoint,
    engine_config,
    loaded,
    out_of_memory,
    random_prompt,
)
from tests.reference import Reference, Settings, load_reference

LONG, SHORT = random_prompt(90, seed=1).tolist(), random_prompt(30, seed=2).tolist()
NUM_TOKENS = 40
GREEDY = SamplingConfig(temperature=0)
LOSSLESS = SpeculationConfig(eta=0)


def slow(drafter_seed: int | None, settings: Settings) -> Reference:
    return Reference(
        load_reference(checkpoint(seed=0)),
        LONG,
        settings,
        num_tokens=NUM_TOKENS,
        drafter=load_reference(checkpoint(seed=drafter_seed)) if drafter_seed else None,
        drafter_prompt=SHORT,
        witness_prompt=SHORT if settings.transfer == "adaptive" else None,
        eos_ids=[EOS],
        vocab=VOCAB,
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("transfer", "eta"),
    [
        ("boost", 10.0),
        ("distill", 10.0),
        ("boost", 50.0),
        ("adaptive", 20.0),
        ("mixture", 1.0),
        ("mixture", 3.0),
    ],
)
def test_fused_equals_the_slow_reference_at_every_draft_length(temperature, transfer, eta):
    settings = Settings(
        seed=11, temperature=temperature, top_p=0.95, eta=eta, transfer=transfer, draft_top_k=16
    )
    want = slow(1, settings)
    texts = set()
    for max_draft in (1, 3, 10):
        got = rapid.generate(
            loaded(seed=0),
            loaded(seed=1),
            LONG,
            SHORT,
            max_tokens=NUM_TOKENS,
            sampling=SamplingConfig(temperature=temperature, top_p=0.95, seed=11),
            speculation=SpeculationConfig(
                max_draft=max_draft, eta=eta, transfer=transfer, draft_top_k=16
            ),
        )
        assert not want.is_tied(got.token_ids)
        texts.add(got.token_ids)
    assert len(texts) == 1


def test_lossless_equals_plain_and_the_slow_reference():
    settings = Settings(seed=5, temperature=0.8, top_k=20)
    sampling = SamplingConfig(temperature=0.8, top_k=20, seed=5)
    common = {"max_tokens": NUM_TOKENS, "sampling": sampling}
    plain = rapid.generate(loaded(), None, LONG, **common)
    lossless = rapid.generate(loaded(), loaded(seed=1), LONG, SHORT, speculation=LOSSLESS, **common)
    assert plain.token_ids == lossless.token_ids
    assert not slow(None, settings).is_tied(plain.token_ids)
    assert plain.statistics.drafted == 0
    assert lossless.statistics.drafted > 0


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_drafter_may_read_all_that_the_target_reads(temperature):
    sampling = SamplingConfig(temperature=temperature, seed=5)
    common = {"max_tokens": NUM_TOKENS, "sampling": sampling}
    plain = rapid.generate(loaded(), None, LONG, **common)
    naive = rapid.generate(loaded(), loaded(seed=1), LONG, LONG, speculation=LOSSLESS, **common)
    itself = rapid.generate(loaded(), loaded(), LONG, LONG, speculation=LOSSLESS, **common)
    assert plain.token_ids == naive.token_ids == itself.token_ids
    assert naive.statistics.accepted < naive.statistics.drafted
    assert itself.statistics.accepted == itself.statistics.drafted
    assert set(itself.statistics.origins) == {"drafted"}


def test_an_answer_can_be_made_again_from_its_seed():
    first = rapid.generate(loaded(), loaded(seed=1), LONG, SHORT, max_tokens=12, num_logprobs=2)
    again = rapid.generate(
        loaded(),
        loaded(seed=1),
        LONG,
        SHORT,
        max_tokens=12,
        sampling=SamplingConfig(seed=first.seed),
        speculation=SpeculationConfig(coupling="maximal"),
    )
    assert again.token_ids == first.token_ids
    assert [entry.token_id for entry in first.logprobs] == list(first.token_ids)


def test_without_a_seed_every_call_draws_one():
    sampling = SamplingConfig(temperature=0.8)
    drawn = {
        rapid.generate(loaded(), None, LONG, max_tokens=2, sampling=each).seed
        for each in (None, sampling, sampling)
    }
    assert len(drawn) == 3
    given = SamplingConfig(seed=0)  # the default of the class, but given
    assert rapid.generate(loaded(), None, LONG, max_tokens=2, sampling=given).seed == 0


@pytest.mark.parametrize("seed", [0, 5])
def test_with_a_seed_noise_is_shared_unless_the_coupling_is_given(seed):
    settings = ({}, {"coupling": "shared_noise"}, {"coupling": "maximal"})
    usual, shared, maximal = (
        rapid.generate(
            loaded(),
            loaded(seed=1),
            LONG,
            SHORT,
            max_tokens=NUM_TOKENS,
            sampling=SamplingConfig(seed=seed),
            speculation=SpeculationConfig(max_draft=4, **each),
        ).token_ids
        for each in settings
    )
    assert usual == shared != maximal


def test_eta_is_zero_where_nothing_can_be_transferred_and_ten_else():
    common = {"max_tokens": NUM_TOKENS, "sampling": SamplingConfig(seed=6)}
    usual, ten, lossless = (
        rapid.generate(loaded(), loaded(seed=1), LONG, SHORT, speculation=each, **common).token_ids
        for each in (None, SpeculationConfig(eta=10), LOSSLESS)
    )
    assert usual == ten != lossless
    for drafter in (rapid.PromptLookup(), rapid.WindowDrafting(window=8)):
        for speculation in (None, SpeculationConfig(max_draft=4), LOSSLESS):
            got = rapid.generate(loaded(), drafter, LONG, speculation=speculation, **common)
            assert got.token_ids == lossless
        with pytest.raises(ConfigurationError, match="reads nothing that the target does not"):
            rapid.generate(loaded(), drafter, LONG, speculation=SpeculationConfig(eta=10))


async def test_it_works_inside_a_running_loop():
    assert rapid.generate(loaded(), None, LONG, max_tokens=3, sampling=GREEDY).token_ids
    await asyncio.sleep(0)


@pytest.mark.parametrize("temperature", [1e-300, 1e-8])
def test_a_temperature_of_almost_nothing_is_greedy(temperature):
    for drafter, eta in ((None, 10.0), (loaded(seed=1), 0.0), (loaded(seed=1), 10.0)):
        greedy, almost = (
            rapid.generate(
                loaded(),
                drafter,
                LONG,
                SHORT,
                max_tokens=12,
                sampling=SamplingConfig(temperature=each, seed=5),
                speculation=SpeculationConfig(eta=eta),
                num_logprobs=2,
            )
            for each in (0.0, temperature)
        )
        assert almost.token_ids == greedy.token_ids
        for entry in almost.logprobs:
            logprobs = [entry.logprob, *(logprob for _, logprob in entry.top)]
            assert not any(math.isnan(logprob) for logprob in logprobs)


def test_engines_are_made_as_the_models_were_loaded_for(monkeypatch):
    made = []

    def engine(loaded, config, **options):
        made.append(config)
        return Engine(loaded, config, **options)

    monkeypatch.setattr("rapid.engines.local_ports.Engine", engine)
    settings = {"threads": 1, "step_tokens": 32, "page_tokens": 4, "max_context": 110}
    model = rapid.load(str(checkpoint()), device="cpu", dtype="float32", **settings)
    assert rapid.generate(model, None, LONG, max_tokens=3, sampling=GREEDY).token_ids
    assert (made[0].threads, made[0].step_tokens, made[0].page_tokens) == (1, 32, 4)
    with pytest.raises(PromptTooLong):
        rapid.generate(model, None, LONG, max_tokens=30)


def test_no_engine_is_left_behind_when_the_second_cannot_be_made():
    cramped = dataclasses.replace(loaded(), config=engine_config(max_context=10**6), max_context=16)
    before = set(threading.enumerate())
    with pytest.raises(ConfigurationError, match="beyond the 16 positions"):
        rapid.generate(loaded(), cramped, LONG, SHORT, max_tokens=16)
    left = {thread.name for thread in set(threading.enumerate()) - before}
    assert "rapid-engine" not in left


def test_a_drafter_that_is_lost_is_told_with_the_token_and_the_reason():
    speculation = SpeculationConfig(eta=50, max_draft=3)
    common = {"max_tokens": NUM_TOKENS, "sampling": GREEDY, "speculation": speculation}
    whole = rapid.generate(loaded(seed=0), loaded(seed=1), LONG, SHORT, **common)
    assert (whole.statistics.plain_from, whole.statistics.plain_reason) == (None, "")
    with (
        out_of_memory(loaded(seed=1).model, forward=6),
        pytest.warns(UserWarning, match=r"the target's own from token [1-9]\d* on .*out of memory"),
    ):
        told = rapid.generate(loaded(seed=0), loaded(seed=1), LONG, SHORT, **common)
    lost_at = told.statistics.plain_from
    assert "OutOfMemoryError" in told.statistics.plain_reason
    assert lost_at is not None
    kept = told.token_ids[:lost_at]
    assert kept == whole.token_ids[:lost_at]
    plain = rapid.generate(
        loaded(seed=0), None, [*LONG, *kept], max_tokens=NUM_TOKENS - lost_at, sampling=GREEDY
    )
    assert told.token_ids[lost_at:] == plain.token_ids


@pytest.mark.parametrize(
    "speculation", [SpeculationConfig(eta=50), SpeculationConfig(rule="paper")]
)
def test_a_drafter_that_is_lost_before_the_first_token_of_a_fused_answer_is_an_error(speculation):
    warm = SamplingConfig(temperature=1.0, seed=3)
    common = {"max_tokens": NUM_TOKENS, "sampling": warm}
    with (
        out_of_memory(loaded(seed=1).model, forward=2),
        pytest.raises(DrafterUnavailable, match="out of memory"),
    ):
        rapid.generate(
            loaded(seed=0), loaded(seed=1), LONG, SHORT, speculation=speculation, **common
        )


@pytest.mark.parametrize("transfer", ["boost", "adaptive"])
def test_no_lease_expires_while_the_other_model_reads(transfer):
    speculation = SpeculationConfig(transfer=transfer, eta=50, max_draft=3)
    common = {"max_tokens": NUM_TOKENS, "sampling": GREEDY, "speculation": speculation}
    usual = rapid.generate(loaded(seed=0), loaded(seed=1), LONG, SHORT, **common)
    hasty = [
        dataclasses.replace(loaded(seed=seed), config=engine_config(seed=seed, lease_ttl_s=1e-6))
        for seed in range(2)
    ]
    answer = rapid.generate(*hasty, LONG, SHORT, **common)
    assert answer.statistics.plain_from is None
    assert answer.token_ids == usual.token_ids


def test_what_cannot_be_done_is_said():
    with pytest.raises(PromptTooLong, match="token"):
        rapid.generate(loaded(), None, LONG, max_tokens=5000)
    with pytest.raises(ConfigurationError, match="end answers with different tokens"):
        rapid.generate(loaded(), loaded(eos=5), LONG, SHORT)
    with pytest.raises(ConfigurationError, match="no such checkpoint"):
        rapid.load("/nowhere/at-all")

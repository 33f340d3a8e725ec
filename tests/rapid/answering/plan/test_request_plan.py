from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from random import Random
from typing import get_args

import pytest

from rapid.answering.mode.decisions import (
    SAYS_NOTHING,
    Decision,
    Evidence,
    decide,
    decide_by_reading,
    decide_without_reader,
    without_drafter,
)
from rapid.answering.plan.request_plan import (
    answer_tokens,
    sampling_of,
    speculation_of,
    spell_words,
)
from rapid.chat_messages import Message
from rapid.config import Mode, OwnDrafting, SpeculationConfig
from rapid.errors import BadRequest, PromptTooLong, RetrievalUnavailable
from rapid.messages import GenerateRequest, SpeculationRequest
from rapid.receipt import Cause

OWN: list[OwnDrafting] = [kind() for kind in get_args(OwnDrafting)]
FOUND = Evidence(3)
WEAK = Evidence(3, is_enough=False)
NOTHING = Evidence(0, "nothing above the floor")
NO_TEXT = Evidence(0, "nothing to retrieve from")
LOST = Evidence(0, "retrieval lost")


def request(seed: int | None = None, **speculation: object) -> GenerateRequest:
    return GenerateRequest(
        "r", "local", (Message("user", "?"),), seed=seed,
        speculation=SpeculationRequest(**speculation),  # type: ignore[arg-type]
    )  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "evidence", "mode", "contract", "is_drafted"),
    [
        ("auto", FOUND, "fused", "fused", True),
        ("auto", WEAK, "plain", "target", False),
        ("fused", WEAK, "fused", "fused", True),
        ("lossless", WEAK, "lossless", "target", True),
        ("auto", NOTHING, "plain", "target", False),
        ("auto", LOST, "plain", "target", False),
        ("fused", FOUND, "fused", "fused", True),
        ("auto", NO_TEXT, "plain", "target", False),
        ("fused", NOTHING, "fused", "target", False),
        ("fused", NO_TEXT, "fused", "target", False),
        ("lossless", NO_TEXT, "lossless", "target", True),
        ("paper", FOUND, "paper", "paper", True),
        ("paper", NOTHING, "paper", "target", False),
        ("lossless", FOUND, "lossless", "target", True),
        ("lossless", NOTHING, "lossless", "target", True),
        ("lossless", LOST, "plain", "target", False),
        ("plain", FOUND, "plain", "target", False),
        ("rag", NOTHING, "rag", "drafter", False),
    ],
)
def test_evidence_chooses_mode_and_contract(
    asked: Mode, evidence: Evidence, mode: Mode, contract: str, is_drafted: bool
) -> None:
    decision = decide(asked, evidence)
    assert (decision.mode, decision.contract, decision.is_drafted) == (mode, contract, is_drafted)
    assert decision.reason
    is_asked_for = asked in ("fused", "paper", "rag") and not evidence.num_chunks
    assert decision.is_fallback == (is_asked_for or evidence.is_lost)


@pytest.mark.parametrize("asked", ["fused", "paper", "rag"])
def test_a_mode_that_needs_retrieval_is_refused_where_it_failed(asked: Mode) -> None:
    with pytest.raises(RetrievalUnavailable, match=r"did not answer.* or use mode 'auto'"):
        decide(asked, LOST)


def test_rag_without_any_text_to_search_is_refused_as_a_mistake() -> None:
    with pytest.raises(BadRequest, match="attach some, or use 'plain'") as refused:
        decide("rag", NO_TEXT)
    assert refused.value.param == "rapid.mode"


@pytest.mark.parametrize("asked", ["rag", "lossless", "fused", "paper"])
def test_a_mode_that_is_asked_for_says_if_the_documents_are_about_something_else(
    asked: Mode,
) -> None:
    for evidence in (WEAK, NOTHING):
        reason = decide(asked, evidence).reason
        assert reason.startswith("asked for")
        assert any(each in reason for each in SAYS_NOTHING)
    assert not any(each in decide(asked, FOUND).reason for each in SAYS_NOTHING)


@pytest.mark.parametrize("drafting", OWN)
@pytest.mark.parametrize("asked", ["auto", "lossless"])
def test_own_drafting_samples_the_target_in_every_mode(asked: Mode, drafting: OwnDrafting) -> None:
    decision = decide_without_reader(asked, drafting)
    assert (decision.mode, decision.contract, decision.is_drafted) == ("lossless", "target", True)
    assert drafting.name in decision.reason
    defaults = SpeculationConfig(eta=3.0)
    assert speculation_of(request(mode=asked, eta=5.0), defaults, drafting).eta == 0.0


@pytest.mark.parametrize("drafting", OWN)
@pytest.mark.parametrize("asked", ["fused", "paper", "rag"])
def test_own_drafting_cannot_do_what_needs_a_reader(asked: Mode, drafting: OwnDrafting) -> None:
    with pytest.raises(BadRequest, match=f"this server drafts by {drafting.name}: use"):
        decide_without_reader(asked, drafting)


def test_without_a_drafter_the_target_goes_on_and_says_why() -> None:
    decision = without_drafter("no drafter")
    assert (decision.mode, decision.contract, decision.is_drafted) == ("plain", "target", False)
    assert "no drafter" in decision.reason


def decisions(number: int) -> Iterator[Decision]:
    """Decisions of every function, over outcomes drawn at random."""
    draw = Random(number)
    for _ in range(number):
        asked, cause = draw.choice(get_args(Mode)), draw.choice(get_args(Cause))
        evidence = Evidence(draw.choice((0, 3)), cause, draw.random() < 0.5)
        with suppress(RetrievalUnavailable, BadRequest):
            yield decide(asked, evidence)
        yield decide_by_reading(draw.gauss(0.0, 5.0), least=draw.gauss(0.0, 1.0))
        yield decide_without_reader(draw.choice(("auto", "lossless")), draw.choice(OWN))
        yield without_drafter(cause)


def test_metrics_see_few_causes_and_the_receipt_the_numbers() -> None:
    """A cause is a label, of which there may only be so many; the sentence has the log odds."""
    made = list(decisions(1_000))
    assert {each.cause for each in made} == set(get_args(Cause))
    assert len({each.reason for each in made}) > 500
    assert decide_by_reading(-3.0, least=0.5).reason.endswith("what was retrieved (-3.00)")
    assert without_drafter("no drafter").reason == (
        "no drafter could be had: the target went on alone"
    )


def test_a_request_without_a_seed_is_given_one() -> None:
    seeds = {sampling_of(request()).seed for _ in range(5)}
    assert len(seeds) == 5
    assert all(0 <= seed < 2**53 for seed in seeds)
    assert sampling_of(request(seed=7)).seed == 7


def test_a_seed_that_was_drawn_already_holds_but_asks_for_nothing() -> None:
    """The ingress draws it, to send the same request twice; the coupling stays the faster one."""
    assert sampling_of(replace(request(), drawn_seed=9)).seed == 9
    assert sampling_of(replace(request(seed=7), drawn_seed=9)).seed == 7
    drawn = speculation_of(replace(request(), drawn_seed=9), SpeculationConfig())
    assert drawn.coupling == "maximal"


def test_a_seed_asks_for_the_same_text_again() -> None:
    defaults = SpeculationConfig()
    assert speculation_of(request(), defaults).coupling == "maximal"
    assert speculation_of(request(seed=7), defaults).coupling == "shared_noise"
    assert speculation_of(request(seed=7, coupling="maximal"), defaults).coupling == "maximal"


def test_only_a_request_for_it_gets_the_papers_rule() -> None:
    defaults = SpeculationConfig(eta=3.0, max_draft=6)
    for mode in ("auto", "fused", "lossless", "plain", "rag"):
        assert speculation_of(request(mode=mode), defaults).rule == "exact"
    for asked in (request(mode="paper"), request(seed=7, mode="paper")):
        speculation = speculation_of(asked, defaults)
        assert speculation == SpeculationConfig(rule="paper", eta=3.0, max_draft=6)
        assert speculation.coupling == "maximal"
    assert speculation_of(request(mode="paper", eta=20.0), defaults).eta == 20.0


def test_what_the_request_does_not_say_is_configured() -> None:
    defaults = SpeculationConfig(eta=3.0, max_draft=6, draft_top_k=32)
    asked = speculation_of(request(eta=1.0), defaults)
    assert (asked.eta, asked.max_draft, asked.draft_top_k) == (1.0, 6, 32)
    assert speculation_of(request(all_draft_tokens=True), defaults).draft_top_k is None
    assert speculation_of(request(mode="lossless", eta=5.0), defaults).eta == 0.0


def test_a_mode_that_does_not_exist_is_no_auto() -> None:
    with pytest.raises(AssertionError, match="losless"):
        decide("losless", FOUND)  # type: ignore[arg-type]


def test_the_answer_is_cut_to_the_room_only_when_nobody_asked() -> None:
    assert answer_tokens(None, 512, 100, 4096) == 512
    assert answer_tokens(None, 512, 4000, 4096) == 96
    assert answer_tokens(50, 512, 4000, 4096) == 50
    with pytest.raises(PromptTooLong, match=r"4 more than .* 4096 tokens. Use rag"):
        answer_tokens(100, 512, 4000, 4096, hint=" Use rag.")
    with pytest.raises(PromptTooLong, match="905 more than the drafter's context of 4096"):
        answer_tokens(None, 512, 5000, 4096, whose="drafter")


def test_bad_words_are_spelled_with_a_space_and_without() -> None:
    words = spell_words(("ab", "c", ""), lambda text: [*map(ord, text)])
    assert words == ((32,), (32, 97, 98), (32, 99), (97, 98), (99,))

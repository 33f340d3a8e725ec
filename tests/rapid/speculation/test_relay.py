"""Who drafts changes from round to round, and the answer does not."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rapid.config import SamplingConfig, SpeculationConfig
from rapid.errors import DrafterUnavailable
from rapid.messages import Verdict
from rapid.speculation.lookup import PromptIndex, PromptLookupDrafter
from rapid.speculation.loop import speculate
from rapid.speculation.relay import Relay
from rapid.speculation.statistics import RoundStatistics
from tests.toy import ToyDrafter, ToyModel, ToyVerifier

LENGTH = 40
TARGET, DRAFTER = ToyModel("target", vocab=3), ToyModel("drafter", vocab=3)


@dataclass
class ScriptedPace:
    """It wants to draft in the rounds that its script says, and gains what that says."""

    gains: list[int]
    gain: float = 0.0
    observed: list[int] = field(default_factory=list)
    num_skipped: int = 0

    def next_length(self, limit: int) -> int:
        self.gain = self.gains.pop(0) if self.gains else 0
        return min(limit, int(self.gain))

    def observe(self, verdict: Verdict) -> None:
        self.observed.append(verdict.num_drafted)

    def skip(self, num_tokens: int) -> None:
        self.num_skipped += num_tokens


async def rounds_of(drafter, sampling, coupling="shared_noise") -> list[Verdict]:
    """The rounds of one answer; a lost model is dropped from a relay."""
    speculation = SpeculationConfig(eta=0, coupling=coupling, max_draft=4)

    def lose(_: DrafterUnavailable) -> Relay:
        return drafter.lose_model()

    rounds = speculate(
        drafter,
        ToyVerifier(TARGET, sampling, speculation),
        max_tokens=LENGTH,
        max_draft=4,
        pace=drafter,
        on_loss=lose,
    )
    return [verdict async for verdict in rounds]


def tokens(rounds: list[Verdict]) -> list[int]:
    statistics = RoundStatistics()
    for verdict in rounds:
        assert verdict.position == len(statistics.token_ids)
        statistics.observe(verdict)
    return statistics.token_ids


gains = st.lists(st.integers(0, 4), max_size=LENGTH)


@settings(max_examples=60, deadline=None)
@given(
    of_text=gains,
    of_model=gains,
    temperature=st.sampled_from([0.0, 0.7]),
    seed=st.integers(0, 99),
    lost_at=st.none() | st.integers(0, 30),
)
async def test_whoever_drafts_and_whenever_that_changes_the_tokens_are_those_of_plain(
    of_text, of_model, temperature, seed, lost_at
):
    sampling = SamplingConfig(temperature=temperature, seed=seed)
    speculation = SpeculationConfig(eta=0, coupling="shared_noise", max_draft=4)
    model = ToyDrafter(DRAFTER, sampling, speculation, lost_at=lost_at)
    text = PromptLookupDrafter(PromptIndex([0, 1, 2, 0, 1]))
    paces = ScriptedPace(list(of_text)), ScriptedPace(list(of_model))
    got = await rounds_of(Relay(text, paces[0], model, paces[1]), sampling)
    plain = await rounds_of(None, sampling)
    assert tokens(got) == tokens(plain)
    for pace in paces:
        assert len(pace.observed) <= len(got)
    if lost_at is None:
        text_rounds = [each for each in got if each.lease_id == "prompt-lookup"]
        seen = model.committed
        assert seen == tokens(got)[: len(seen)]  # it was told of every round, whoever drafted
        skipped = sum(len(each.token_ids) for each in text_rounds)
        assert paces[1].num_skipped == skipped


async def test_a_round_goes_to_the_larger_gain_and_to_the_text_only_where_something_matches():
    sampling = SamplingConfig(temperature=0.0)
    plain = tokens(await rounds_of(None, sampling))
    for of_text, of_model, drafts in ((4, 2, "prompt-lookup"), (2, 4, "toy"), (0, 2, "toy")):
        speculation = SpeculationConfig(eta=0, coupling="shared_noise", max_draft=4)
        model = ToyDrafter(DRAFTER, sampling, speculation)
        text = PromptLookupDrafter(PromptIndex([*plain, 9, *plain[:2]]))
        relay = Relay(text, ScriptedPace([of_text]), model, ScriptedPace([of_model]))
        # The text goes on behind the two tokens that it ends with, which have not been said yet.
        assert relay.next_length(4) == (of_text if drafts == "prompt-lookup" else of_model)
        block = relay.draft(None, 2)
        assert (getattr(block, "lease_id", "toy") == "prompt-lookup") == (drafts == "prompt-lookup")
    nothing = Relay(
        PromptLookupDrafter(PromptIndex([5, 6, 7])), ScriptedPace([4]), model, ScriptedPace([2])
    )
    assert nothing.next_length(4) == 2


@pytest.mark.parametrize("temperature", [0.0, 0.9])
async def test_the_last_one_left_drafts_where_the_model_is_lost(temperature):
    sampling = SamplingConfig(temperature=temperature, seed=3)
    plain = tokens(await rounds_of(None, sampling))
    speculation = SpeculationConfig(eta=0, coupling="shared_noise", max_draft=4)
    model = ToyDrafter(DRAFTER, sampling, speculation, lost_at=10)
    text = PromptLookupDrafter(PromptIndex([9, *plain, 8]))
    relay = Relay(text, ScriptedPace([0] * 3 + [4] * LENGTH), model, ScriptedPace([2] * LENGTH))
    got = await rounds_of(relay, sampling)
    assert tokens(got) == plain
    behind = [each for each in got if each.position >= 12]
    assert {each.lease_id for each in behind} == {"prompt-lookup"}
    assert sum(each.num_accepted for each in behind) == sum(len(each.token_ids) for each in behind)

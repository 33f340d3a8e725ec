"""Retrieving again after rejected drafts: when it is due, and what is sampled then."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

import rapid
from rapid.config import SamplingConfig, SpeculationConfig
from rapid.engines.engine import Engine
from rapid.errors import ConfigurationError, DrafterUnavailable, PromptTooLong
from rapid.messages import Verdict
from rapid.speculation.loop import speculate
from rapid.speculation.pace.refreshing import LEAST_DISTANCE, MAX_REFRESHES, RefreshTrigger
from tests.branches import Branches, assert_same, branches
from tests.rapid.speculation.test_rule_proofs import target_probs, texts
from tests.rapid.tiny_models import loaded, random_prompt
from tests.toy import ToyDrafter, ToyModel, ToyVerifier

__all__ = ["branches"]

TARGET = ToyModel("target")
LENGTH = 40


def verdict(position: int, kept: int, drafted: int) -> Verdict:
    """A round that ends in a rejection unless all was kept."""
    token_ids = (7,) * min(kept + 1, drafted)
    return Verdict("a", 0, position, token_ids, drafted, kept, False)


class Refreshing:
    """Makes a drafter of another model for each text, and remembers for which."""

    def __init__(
        self, sampling: SamplingConfig, speculation: SpeculationConfig, vocab: int = TARGET.vocab
    ) -> None:
        self.sampling, self.speculation, self.vocab = sampling, speculation, vocab
        self.asked: list[tuple[int, ...]] = []

    def drafter(self, token_ids: Sequence[int] = ()) -> ToyDrafter:
        model = ToyModel(f"drafter after {list(token_ids)}", self.vocab)
        drafter = ToyDrafter(model, self.sampling, self.speculation)
        drafter.committed.extend(token_ids)
        return drafter

    async def __call__(self, token_ids: tuple[int, ...]) -> ToyDrafter:
        self.asked.append(token_ids)
        return self.drafter(token_ids)


def test_a_refresh_is_due_after_a_rejection_and_not_too_soon():
    trigger = RefreshTrigger()
    assert not trigger.observe(verdict(0, kept=1, drafted=4))  # two tokens: too soon
    assert not trigger.observe(verdict(2, kept=4, drafted=4))  # all was kept
    assert trigger.observe(verdict(6, kept=0, drafted=4))
    assert not trigger.observe(verdict(7, kept=1, drafted=4))  # again too soon
    assert trigger.observe(verdict(9, kept=0, drafted=4))  # three since the last
    decoded = Verdict("a", 0, 10, (7,) * 9, 0, 0, False)
    assert not trigger.observe(decoded)


def test_an_answer_is_refreshed_four_times_at_most():
    trigger = RefreshTrigger()
    due = [trigger.observe(verdict(5 * i, kept=4, drafted=6)) for i in range(8)]
    assert due == [True] * MAX_REFRESHES + [False] * (8 - MAX_REFRESHES)


async def token_by_token(sampling, speculation) -> tuple[list[int], list[int]]:
    """The rule spelt out: single positions, each offered once by whoever drafts by then."""
    refreshing = Refreshing(sampling, speculation)
    verifier = ToyVerifier(TARGET, sampling, speculation)
    drafter, refreshed, was_rejected = refreshing.drafter(), [], False
    while (position := len(verifier.committed)) < LENGTH:
        distance = position - max(refreshed, default=0)
        if was_rejected and distance >= LEAST_DISTANCE and len(refreshed) < MAX_REFRESHES:
            refreshed.append(position)
            drafter = refreshing.drafter(verifier.committed)
        block = drafter.block(verifier.committed, 1)
        was_rejected = (await verifier.verify(block)).num_accepted == 0
    return verifier.committed, refreshed


@pytest.mark.parametrize("coupling", ["maximal", "shared_noise"])
@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
async def test_any_block_length_gives_the_text_of_the_rule_spelt_out(coupling, temperature):
    num_refreshes = 0
    for seed in range(8):
        sampling = SamplingConfig(temperature=temperature, seed=seed)
        for max_draft in (1, 2, 7, 10):
            speculation = SpeculationConfig(eta=5, coupling=coupling, max_draft=max_draft)
            refreshing = Refreshing(sampling, speculation)
            verifier = ToyVerifier(TARGET, sampling, speculation)
            async for _ in speculate(
                refreshing.drafter(),
                verifier,
                max_tokens=LENGTH,
                max_draft=max_draft,
                refresh=refreshing,
            ):
                pass
            text, refreshed = await token_by_token(sampling, speculation)
            assert verifier.committed == text
            assert refreshing.asked == [tuple(text[:position]) for position in refreshed]
            num_refreshes += len(refreshed)
    assert num_refreshes > 32


@pytest.mark.parametrize("max_draft", [1, 3])
async def test_lossless_samples_the_target_whatever_is_retrieved(branches: Branches, max_draft):
    """Every branch of five positions; refreshes come where earlier ones fell so."""
    target, sampling = ToyModel("target", 2), SamplingConfig(temperature=0.9)
    speculation = SpeculationConfig(eta=0, max_draft=max_draft)
    chances: dict[tuple[int, ...], float] = {}
    asked = set()
    for _ in branches:
        refreshing = Refreshing(sampling, speculation, target.vocab)
        verifier = ToyVerifier(target, sampling, speculation, max_tokens=5)
        async for _ in speculate(
            refreshing.drafter(), verifier, max_tokens=5, max_draft=max_draft, refresh=refreshing
        ):
            pass
        asked.update(refreshing.asked)
        text = tuple(verifier.committed)
        chances[text] = chances.get(text, 0.0) + branches.probability
    assert {len(token_ids) for token_ids in asked} == {3, 4}
    assert_same(chances, dict(texts(lambda prefix: target_probs(target, prefix, sampling), 5)))


async def test_a_refresh_that_fails_leaves_the_target_alone():
    sampling = SamplingConfig(seed=3)
    speculation = SpeculationConfig(eta=0, coupling="shared_noise", max_draft=4)
    plain = ToyVerifier(TARGET, sampling, speculation)
    await plain.decode(LENGTH)

    async def refresh(token_ids):
        raise DrafterUnavailable("retrieval is gone")

    verifier = ToyVerifier(TARGET, sampling, speculation)
    drafter = Refreshing(sampling, speculation).drafter()
    told: list[DrafterUnavailable] = []
    origins = [
        origin
        async for each in speculate(
            drafter, verifier, max_tokens=LENGTH, max_draft=4, on_loss=told.append, refresh=refresh
        )
        for origin in each.origins
    ]
    assert [str(error) for error in told] == ["retrieval is gone"]
    assert verifier.committed == plain.committed
    lost_at = origins.index("target")
    assert lost_at >= LEAST_DISTANCE
    assert origins[lost_at - 1] == "corrected"
    assert set(origins[lost_at:]) == {"target"}


LONG, SHORT = random_prompt(90, seed=1).tolist(), random_prompt(30, seed=2).tolist()


def found_for(token_ids: Sequence[int]) -> list[int]:
    """What "retrieval" finds for a text: longer prompts than the first, and others each time."""
    return random_prompt(40 + len(token_ids), seed=sum(token_ids)).tolist()


def generated(refresh=found_for, drafter=None, temperature=0.8, **settings):
    return rapid.generate(
        loaded(),
        drafter or loaded(seed=1),
        LONG,
        SHORT,
        max_tokens=LENGTH,
        sampling=SamplingConfig(temperature=temperature, seed=11),
        speculation=SpeculationConfig(**({"eta": 10.0} | settings)),
        refresh=refresh,
    )


@pytest.mark.parametrize("coupling", ["maximal", "shared_noise"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_engines_give_one_text_at_every_draft_length(coupling, temperature):
    outcomes, asked = set(), []

    def refresh(token_ids):
        asked.append(token_ids)
        return found_for(token_ids)

    for max_draft in (1, 3, 10):
        asked.clear()
        got = generated(refresh, max_draft=max_draft, coupling=coupling, temperature=temperature)
        assert got.statistics.refreshes == len(asked) == MAX_REFRESHES
        assert all(got.token_ids[: len(token_ids)] == token_ids for token_ids in asked)
        outcomes.add((got.token_ids, tuple(asked)))
    assert len(outcomes) == 1


def test_what_is_found_again_counts_and_the_same_again_changes_nothing():
    without = generated(refresh=None)
    assert without.statistics.refreshes == 0
    assert generated(refresh=lambda token_ids: SHORT).token_ids == without.token_ids
    assert generated().token_ids != without.token_ids


def test_lossless_says_what_plain_says():
    sampling = SamplingConfig(temperature=0.8, seed=11)
    plain = rapid.generate(loaded(), None, LONG, max_tokens=LENGTH, sampling=sampling)
    lossless = generated(eta=0.0)
    assert lossless.statistics.refreshes
    assert lossless.token_ids == plain.token_ids


def test_every_engine_gives_back_all_its_pages(monkeypatch):
    made = []

    def engine(*arguments, **options):
        made.append(Engine(*arguments, **options))
        return made[-1]

    monkeypatch.setattr("rapid.engines.local_ports.Engine", engine)
    generated()
    # The document's, and for each retrieved text the drafter's and the witness's.
    assert len(made) == 1 + 2 * (1 + MAX_REFRESHES)
    with pytest.raises(PromptTooLong):
        generated(refresh=lambda token_ids: SHORT * 1000)
    for each in made:
        each.check_integrity()
        assert each.status().kv_pages_in_use == 0


@pytest.mark.parametrize(
    "settings", [{"rule": "paper"}, {"drafter": rapid.PromptLookup(), "eta": 0.0}]
)
def test_only_a_model_under_the_exact_rule_is_refreshed(settings):
    with pytest.raises(ConfigurationError, match="refresh gives a drafter model"):
        generated(**settings)

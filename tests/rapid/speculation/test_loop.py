"""The loop on toy models: equal texts, splits, lost drafters, ends of answers."""

from __future__ import annotations

import asyncio
import collections
import itertools
import math
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rapid.config import SamplingConfig, SpeculationConfig
from rapid.errors import DrafterUnavailable
from rapid.speculation.acceptance import propose
from rapid.speculation.draw import Draw
from rapid.speculation.fusion import fuse_probs
from rapid.speculation.loop import speculate
from rapid.speculation.noise import Purpose, race, uniforms
from rapid.speculation.sampling import filter_probs, probabilities, proposal
from rapid.speculation.statistics import RoundStatistics
from rapid.transfers import Transfer
from tests.toy import ToyDrafter, ToyModel, ToyVerifier

TARGET, DRAFTER = ToyModel("target"), ToyModel("drafter")
LENGTH = 40


async def answer(sampling, speculation, *, drafted=True, choice=0, eos_ids=frozenset(), **drafter):
    stats = RoundStatistics()
    verifier = ToyVerifier(TARGET, sampling, speculation, choice, eos_ids)
    proposer = ToyDrafter(DRAFTER, sampling, speculation, choice, **drafter) if drafted else None
    async for verdict in speculate(
        proposer,
        verifier,
        max_tokens=LENGTH,
        max_draft=speculation.max_draft,
        on_loss=stats.lose_drafter,
    ):
        assert verdict.position == len(stats.token_ids)
        assert len(verdict.token_ids) <= speculation.max_draft
        stats.observe(verdict)
    assert stats.token_ids == verifier.committed
    return stats


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(("top_k", "top_p"), [(None, 1.0), (3, 0.9)])
async def test_lossless_with_shared_noise_is_plain_token_for_token(temperature, top_k, top_p):
    for seed in range(8):
        sampling = SamplingConfig(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
        plain = await answer(sampling, SpeculationConfig(eta=0), drafted=False)
        for max_draft, draft_top_k in [(1, None), (3, 2), (10, 64)]:
            speculation = SpeculationConfig(
                eta=0, max_draft=max_draft, draft_top_k=draft_top_k, coupling="shared_noise"
            )
            assert (await answer(sampling, speculation)).token_ids == plain.token_ids


@pytest.mark.parametrize("coupling", ["maximal", "shared_noise"])
@pytest.mark.parametrize("transfer", get_args(Transfer))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_any_split_into_blocks_gives_the_same_text(coupling, transfer, temperature):
    for seed in range(5):
        sampling = SamplingConfig(temperature=temperature, seed=seed)
        texts = [
            (
                await answer(
                    sampling,
                    SpeculationConfig(
                        eta=5, transfer=transfer, coupling=coupling, max_draft=max_draft
                    ),
                )
            ).token_ids
            for max_draft in (1, 2, 7, 10)
        ]
        assert all(text == texts[0] for text in texts)


class Resized:
    """A drafter whose blocks have these lengths, over and over."""

    def __init__(self, drafter, lengths):
        self._drafter, self._lengths = drafter, itertools.cycle(lengths)

    def draft(self, verdict, num_tokens):
        return self._drafter.draft(verdict, min(num_tokens, next(self._lengths)))


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=6),
    coupling=st.sampled_from(["maximal", "shared_noise"]),
    transfer=st.sampled_from(get_args(Transfer)),
    temperature=st.sampled_from([0.0, 0.5, 1.0]),
    eta=st.sampled_from([0.0, 5.0, 50.0]),
    seed=st.integers(0, 2**53),
    eos_ids=st.sampled_from([frozenset(), frozenset({2})]),
)
def test_arbitrary_splits_give_the_same_text(
    lengths, coupling, transfer, temperature, eta, seed, eos_ids
):
    sampling = SamplingConfig(temperature=temperature, seed=seed)
    speculation = SpeculationConfig(eta=eta, transfer=transfer, coupling=coupling, max_draft=12)

    async def text(lengths):
        verifier = ToyVerifier(TARGET, sampling, speculation, eos_ids=eos_ids)
        drafter = Resized(ToyDrafter(DRAFTER, sampling, speculation), lengths)
        async for _ in speculate(drafter, verifier, max_tokens=LENGTH, max_draft=12):
            pass
        return verifier.committed

    assert asyncio.run(text(lengths)) == asyncio.run(text([1]))


class Scripted:
    """A pace of these lengths, over and over; remembers what was committed in which round."""

    def __init__(self, lengths):
        self._lengths = itertools.cycle(lengths)
        self.rounds = []

    def next_length(self, limit):
        self.asked = min(limit, next(self._lengths))
        return self.asked

    def observe(self, verdict):
        assert verdict.num_drafted <= self.asked
        self.rounds.append((self.asked, verdict.token_ids))


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=8),
    temperature=st.sampled_from([0.0, 0.5, 1.0]),
    seed=st.integers(0, 2**53),
    eos_ids=st.sampled_from([frozenset(), frozenset({2})]),
)
def test_a_pace_that_rests_and_drafts_gives_the_text_of_plain_decoding(
    lengths, temperature, seed, eos_ids
):
    sampling = SamplingConfig(temperature=temperature, seed=seed)
    speculation = SpeculationConfig(eta=0, coupling="shared_noise", max_draft=6)

    async def text(drafter, pace):
        verifier = ToyVerifier(TARGET, sampling, speculation, eos_ids=eos_ids)
        async for verdict in speculate(
            drafter, verifier, max_tokens=LENGTH, max_draft=6, pace=pace
        ):
            assert len(verdict.token_ids) <= 6
        return tuple(verifier.committed)

    pace = Scripted(lengths)
    drafter = ToyDrafter(DRAFTER, sampling, speculation)
    paced = asyncio.run(text(drafter, pace))
    assert paced == asyncio.run(text(None, None))
    assert sum((tokens for _, tokens in pace.rounds), ()) == paced
    assert tuple(drafter.committed) == paced[: len(drafter.committed)]


async def test_under_maximal_resting_leaves_the_distribution_as_it_is():
    """Two positions, one drafted and one not, over 4,000 seeds against the closed form."""
    speculation = SpeculationConfig(eta=0, coupling="maximal", draft_top_k=None)
    counts = collections.Counter()
    for seed in range(4_000):
        sampling = SamplingConfig(seed=seed)
        verifier = ToyVerifier(TARGET, sampling, speculation, max_tokens=2)
        drafter = ToyDrafter(DRAFTER, sampling, speculation)
        pace = Scripted([1, 0] if seed % 2 else [0, 1])
        async for _ in speculate(drafter, verifier, max_tokens=2, max_draft=1, pace=pace):
            pass
        counts[tuple(verifier.committed)] += 1
    for answer_ids in itertools.product(range(TARGET.vocab), repeat=2):
        expected = math.prod(
            float(probabilities(TARGET.logits(answer_ids[:i]), 1.0)[token])
            for i, token in enumerate(answer_ids)
        )
        assert counts[answer_ids] / 4_000 == pytest.approx(expected, abs=4 * 0.5 / 4000**0.5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_fused_equals_sampling_the_fused_distribution_without_speculation(temperature):
    for seed in range(8):
        sampling = SamplingConfig(temperature=temperature, top_p=0.95, seed=seed)
        speculation = SpeculationConfig(
            eta=5, transfer="boost", coupling="shared_noise", draft_top_k=3
        )
        reference: list[int] = []
        for position in range(LENGTH):
            ids, probs = proposal(
                DRAFTER.logits(reference), Draw(sampling, speculation, 0, position)
            )
            draft = TARGET.logits(reference).double() * 0
            draft[ids] = draft.new_tensor(probs)
            fused = fuse_probs(
                TARGET.logits(reference)[None],
                draft[None],
                temperature=1.0,
                transfer=speculation.transfer,
                eta=5,
                plausibility=0.1,
            )
            fused = filter_probs(fused, None, 0.95)[0].numpy()
            noise = uniforms(seed, 0, position, Purpose.RESULT, len(fused))
            reference.append(race(fused, noise) if temperature else int(fused.argmax()))
        assert (await answer(sampling, speculation)).token_ids == reference


async def test_maximal_coupling_samples_the_fused_distribution():
    """First tokens over 4,000 seeds against the closed form; the seeds make the outcome fixed."""
    speculation = SpeculationConfig(
        eta=3, transfer="boost", coupling="maximal", max_draft=1, draft_top_k=None
    )
    counts = [0] * TARGET.vocab
    num_seeds = 4_000
    for seed in range(num_seeds):
        sampling = SamplingConfig(seed=seed)
        drafter = ToyDrafter(DRAFTER, sampling, speculation)
        verifier = ToyVerifier(TARGET, sampling, speculation)
        counts[(await verifier.verify(drafter.draft(None, 1))).token_ids[0]] += 1
    ids, probs = proposal(DRAFTER.logits([]), Draw(SamplingConfig(), speculation, 0, 0))
    draft = TARGET.logits([]).double() * 0
    draft[ids] = draft.new_tensor(probs)
    fused = fuse_probs(TARGET.logits([])[None], draft[None], temperature=1.0,
                        transfer=speculation.transfer, eta=3, plausibility=0.1)[0]  # fmt: skip
    assert [c / num_seeds for c in counts] == pytest.approx(fused.tolist(), abs=4 * 0.5 / 4000**0.5)


async def test_a_lost_drafter_leaves_the_targets_own_answer():
    sampling = SamplingConfig(seed=3)
    speculation = SpeculationConfig(eta=0, coupling="shared_noise", max_draft=4)
    plain = await answer(sampling, speculation, drafted=False)
    lost = await answer(sampling, speculation, lost_at=10)
    assert lost.token_ids == plain.token_ids
    assert plain.plain_from is None
    assert lost.plain_from is not None
    assert lost.plain_from >= 10
    assert (plain.plain_reason, lost.plain_reason) == ("", "the drafter died")
    assert "target" not in lost.origins[: lost.plain_from]
    assert lost.origins[lost.plain_from :] == ["target"] * (LENGTH - lost.plain_from)


async def test_a_lost_drafter_that_nobody_takes_note_of_ends_the_answer():
    speculation = SpeculationConfig(eta=3, max_draft=4)
    verifier = ToyVerifier(TARGET, SamplingConfig(seed=3), speculation)
    drafter = ToyDrafter(DRAFTER, SamplingConfig(seed=3), speculation, lost_at=10)
    with pytest.raises(DrafterUnavailable, match="the drafter died"):
        async for _ in speculate(drafter, verifier, max_tokens=LENGTH, max_draft=4):
            pass
    assert 10 <= len(verifier.committed) < LENGTH


@pytest.mark.parametrize("max_draft", [1, 10, 64])
async def test_the_text_of_a_stream_begins_with_its_first_token(max_draft):
    """Nobody waits for a text that is sent whole, and fewer rounds cost less."""
    speculation = SpeculationConfig(eta=0, coupling="shared_noise", max_draft=max_draft)

    async def rounds(is_streamed):
        verifier = ToyVerifier(TARGET, SamplingConfig(seed=3), speculation)
        verdicts = speculate(
            None, verifier, max_tokens=LENGTH, max_draft=max_draft, is_streamed=is_streamed
        )
        return [verdict.token_ids async for verdict in verdicts]

    whole, streamed = await rounds(False), await rounds(True)
    assert sum(streamed, ()) == sum(whole, ())
    assert [len(tokens) for tokens in whole[:-1]] == [max_draft] * (len(whole) - 1)
    assert [len(tokens) for tokens in streamed[:-1]] == [1] + [max_draft] * (len(streamed) - 2)


async def test_nothing_follows_the_end_of_the_answer():
    sampling = SamplingConfig(seed=1)
    for drafted in (True, False):
        speculation = SpeculationConfig(eta=0, coupling="shared_noise")
        stats = await answer(sampling, speculation, drafted=drafted, eos_ids=frozenset({2}))
        assert stats.token_ids[-1] == 2
        assert 2 not in stats.token_ids[:-1]


async def test_lossless_is_plain_in_every_choice():
    speculation = SpeculationConfig(eta=0, coupling="shared_noise")
    for choice in range(3):
        plain, drafted = [
            await answer(SamplingConfig(seed=4), speculation, choice=choice, drafted=drafted)
            for drafted in (False, True)
        ]
        assert drafted.token_ids == plain.token_ids


async def test_choices_differ_and_statistics_add_up():
    sampling = SamplingConfig(seed=5)
    speculation = SpeculationConfig(eta=5, max_draft=4)
    first, second = [await answer(sampling, speculation, choice=c) for c in (0, 1)]
    assert first.token_ids != second.token_ids
    assert first.origins.count("drafted") == first.accepted
    assert len(first.token_ids) == LENGTH
    histogram = first.of_choice().histogram
    assert sum(sum(counts) for counts in histogram.values()) == first.rounds
    assert sum(length * sum(counts) for length, counts in histogram.items()) == first.drafted
    assert first.accepted == sum(
        accepted * count for counts in histogram.values() for accepted, count in enumerate(counts)
    )


def test_a_greedy_proposal_is_the_best_candidate():
    draw = Draw(SamplingConfig(temperature=0), SpeculationConfig(), 0, 0)
    ids, probs = proposal(DRAFTER.logits([]), draw)
    assert propose(ids, probs, draw) == int(DRAFTER.logits([]).argmax())

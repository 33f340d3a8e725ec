"""Prompt lookup: the index against a plain scan, and answers against those without it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rapid
from rapid.config import SamplingConfig, SpeculationConfig
from rapid.errors import ConfigurationError
from rapid.messages import Verdict
from rapid.speculation.acceptance import acceptance_probability, decode_token, judge, residual
from rapid.speculation.draw import Draw
from rapid.speculation.lookup import (
    LEAST_MATCH,
    LONGEST_MATCH,
    PromptIndex,
    PromptLookupDrafter,
)
from rapid.speculation.loop import speculate
from rapid.speculation.sampling import probabilities
from rapid.speculation.statistics import RoundStatistics
from tests.rapid.tiny_models import loaded
from tests.toy import ToyModel, ToyVerifier

TARGET = ToyModel("target", vocab=3)
PROMPT = [0, 1, 2, 0, 1]


def scanned(text: list[int], num_tokens: int) -> list[int]:
    """The specification: what follows the latest earlier occurrence of the longest suffix."""
    for size in range(LONGEST_MATCH, LEAST_MATCH - 1, -1):
        for stop in range(len(text) - 1, size - 1, -1):
            if text[stop - size : stop] == text[-size:]:
                drafted: list[int] = []
                for place in range(stop, stop + min(num_tokens, 2 * size)):
                    drafted.append((text + drafted)[place])
                return drafted
    return []


def texts(least: int, most: int) -> st.SearchStrategy[list[int]]:
    """Texts of three tokens, drawn from a seed: strategies for lists seldom make long ones."""
    sizes = st.integers(least, most)
    return st.builds(lambda n, seed: Random(seed).choices(range(3), k=n), sizes, st.integers(0))


@settings(max_examples=300)
@given(
    prompt=texts(1, 90),
    rounds=st.lists(texts(0, 40), max_size=6),
    num_tokens=st.integers(1, 9),
)
def test_a_draft_is_what_a_scan_of_the_text_finds(prompt, rounds, num_tokens):
    index = PromptIndex(prompt)
    drafter, text = PromptLookupDrafter(index), list(prompt)
    block = drafter.draft(None, num_tokens)
    for committed in rounds:
        assert block.position == len(text) - len(prompt)
        assert block.token_ids.tolist() == scanned(text, num_tokens)
        text += committed
        verdict = Verdict("a", 0, block.position, tuple(committed), 0, 0, False)
        block = drafter.draft(verdict, num_tokens)
    taken_over = PromptLookupDrafter(index, committed=text[len(prompt) :]).draft(None, num_tokens)
    for last in (block, taken_over):
        assert last.token_ids.tolist() == scanned(text, num_tokens)
        assert last.candidate_ids.tolist() == [[token] for token in last.token_ids]
        assert last.candidate_probs.tolist() == [[1.0]] * len(last)
        assert len(last) == min(num_tokens, drafter.longest)


def test_what_repeats_itself_without_end_is_found_in_time():
    """A text of one token, where every place matches: only so many are compared."""
    drafter = PromptLookupDrafter(PromptIndex([3] * 100_000), committed=[3] * 5_000)
    began = time.process_time()
    for _ in range(50):
        drafter.commit([3])
        assert drafter.draft(None, 64).token_ids.tolist() == [3] * 64
    other = PromptLookupDrafter(PromptIndex([3] * 100_000 + [4] + [3] * 9))
    for _ in range(50):
        other.commit([4, 3])
        assert other.longest > 0
    assert time.process_time() - began < 1.0


def test_ids_of_a_large_vocabulary_do_not_collide():
    large = 2**21 - 1
    prompt = [large, large, 7, 5, large, 1, 9, 5, large, large]
    assert PromptLookupDrafter(PromptIndex(prompt)).draft(None, 2).token_ids.tolist() == [7, 5]


def outcomes(answer: tuple[int, ...], left: int) -> Iterator[tuple[tuple[int, ...], float]]:
    """Every answer that rounds under `maximal` coupling commit, with its probability."""
    if left <= 0:
        yield answer, 1.0
        return
    drafter = PromptLookupDrafter(PromptIndex(PROMPT), committed=answer)
    drafted = drafter.draft(None, left).token_ids.tolist()
    probs = probabilities(TARGET.logits(answer), 1.0).numpy()
    if not drafted:
        for token in range(TARGET.vocab):
            for rest, prob in outcomes((*answer, token), left - 1):
                yield rest, probs[token] * prob
        return
    reached = 1.0
    for position, token in enumerate(drafted):
        kept = (*answer, *drafted[:position])
        probs = probabilities(TARGET.logits(kept), 1.0).numpy()
        sure = np.eye(TARGET.vocab)[token]
        accept = acceptance_probability(probs[token], sure[token])
        for other, chance in enumerate(residual(probs, sure)):
            for rest, prob in outcomes((*kept, other), left - position - 1):
                yield rest, reached * (1 - accept) * chance * prob
        reached *= accept
    for rest, prob in outcomes((*answer, *drafted), left - len(drafted)):
        yield rest, reached * prob


def test_rounds_under_maximal_coupling_follow_the_target_exactly():
    got: dict[tuple[int, ...], float] = {}
    for answer, prob in outcomes((), 4):
        got[answer] = got.get(answer, 0.0) + prob
    for answer in itertools.product(range(TARGET.vocab), repeat=4):
        rows = [probabilities(TARGET.logits(answer[:i]), 1.0)[answer[i]].item() for i in range(4)]
        assert got[answer] == pytest.approx(np.prod(rows), abs=1e-12)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
async def test_with_shared_noise_the_text_is_that_of_plain_decoding(temperature):
    for seed in range(8):
        sampling = SamplingConfig(temperature=temperature, seed=seed)
        texts = []
        for drafter in (None, PromptLookupDrafter(PromptIndex([7, 8, 9]))):  # nothing matches first
            speculation = SpeculationConfig(eta=0, coupling="shared_noise", max_draft=4)
            statistics = RoundStatistics()
            verifier = ToyVerifier(ToyModel("target"), sampling, speculation)
            async for verdict in speculate(drafter, verifier, max_tokens=40, max_draft=4):
                statistics.observe(verdict)
            texts.append(statistics.token_ids)
        assert texts[0] == texts[1]
        assert statistics.origins[0] == "target"
        assert statistics.accepted == statistics.origins.count("drafted") > 0


@pytest.mark.parametrize("coupling", ["maximal", "shared_noise"])
def test_an_empty_block_commits_one_token_of_the_targets_own(coupling):
    speculation = SpeculationConfig(eta=10, coupling=coupling)
    empty = PromptLookupDrafter(PromptIndex([5])).draft(None, 4)
    for seed in range(20):
        draw, row = Draw(SamplingConfig(seed=seed), speculation, 0, 0), TARGET.logits(())
        judgement = judge(empty, row[None], draw, {2}, num_logprobs=1)
        token, logprobs = decode_token(row, draw, num_logprobs=1)
        assert judgement.token_ids == (token,)
        assert judgement.logprobs == (logprobs,)
        assert judgement.is_finished == (token == 2)
        verdict = judgement.verdict(empty)
        assert (verdict.num_drafted, verdict.origins) == (0, ("target",))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_one_call_generates_with_it(temperature):
    prompt = list(range(10, 40))  # nothing repeats itself yet
    common = {"max_tokens": 60, "sampling": SamplingConfig(temperature=temperature, seed=5)}
    plain = rapid.generate(loaded(), None, prompt, **common)
    lookup = rapid.generate(loaded(), rapid.PromptLookup(), prompt, **common)
    assert lookup.token_ids == plain.token_ids
    assert lookup.statistics.drafted > 0
    assert lookup.statistics.origins[0] == "target"
    fusing = SpeculationConfig(eta=5)
    with pytest.raises(ConfigurationError, match="reads nothing that the target does not"):
        rapid.generate(loaded(), rapid.PromptLookup(), prompt, speculation=fusing, **common)


def test_the_largest_ids_are_told_apart():
    """Ids of three tokens fill one number: none may reach into its neighbour's bits."""
    large = 2**21 - 1
    drafter = PromptLookupDrafter(PromptIndex([0, large, 7, 1, large, 8, 0, large]))
    assert drafter.draft(None, 1).token_ids.tolist() == [7]
    drafter = PromptLookupDrafter(PromptIndex([large, 0, 7, large - 1, 0, 8, large, 0]))
    assert drafter.draft(None, 1).token_ids.tolist() == [7]

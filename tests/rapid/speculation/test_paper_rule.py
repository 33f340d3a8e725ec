"""What the reference code's rule samples: shown by enumeration, to 1e-12, and run on engines.

It accepts by p_hat and makes good what p lacks. So it keeps min(q, p_hat), and where that is more
than p nothing takes it back: the answer follows neither p nor p_hat, unless eta is 0.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from pydantic import ValidationError

import rapid
from rapid.config import SamplingConfig, SpeculationConfig
from rapid.errors import BadRequest, ConfigurationError
from rapid.speculation import acceptance
from rapid.speculation.acceptance import decode_token
from rapid.speculation.draw import Draw
from rapid.speculation.loop import speculate
from rapid.speculation.sampling import probabilities
from rapid.speculation.statistics import RoundStatistics
from tests.branches import Branches, assert_same, branches
from tests.rapid.speculation.test_rule_proofs import (
    EDGES,
    Fixed,
    answers,
    draft_probs,
    models,
    rounds,
    target_probs,
    texts,
)
from tests.rapid.tiny_models import EOS, VOCAB, checkpoint, loaded, random_prompt
from tests.reference import load_reference
from tests.toy import ToyDrafter, ToyModel, ToyVerifier

__all__ = ["branches"]

ETAS = (0, 0.5, 5, 50)


def paper(eta: float, **settings) -> SpeculationConfig:
    return SpeculationConfig(rule="paper", eta=eta, **settings)


def moved(p: np.ndarray, q: np.ndarray, eta: float, plausibility: float) -> np.ndarray:
    """p_hat by hand: softmax(log p + eta (q - p) [q >= a max q])."""
    weights = p * np.exp(eta * (q - p) * (q >= plausibility * q.max()))
    return weights / weights.sum()


def kept_and_made_good(q, p, fused) -> tuple[np.ndarray, np.ndarray]:
    """min(q, p_hat), and (1 - beta) norm([p - min(q, p_hat)]_+)."""
    kept = np.minimum(q, fused)
    lacking = np.maximum(p - kept, 0)
    return kept, (1 - kept.sum()) * lacking / (lacking.sum() or 1)


def total_variation(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.abs(one - other).sum() / 2)


async def sampled(branches, target, drafter, sampling, speculation) -> np.ndarray:
    """The first token of the code that runs, drafts and rejections summed."""
    chances = await answers(branches, target, drafter, sampling, speculation, 1)
    return np.array([chances.get((token,), 0.0) for token in range(target.vocab)])


@pytest.mark.parametrize(("top_k", "top_p"), [(None, 1.0), (2, 1.0), (None, 0.7), (3, 0.8)])
async def test_a_position_is_neither_p_nor_p_hat(branches: Branches, top_k, top_p):
    for vocab, eta, plausibility in itertools.product((3, 4, 6), ETAS, (0, 0.1, 1)):
        target, drafter = models(seed=vocab, vocab=vocab)
        sampling = SamplingConfig(temperature=0.7, top_k=top_k, top_p=top_p)
        speculation = paper(eta, plausibility=plausibility)
        q = draft_probs(drafter, (), sampling, speculation)
        p = target_probs(target, (), sampling)
        fused = moved(p, q, eta, plausibility)
        kept, made_good = kept_and_made_good(q, p, fused)
        got = await sampled(branches, target, drafter, sampling, speculation)
        np.testing.assert_allclose(got, kept + made_good, atol=1e-12)
        distance = total_variation(got, p)
        assert distance == pytest.approx(np.maximum(kept - p, 0).sum(), abs=1e-12)
        assert distance <= total_variation(q, p) + 1e-12
        if eta == 0:
            np.testing.assert_allclose(got, p, atol=1e-12)


@pytest.mark.parametrize("edge", EDGES)
async def test_the_same_at_the_edges(branches: Branches, edge):
    target, drafter = (Fixed(logits) for logits in EDGES[edge])
    sampling = SamplingConfig()
    for eta, plausibility in itertools.product(ETAS, (0, 1)):
        speculation = paper(eta, plausibility=plausibility)
        q = draft_probs(drafter, (), sampling, speculation)
        p = target_probs(target, (), sampling)
        kept, made_good = kept_and_made_good(q, p, moved(p, q, eta, plausibility))
        got = await sampled(branches, target, drafter, sampling, speculation)
        np.testing.assert_allclose(got, kept + made_good, atol=1e-12)
        distance = np.maximum(kept - p, 0).sum()
        assert total_variation(got, p) == pytest.approx(distance, abs=1e-12)


async def test_how_far_it_is_from_both(branches: Branches):
    """The example of ``docs/algorithm.md``: "neither" is no matter of rounding."""
    target, drafter = Fixed([1, 0, 0]), Fixed([0, 1, 0])
    p, q = (probabilities(each.logits(()), 1.0).numpy() for each in (target, drafter))
    got = await sampled(branches, target, drafter, SamplingConfig(), paper(5))
    np.testing.assert_allclose(got, [0.261, 0.576, 0.163], atol=5e-4)
    assert total_variation(got, p) == pytest.approx(0.364, abs=5e-4)
    assert total_variation(got, moved(p, q, 5, 0.1)) == pytest.approx(0.235, abs=5e-4)


def paper_texts(target, drafter, sampling, speculation, num_tokens, eos_ids):
    """The closed form of whole answers: rounds, early ends of blocks and bonus tokens."""

    def is_over(text):
        return len(text) == num_tokens or bool(text and text[-1] in eos_ids)

    def follow(text, num_left):
        """Every answer after `text`, in a block that may still offer `num_left` tokens."""
        if is_over(text):
            yield text, 1.0
            return
        q = draft_probs(drafter, text, sampling, speculation)
        p = target_probs(target, text, sampling)
        fused = moved(p, q, speculation.eta, speculation.plausibility)
        kept, made_good = kept_and_made_good(q, p, fused)
        for token in range(target.vocab):
            longer = (*text, token)
            for answer, rest in follow(longer, speculation.max_draft):
                yield answer, made_good[token] * rest
            is_last = num_left == 1 or q[token] < 0.1
            if is_last and not is_over(longer):
                bonus = target_probs(target, longer, sampling)
                for extra, chance in enumerate(bonus):
                    for answer, rest in follow((*longer, extra), speculation.max_draft):
                        yield answer, kept[token] * chance * rest
            else:
                for answer, rest in follow(longer, num_left - 1):
                    yield answer, kept[token] * rest

    chances: dict[tuple, float] = {}
    for answer, chance in follow((), speculation.max_draft):
        chances[answer] = chances.get(answer, 0.0) + chance
    return chances


@pytest.mark.parametrize("max_draft", [1, 2, 3])
@pytest.mark.parametrize("eos_ids", [frozenset(), frozenset({0})])
async def test_chains_of_rounds_with_their_bonus_tokens(branches: Branches, max_draft, eos_ids):
    target, drafter = models(seed=2, vocab=3)
    sampling = SamplingConfig(temperature=0.9)
    assert draft_probs(drafter, (), sampling, paper(0)).min() < 0.1  # blocks do end early
    for eta in (0, 10):
        speculation = paper(eta, max_draft=max_draft)
        got = await answers(branches, target, drafter, sampling, speculation, 3, eos_ids)
        want = paper_texts(target, drafter, sampling, speculation, 3, eos_ids)
        assert_same(got, want)
        own = dict(texts(lambda prefix: target_probs(target, prefix, sampling), 3, eos_ids))
        gap = sum(abs(got.get(text, 0.0) - chance) for text, chance in own.items()) / 2
        assert gap < 1e-12 if eta == 0 else gap > 0.05


async def test_a_block_kept_whole_is_followed_by_the_targets_own_token(branches: Branches):
    target, drafter = models(seed=4, vocab=3)
    sampling, speculation = SamplingConfig(), paper(5)
    got = await rounds(branches, target, drafter, sampling, speculation, 1)
    q = draft_probs(drafter, (), sampling, speculation)
    p = target_probs(target, (), sampling)
    kept, made_good = kept_and_made_good(q, p, moved(p, q, 5, 0.1))
    want = {((token,), 0): made_good[token] for token in range(3)}
    for token in range(3):
        for extra, chance in enumerate(target_probs(target, (token,), sampling)):
            want[(token, extra), 1] = kept[token] * chance
    assert_same(got, want)


async def test_the_published_tail_guard_is_no_distribution(branches: Branches, monkeypatch):
    """Eq. 9 puts p_k back where p_hat_k < 0.1 max p_hat, after the softmax: the sum is not one.

    The rule does not need a distribution there: min(q, .) stays below q, so what is sampled has the
    same form, and the same distance from p.
    """

    def guarded(target_logits, draft_probs, *, temperature, eta, **_):
        p = probabilities(target_logits, temperature)
        fused = torch.softmax(p.log() + eta * (draft_probs - p), -1)
        return torch.where(fused >= 0.1 * fused.amax(-1, keepdim=True), fused, p)

    monkeypatch.setattr(acceptance, "fuse_probs", guarded)
    sums = []
    for seed, vocab, eta in itertools.product(range(3), (3, 6), ETAS):
        target, drafter = models(seed, vocab)
        sampling, speculation = SamplingConfig(), paper(eta)
        q = draft_probs(drafter, (), sampling, speculation)
        p = target_probs(target, (), sampling)
        guard = guarded(
            torch.from_numpy(p).log(), torch.from_numpy(q), temperature=1.0, eta=eta
        ).numpy()
        sums.append(guard.sum())
        kept, made_good = kept_and_made_good(q, p, guard)
        got = await sampled(branches, target, drafter, sampling, speculation)
        np.testing.assert_allclose(got, kept + made_good, atol=1e-12)
        distance = np.maximum(kept - p, 0).sum()
        assert total_variation(got, p) == pytest.approx(distance, abs=1e-12)
        assert eta or distance < 1e-12
    assert min(sums) < 0.99
    assert max(sums) > 1.9


@pytest.mark.parametrize("max_tokens", [1, 2, 7, 24])
async def test_bonus_tokens_are_counted_apart_and_never_too_many(max_tokens):
    target, drafter = ToyModel("target"), ToyModel("drafter")
    for seed in range(10):
        sampling, speculation = SamplingConfig(seed=seed), paper(5, max_draft=4)
        verifier = ToyVerifier(target, sampling, speculation, max_tokens=max_tokens)
        stats = RoundStatistics()
        async for verdict in speculate(
            ToyDrafter(drafter, sampling, speculation), verifier, max_tokens=max_tokens, max_draft=4
        ):
            assert len(verdict.token_ids) <= verdict.num_drafted + 1
            text = list(stats.token_ids)
            for token, origin, entry in zip(
                verdict.token_ids, verdict.origins, verdict.logprobs, strict=True
            ):
                draw = Draw(sampling, speculation, 0, len(text))
                own, log_p = decode_token(target.logits(text), draw, num_logprobs=2)
                assert entry.top == log_p.top
                assert origin != "bonus" or token == own
                text.append(token)
            stats.observe(verdict)
        assert len(stats.token_ids) == max_tokens
        counts = stats.of_choice()
        assert counts.accepted + counts.corrected + counts.bonus == max_tokens
        assert counts.accepted == stats.origins.count("drafted") <= counts.drafted
        assert "target" not in stats.origins
    assert counts.bonus if max_tokens > 7 else True


class Slow:
    """A model's logits after a prompt, by one whole forward each time."""

    def __init__(self, seed: int, prompt: Sequence[int]) -> None:
        self._model = load_reference(checkpoint(seed=seed))
        self._prompt = list(prompt)

    @torch.inference_mode()
    def logits(self, prefix: Sequence[int]) -> torch.Tensor:
        return self._model(torch.tensor([[*self._prompt, *prefix]])).logits[0, -1, :VOCAB].float()


@pytest.mark.parametrize(("drafter", "eta", "temperature", "expected"), [
    (1, 10, 0.3, {"drafted", "corrected"}), (1, 500, 0.3, {"drafted", "corrected", "bonus"}),
    (0, 10, 0.3, {"drafted", "bonus"}), (0, 10, 1.5, {"drafted", "bonus"}),
])  # fmt: skip
async def test_engines_answer_as_the_loop_does_on_whole_forwards(
    drafter, eta, temperature, expected
):
    """After a bonus the drafter's KV lags by a token and the target's holds one more."""
    long, short = random_prompt(40, seed=1).tolist(), random_prompt(20, seed=2).tolist()
    prompt = short if drafter else long  # the target itself, on the same text, is always kept
    sampling = SamplingConfig(temperature=temperature, seed=4)
    speculation = paper(eta, max_draft=3)
    answer = rapid.generate(
        loaded(seed=0),
        loaded(seed=drafter),
        long,
        prompt,
        max_tokens=24,
        sampling=sampling,
        speculation=speculation,
    )
    stats = RoundStatistics()
    async for verdict in speculate(
        ToyDrafter(Slow(drafter, prompt), sampling, speculation),
        ToyVerifier(Slow(0, long), sampling, speculation, 0, frozenset({EOS}), 24),
        max_tokens=24,
        max_draft=3,
    ):
        stats.observe(verdict)
    assert answer.token_ids == tuple(stats.token_ids)
    assert answer.statistics.origins == stats.origins
    assert set(stats.origins) == expected
    assert temperature < 1 or 1 in stats.histogram  # blocks end after an unlikely token


def test_it_has_no_variants():
    assert paper(10).model_dump(include={"transfer", "coupling", "draft_top_k"}) == {
        "transfer": "distill", "coupling": "maximal", "draft_top_k": None,
    }  # fmt: skip
    for name, value in (("transfer", "boost"), ("coupling", "shared_noise"), ("draft_top_k", 64)):
        with pytest.raises(ValidationError, match=f"leave {name} out"):
            paper(10, **{name: value})
    with pytest.raises(ConfigurationError, match="needs a drafter model"):
        rapid.generate(loaded(), None, [1], speculation=paper(10))
    greedy = SamplingConfig(temperature=0)
    with pytest.raises(BadRequest, match="set a temperature"):
        rapid.generate(loaded(), loaded(), [1], [1], sampling=greedy, speculation=paper(10))

"""The ensemble verification of transformers, whose answer depends on the draft length, beside ours.

`assistant_ensemble_weight` judges drafts by v = w p + (1 - w) q. The token behind a block that is
wholly accepted is drawn from p alone (`transformers.generation.utils`, 5.23), so how often p speaks
depends on how long blocks are. Ours is `mixture` with eta 1, which is v with w = 1/2.
"""

from __future__ import annotations

import inspect
from collections import Counter

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.generation.utils import _speculative_sampling

from rapid.config import SamplingConfig, SpeculationConfig
from rapid.speculation.loop import speculate
from tests.toy import ToyDrafter, ToyModel, ToyVerifier

P, Q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.1, 0.8, 0.1])
WEIGHT = 0.5
V = WEIGHT * P + (1 - WEIGHT) * Q
LENGTHS = (1, 4, 8)
NUM_TOKENS = 12


class FixedModel(ToyModel):
    """A model that says the same whatever came before."""

    def __init__(self, probs: torch.Tensor) -> None:
        super().__init__("fixed", vocab=len(probs))
        self._probs = probs

    def logits(self, prefix: object) -> torch.Tensor:
        return self._probs.log()


def fixed_llama(probs: torch.Tensor) -> LlamaForCausalLM:
    """The same in transformers: all hidden states are ones."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "vocab_size": len(probs)}
    tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, **tokens)).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.fill_(float("norm" in name or "embed" in name))
        model.lm_head.weight.copy_(probs.log()[:, None] / 8)
    return model


async def answer(max_draft: int, seed: int, temperature: float = 1.0) -> list[int]:
    """Our answer, drafted in blocks of a length."""
    sampling = SamplingConfig(temperature=temperature, seed=seed)
    speculation = SpeculationConfig(
        transfer="mixture", eta=1.0, max_draft=max_draft, coupling="shared_noise"
    )
    drafter = ToyDrafter(FixedModel(Q), sampling, speculation)
    verifier = ToyVerifier(FixedModel(P), sampling, speculation)
    rounds = speculate(drafter, verifier, max_tokens=NUM_TOKENS, max_draft=max_draft)
    return [token async for verdict in rounds for token in verdict.token_ids]


def their_answer(max_draft: int) -> list[int]:
    """The greedy answer of transformers."""
    target, drafter = fixed_llama(P), fixed_llama(Q)
    drafter.generation_config.num_assistant_tokens = max_draft
    drafter.generation_config.num_assistant_tokens_schedule = "constant"
    drafter.generation_config.assistant_confidence_threshold = 0.0
    settings = GenerationConfig(
        do_sample=False, max_new_tokens=NUM_TOKENS, assistant_ensemble_weight=WEIGHT, pad_token_id=0
    )
    ids = torch.zeros(1, 1, dtype=torch.long)
    told = target.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        assistant_model=drafter,
        generation_config=settings,
    )
    return told[0, 1:].tolist()


def their_share(max_draft: int, num_blocks: int) -> tuple[float, int]:
    """How often the drafter's favourite is said in sampled blocks of transformers, of how many."""
    torch.manual_seed(0)
    said = Counter[int]()
    for _ in range(num_blocks):
        drafts = torch.multinomial(Q, max_draft, replacement=True)[None]
        p = P.log().expand(1, max_draft + 1, -1)
        q = Q.log().expand(1, max_draft, -1)
        told, _ = _speculative_sampling(drafts, q, max_draft, p, WEIGHT)
        said.update(told[0].tolist())
    return said[1] / said.total(), said.total()


def expected_share(max_draft: int) -> float:
    """The same by the formulas: blocks of tokens from v, and one of p behind a whole one."""
    accepted = float(torch.minimum(V, Q).sum())
    from_v = sum(accepted**count for count in range(max_draft))
    from_p = accepted**max_draft
    return (from_v * float(V[1]) + from_p * float(P[1])) / (from_v + from_p)


def test_their_interface_is_the_one_described() -> None:
    assert "assistant_ensemble_weight" in inspect.signature(_speculative_sampling).parameters


def test_their_greedy_answer_is_another_for_every_draft_length() -> None:
    told = {length: their_answer(length)[:10] for length in LENGTHS}  # the last block is cut
    assert told[1] == [1, 0] * 5
    assert told[4] == [1, 1, 1, 1, 0] * 2
    assert told[8] == [1] * 8 + [0, 1]


async def test_our_greedy_answer_is_one() -> None:
    assert [await answer(length, 0, temperature=0.0) for length in LENGTHS] == [[1] * 12] * 3


@pytest.mark.parametrize("max_draft", LENGTHS)
def test_what_they_sample_follows_the_draft_length(max_draft: int) -> None:
    share, total = their_share(max_draft, 1000)
    assert share == pytest.approx(expected_share(max_draft), abs=4 * (0.25 / total) ** 0.5)


def test_theirs_are_three_distributions() -> None:
    shares = [round(expected_share(length), 3) for length in LENGTHS]
    assert shares == [0.443, 0.524, 0.543]  # and v itself says it in .55


async def test_ours_is_one_distribution_and_with_a_seed_one_text() -> None:
    said = Counter[int]()
    for seed in range(50):
        one, *others = [await answer(length, seed) for length in LENGTHS]
        assert all(each == one for each in others)
        said.update(one)
    for token, chance in enumerate(V.tolist()):
        deviation = (chance * (1 - chance) / said.total()) ** 0.5
        assert said[token] / said.total() == pytest.approx(chance, abs=4 * deviation)

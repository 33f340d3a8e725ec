"""Drafting on sinks and a window of the target's own KV, against masked transformers forwards."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import rapid
from rapid.config import SamplingConfig, SpeculationConfig, WindowDrafting
from rapid.engines.local_ports import EngineDrafter, EngineVerifier
from rapid.messages import DraftBlock, Verdict
from tests.rapid.tiny_models import (
    FAMILIES,
    lease_request,
    loaded,
    random_prompt,
    reference,
    tiny_engine,
)

PROMPT = random_prompt(50, seed=1)
WINDOW = WindowDrafting(num_sinks=3, window=10)


@torch.no_grad()
def masked_logits(
    token_ids: list[int], num_drafting: int, window: WindowDrafting, family: str
) -> torch.Tensor:
    """The last `num_drafting` rows attend to sinks and window, all others to all before them."""
    rows = torch.arange(len(token_ids))
    row, column = rows[:, None], rows[None, :]
    is_drafting = row >= len(token_ids) - num_drafting
    is_kept = (column < window.num_sinks) | (column > row - window.window)
    seen = (column <= row) & (~is_drafting | is_kept)
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    ids = torch.tensor([token_ids])
    logits = reference(family)(ids, attention_mask=mask[None, None], use_cache=False).logits
    return logits[0, -num_drafting:, : loaded(family).vocab_size]


def dense(block: DraftBlock, vocab: int) -> np.ndarray:
    rows = np.zeros((len(block), vocab))
    np.put_along_axis(rows, block.candidate_ids, block.candidate_probs, axis=-1)
    return rows


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "window",
    [WINDOW, WindowDrafting(num_sinks=0, window=1), WindowDrafting(num_sinks=4, window=48)],
)
async def test_proposals_equal_a_masked_forward(family: str, window: WindowDrafting) -> None:
    engine = tiny_engine(family)
    speculation = SpeculationConfig(eta=0.0, draft_top_k=None)
    await engine.open(lease_request("a", PROMPT, temperature=1.0, speculation=speculation))
    await engine.prefill("a")
    drafter, verifier = EngineDrafter(engine, "a", window=window), EngineVerifier(engine, "a")
    text, verdict = PROMPT.tolist(), None
    for _ in range(3):
        block = await drafter.draft(verdict, 5)
        fed = [*text, *block.token_ids[:-1].tolist()]
        expected = masked_logits(fed, len(block), window, family).softmax(-1)
        np.testing.assert_allclose(dense(block, expected.shape[1]), expected, atol=1e-5)
        verdict = await verifier.verify(drafter.draft(verdict, 5))  # drafting again is the same
        assert verdict.num_drafted == len(block)
        text += verdict.token_ids
    engine.release("a")
    engine.check_integrity()
    engine.close()


async def test_what_was_committed_elsewhere_is_computed_before_it_is_read() -> None:
    engine = tiny_engine()
    speculation = SpeculationConfig(eta=0.0, draft_top_k=None)
    await engine.open(lease_request("a", PROMPT, temperature=1.0, speculation=speculation))
    await engine.prefill("a")
    more = tuple(random_prompt(30, seed=2).tolist())
    await engine.commit("a", Verdict("a", 0, 0, more, 0, 0, False))
    block = await engine.draft_in_window("a", 0, WINDOW, 1)
    expected = masked_logits([*PROMPT.tolist(), *more], 1, WINDOW, "llama").softmax(-1)
    np.testing.assert_allclose(dense(block, expected.shape[1]), expected, atol=1e-5)
    engine.close()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_text_is_that_of_plain_decoding(temperature: float) -> None:
    sampling = SamplingConfig(temperature=temperature, seed=5)
    common = {"max_tokens": 40, "sampling": sampling}
    plain = rapid.generate(loaded(), None, PROMPT.tolist(), **common)
    windowed, full = (
        rapid.generate(loaded(), rapid.WindowDrafting(window=window), PROMPT.tolist(), **common)
        for window in (8, 200)
    )
    assert windowed.token_ids == full.token_ids == plain.token_ids
    assert 0 < windowed.statistics.accepted < windowed.statistics.drafted
    assert full.statistics.accepted == full.statistics.drafted


async def test_a_block_stays_within_the_leases_pages() -> None:
    engine = tiny_engine(page_tokens=4)
    speculation = SpeculationConfig(eta=0.0, max_draft=2)
    await engine.open(lease_request("a", PROMPT, max_tokens=3, speculation=speculation))
    await engine.prefill("a")
    block = await engine.draft_in_window("a", 0, WINDOW, 20)
    assert len(block) == 3 + 2 + 1  # the last one is drawn, not computed
    engine.close()

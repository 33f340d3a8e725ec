"""Any history of calls leaves the sequence where plain forwards over its tokens would be."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from rapid.config import SpeculationConfig, WindowDrafting
from rapid.messages import DraftBlock, Verdict
from tests.rapid.tiny_models import (
    VOCAB,
    lease_request,
    random_prompt,
    reference_greedy,
    reference_logits,
    tiny_engine,
)

PROMPT = random_prompt(13, seed=4)


@pytest.mark.parametrize("seed", range(4))
async def test_a_random_walk_never_loses_the_committed_prefix(seed: int) -> None:
    rng = np.random.default_rng(seed)
    engine = tiny_engine(page_tokens=4)
    speculation = SpeculationConfig(eta=0.0, max_draft=6)
    request = lease_request("a", PROMPT, max_tokens=200, speculation=speculation)
    await engine.open(request)
    await engine.prefill("a")
    token_ids = PROMPT.tolist()

    def position() -> int:
        return len(token_ids) - len(PROMPT)

    def block() -> DraftBlock:
        """Right for some tokens, then arbitrary."""
        num_right = rng.integers(0, 5)
        right = reference_greedy(token_ids, num_right) if num_right else []
        ids = np.array([*right, *rng.integers(4, VOCAB, rng.integers(1, 4))], dtype=np.int32)
        ones = np.ones((len(ids), 1), np.float32)
        return DraftBlock("a", 0, position(), ids, ids[:, None], ones)

    def verdict(drafted: list[int]) -> Verdict:
        """Keeps some of a block, then corrects it."""
        kept = int(rng.integers(0, len(drafted) + 1))
        ids = (*drafted[:kept], *([int(rng.integers(4, VOCAB))] if kept < len(drafted) else []))
        return Verdict("a", 0, position(), ids, len(drafted), kept, False)

    judged: Verdict | None = None
    for move in rng.choice(["draft", "window", "verify", "score", "decode"], 18):
        if move == "draft":
            drafted = await engine.draft("a", 0, None, int(rng.integers(1, 6)))
            assert drafted.token_ids.tolist() == reference_greedy(token_ids, len(drafted))
            judged = verdict(drafted.token_ids.tolist())
            if rng.random() < 0.5:  # else the draft is forgotten
                await engine.commit("a", judged)
                token_ids += judged.token_ids
        elif move == "window":  # leaves nothing behind, whether judged here, elsewhere or never
            drafted = await engine.draft_in_window("a", 0, WindowDrafting(window=4), 5)
            fate = rng.choice(["here", "elsewhere", "never"])
            if fate == "here":
                judged = await engine.verify("a", 0, drafted)
                assert list(judged.token_ids) == reference_greedy(token_ids, len(judged.token_ids))
                token_ids += judged.token_ids
            elif fate == "elsewhere":
                await engine.score("a", 0, drafted)
                judged = verdict(drafted.token_ids.tolist())
                await engine.commit("a", judged)
                token_ids += judged.token_ids
        elif move == "score":
            asked = block()
            scored = await engine.score("a", 0, asked)
            fed = [*token_ids, *asked.token_ids[:-1].tolist()]
            expected = reference_logits(fed)[-len(asked) :]
            np.testing.assert_allclose(scored.logits, expected, atol=3e-5)
            judged = verdict(asked.token_ids.tolist())
            await engine.commit("a", judged)
            token_ids += judged.token_ids
        elif move == "verify":
            judged = await engine.verify("a", 0, block())
            assert list(judged.token_ids) == reference_greedy(token_ids, len(judged.token_ids))
            token_ids += judged.token_ids
        else:
            judged = await engine.decode("a", 0, int(rng.integers(1, 4)))
            assert list(judged.token_ids) == reference_greedy(token_ids, len(judged.token_ids))
            token_ids += judged.token_ids
    engine.release("a")
    engine.check_integrity()
    assert engine.status().kv_pages_in_use == 0
    engine.close()


@pytest.mark.parametrize("host_cache_tokens", [0, 128])
async def test_a_crowd_that_comes_and_goes_leaks_nothing(host_cache_tokens: int) -> None:
    """Two dozen requests, some of which leave at any moment; the rest answer as if alone.

    Half of them begin alike, the others each in its own way.
    """
    engine = tiny_engine(
        kv_cache_tokens=640, max_leases=5, step_tokens=32, host_cache_tokens=host_cache_tokens
    )
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, 120, 24).tolist()
    prompts = [random_prompt(length, seed=i if i % 2 else 99) for i, length in enumerate(lengths)]
    patience = [float(s) if i % 3 == 0 else 60.0 for i, s in enumerate(rng.uniform(0, 0.2, 24))]

    async def ask(number: int) -> list[int]:
        target, drafter = f"{number}/target", f"{number}/drafter"
        settings = {"max_tokens": 8, "speculation": SpeculationConfig(eta=0.0, max_draft=4)}
        try:
            await engine.open(lease_request(target, prompts[number], **settings))
            await engine.prefill(target)
            plain = await engine.decode(target, 0, 3)
            if plain.is_finished:
                return list(plain.token_ids)
            # one pool for both sides: whoever holds a target may have to wait, but not for ever
            async with asyncio.timeout(0.05):
                await engine.open(lease_request(drafter, prompts[number], **settings))
            await engine.prefill(drafter)
            block = await engine.draft(drafter, 0, plain, 4)
            verdict = await engine.verify(target, 0, block)
            return [*plain.token_ids, *verdict.token_ids]
        except TimeoutError:
            verdict = await engine.decode(target, 0, 4)
            return [*plain.token_ids, *verdict.token_ids]
        finally:
            engine.release(target)
            engine.release(drafter)

    answers = await asyncio.gather(
        *(asyncio.wait_for(ask(number), patience[number]) for number in range(24)),
        return_exceptions=True,
    )
    left = [answer for answer in answers if isinstance(answer, TimeoutError)]
    assert len(left) < 24 - 8
    for number, answer in enumerate(answers):
        if not isinstance(answer, TimeoutError):
            assert answer == reference_greedy(prompts[number].tolist(), 7), number
    status = engine.status()
    assert (status.leases_open, status.kv_pages_in_use) == (0, 0)
    engine.check_integrity()
    engine.close()

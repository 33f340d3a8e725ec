"""Engines whose sliding layers have rings: the answers are those of pages, and of transformers."""

from __future__ import annotations

import asyncio
import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rapid.checkpoints.facts import read_model_facts
from rapid.checkpoints.memory import memory_needs
from rapid.config import SpeculationConfig, WindowDrafting
from rapid.engines.engine import Engine
from rapid.engines.forward.graphs.buckets import padding_pages
from rapid.engines.forward.weights.loading import LoadedModel
from rapid.errors import BadRequest, LeaseNotFound, PromptTooLong
from rapid.messages import DraftBlock, Int32Array, Verdict, as_prompt
from rapid.planning import ring_sizes
from tests.rapid.tiny_families import family_checkpoint, family_config, family_model, reference_of
from tests.rapid.tiny_models import VOCAB, lease_request, random_prompt

FAMILIES = ["gemma3_text", "gpt_oss", "mistral", "phi3", "qwen2"]
SETTINGS: dict[str, Any] = {
    "kv_cache_tokens": 4096, "max_leases": 4, "step_tokens": 48, "threads": 1,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _short_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rings of 104 slots for a window of 24, so that texts of 500 tokens go round several times."""
    monkeypatch.setattr(ring_sizes, "_SPECULATED", 24)


def engine_of(family: str, *, in_pages: bool = False, **settings: Any) -> Engine:
    path = family_checkpoint(family)
    loaded: LoadedModel = family_model(path)
    if in_pages:
        layout = replace(loaded.kv_layout, window=None, sliding=())
        loaded = replace(loaded, kv_layout=layout)
    engine = Engine(loaded, family_config(path, **SETTINGS | settings), is_watched=False)
    for stack in engine._compute.runner.cache.stacks:
        stack.fill_(math.nan)  # so that a slot that was not written is never read
    return engine


def reference_logits(path: Path, token_ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return reference_of(path)(torch.tensor([token_ids]), use_cache=False).logits[0, :, :VOCAB]


def block_of(position: int, ids: list[int], lease_id: str = "a") -> DraftBlock:
    token_ids = np.array(ids, dtype=np.int32)
    ones = np.ones((len(ids), 1), np.float32)
    return DraftBlock(lease_id, 0, position, token_ids, token_ids[:, None], ones)


def kv_bytes(engine: Engine) -> int:
    return sum(stack.nbytes for stack in engine._compute.runner.cache.stacks)


async def read(engine: Engine, prompt: Int32Array, lease_id: str = "a", **settings: Any) -> int:
    """Open a lease and prefill it; return the number of cached tokens."""
    settings = {"max_tokens": 100} | settings
    await engine.open(lease_request(lease_id, prompt, **settings))
    return (await engine.prefill(lease_id)).num_cached_tokens


async def logits_after(engine: Engine, lease_id: str = "a", choice: int = 0) -> np.ndarray:
    """Logits of the first tokens after a prompt; nothing is committed."""
    asked = replace(block_of(0, [5, 6, 7], lease_id), choice=choice)
    return (await engine.score(lease_id, choice, asked)).logits


def close(*engines: Engine) -> None:
    """Close engines, after checking that every page and ring came back."""
    for engine in engines:
        for lease in engine._state.ledger.leases():
            engine.release(lease.lease_id)
        engine.check_integrity()
        assert engine._state.ledger.rings is None or (
            engine._state.ledger.rings.num_free == SETTINGS["max_leases"]
        )
        engine.close()


@pytest.mark.parametrize("family", FAMILIES)
async def test_any_history_gives_the_logits_of_one_forward(family: str) -> None:
    """Ragged prefill of two leases, blocks, rollbacks, drafting ahead and plain decoding."""
    path, engine = family_checkpoint(family), engine_of(family)
    rng = np.random.default_rng(0)
    prompt = random_prompt(150, seed=1)
    speculation = SpeculationConfig(eta=0.0, max_draft=8)
    other = lease_request("other", random_prompt(190, seed=2), max_tokens=200)
    request = lease_request("a", prompt, max_tokens=330, speculation=speculation)
    await asyncio.gather(engine.open(request), engine.open(other))
    await asyncio.gather(engine.prefill("a"), engine.prefill("other"))
    ids = prompt.tolist()
    while len(ids) < 470:
        move = rng.choice(["score", "draft", "decode", "elsewhere", "window"])
        position = len(ids) - len(prompt)
        if move == "decode":
            decoded = await engine.decode("a", 0, 16)
            ids += decoded.token_ids
        elif move == "elsewhere":
            more = tuple(rng.integers(4, VOCAB, int(rng.integers(1, 80))).tolist())
            await engine.commit("a", Verdict("a", 0, position, more, 0, 0, False))
            ids += more
        elif move == "window":
            await engine.draft_in_window("a", 0, WindowDrafting(window=8), 4)
        elif move == "draft":
            drafted = (await engine.draft("a", 0, None, 8)).token_ids.tolist()
            kept = int(rng.integers(0, len(drafted) + 1))
            ids += drafted[:kept]
            verdict = Verdict("a", 0, position, (*drafted[:kept],), len(drafted), kept, False)
            await engine.commit("a", verdict)
        else:
            asked = rng.integers(4, VOCAB, int(rng.integers(1, 20))).tolist()
            got = (await engine.score("a", 0, block_of(position, asked))).logits
            want = reference_logits(path, [*ids, *asked[:-1]])[-len(asked) :]
            np.testing.assert_allclose(got, want, atol=5e-5)
            kept = int(rng.integers(0, len(asked)))
            right = (*asked[:kept], int(rng.integers(4, VOCAB)))
            await engine.commit("a", Verdict("a", 0, position, right, len(asked), kept, False))
            ids += right
        if rng.random() < 0.3:
            await engine.decode("other", 0, 5)
        if 3 in ids[len(prompt) :]:  # an end of the answer; go on behind it
            ids = ids[: len(prompt)] + [token for token in ids[len(prompt) :] if token != 3]
            engine.release("a")
            again = replace(request, committed=(tuple(ids[len(prompt) :]),))
            await engine.open(again)
            await engine.prefill("a")
    close(engine)


@pytest.mark.parametrize("family", ["gemma3_text", "mistral"])
async def test_answers_are_those_of_an_engine_that_keeps_every_page(family: str) -> None:
    engines = engine_of(family), engine_of(family, in_pages=True)
    assert kv_bytes(engines[0]) < kv_bytes(engines[1])
    answers = []
    for engine in engines:
        await read(engine, random_prompt(100, seed=3), temperature=0.8, max_tokens=400)
        tokens: list[int] = []
        while len(tokens) < 350:
            tokens += (await engine.decode("a", 0, 50)).token_ids
        answers.append(tokens[:350])
        close(engine)
    assert answers[0] == answers[1]


DOCUMENT = random_prompt(300, seed=4).tolist()


def question(seed: int, length: int = 14) -> Int32Array:
    return as_prompt([*DOCUMENT, *random_prompt(length, seed=100 + seed).tolist()])


@pytest.mark.parametrize("family", ["gemma3_text", "mistral"])
async def test_a_later_question_goes_on_from_a_kept_window(family: str) -> None:
    path, engine = family_checkpoint(family), engine_of(family)
    assert await read(engine, question(0), "first") == 0
    cached = []
    for number in (1, 2, 3):
        prompt = question(number)
        cached.append(await read(engine, prompt, "a"))
        want = reference_logits(path, [*prompt.tolist(), 5, 6])[-3:]
        np.testing.assert_allclose(await logits_after(engine), want, atol=5e-5)
        engine.release("a")
    # The first one found a window near the end of the other prompt, and kept one where they part.
    whole = len(DOCUMENT) // 8 * 8
    assert whole - 24 - 14 < cached[0] < whole
    assert cached[1:] == [whole, whole]
    turn = as_prompt([*question(3).tolist(), *range(10, 30)])
    assert await read(engine, turn, "turn") == (len(question(3)) - 1) // 8 * 8
    close(engine)


async def test_questions_asked_at_once_share_the_reading_of_their_document() -> None:
    path, engine = family_checkpoint("gemma3_text"), engine_of("gemma3_text")
    prompts = [question(number) for number in range(3)]
    leases = [f"lease {number}" for number in range(3)]
    cached = await asyncio.gather(*map(read, [engine] * 3, prompts, leases))
    assert sorted(cached)[0] == 0
    assert min(sorted(cached)[1:]) > 240
    for lease_id, prompt in zip(leases, prompts, strict=True):
        want = reference_logits(path, [*prompt.tolist(), 5, 6])[-3:]
        np.testing.assert_allclose(await logits_after(engine, lease_id), want, atol=5e-5)
    close(engine)


async def test_pages_without_a_kept_window_are_read_again_and_never_written() -> None:
    """Their windows made room for others; the pages stay as they are."""
    path, engine = family_checkpoint("gemma3_text"), engine_of("gemma3_text")
    await read(engine, question(0), "first")
    engine._kept._places.clear()
    cache = engine._compute.runner.cache
    full = cache.in_rings.index(False)
    pages = list(range(300))
    before = cache.layers[full][0][:, pages].clone()
    prompt = question(0)
    assert await read(engine, prompt, "a") == 0
    assert torch.equal(cache.layers[full][0][:, pages], before)
    want = reference_logits(path, [*prompt.tolist(), 5, 6])[-3:]
    np.testing.assert_allclose(await logits_after(engine), want, atol=5e-5)
    close(engine)


async def test_every_choice_has_the_window_of_the_prompt() -> None:
    path, engine = family_checkpoint("gemma3_text"), engine_of("gemma3_text")
    prompt = random_prompt(203, seed=5)
    await read(engine, prompt, num_choices=3)
    want = reference_logits(path, [*prompt.tolist(), 5, 6])[-3:]
    for choice in range(3):
        got = await logits_after(engine, "a", choice)
        np.testing.assert_allclose(got, want, atol=5e-5)
    with pytest.raises(BadRequest, match="5 answers are asked"):
        await engine.open(lease_request("b", prompt, num_choices=5))
    second = asyncio.ensure_future(engine.open(lease_request("b", prompt, num_choices=2)))
    await asyncio.sleep(0)
    assert engine.status().leases_waiting == 1  # for a ring: three of four are taken
    engine.release("a")
    await second
    with pytest.raises(PromptTooLong, match="5 sequences"):
        await engine.open(lease_request("b draft", prompt, num_choices=3, beside="b"))
    close(engine)


@pytest.mark.parametrize("seed", range(2))
async def test_under_pressure_and_cancellations_ledgers_add_up_and_answers_are_right(
    seed: int,
) -> None:
    """A pool of two documents and two kept windows, many prompts with common beginnings."""
    path = family_checkpoint("gemma3_text")
    engine = engine_of("gemma3_text", kv_cache_tokens=1024, max_context=500, max_leases=4)
    assert engine._kept is not None
    assert engine._kept.plan.num_kept <= 3
    rng = np.random.default_rng(seed)
    documents = [random_prompt(200, seed=50 + number).tolist() for number in range(3)]

    async def ask(number: int) -> None:
        document = documents[rng.integers(3)][: int(rng.integers(60, 200))]
        tail = random_prompt(int(rng.integers(5, 60)), seed=1000 * seed + number).tolist()
        prompt = as_prompt([*document, *tail])
        lease_id = f"lease {number}"
        await engine.open(lease_request(lease_id, prompt, max_tokens=100))
        prefill = asyncio.ensure_future(engine.prefill(lease_id))
        if rng.random() < 0.3:
            await asyncio.sleep(float(rng.random()) * 0.02)
            prefill.cancel()
            await asyncio.gather(prefill, return_exceptions=True)
            if rng.random() < 0.5:
                engine.release(lease_id)
                return
            prefill = asyncio.ensure_future(engine.prefill(lease_id))
        await prefill
        want = reference_logits(path, [*prompt.tolist(), 5, 6])[-3:]
        np.testing.assert_allclose(await logits_after(engine, lease_id), want, atol=5e-5)
        engine.release(lease_id)
        with pytest.raises(LeaseNotFound):
            await engine.prefill(lease_id)

    await asyncio.gather(*map(ask, range(14)))
    engine.check_integrity()
    close(engine)


async def test_a_deterministic_engine_gives_the_same_bits_with_rings() -> None:
    answers = []
    for in_pages in (False, True):
        engine = engine_of("gemma3_text", in_pages=in_pages, deterministic=True)
        await read(engine, question(0), "first")
        await read(engine, question(1))
        answers.append(await logits_after(engine))
        await engine.decode("a", 0, 20)
        close(engine)
    assert np.array_equal(answers[0], answers[1])


async def test_the_plan_of_memory_is_what_the_engine_allocates() -> None:
    path, engine = family_checkpoint("gemma3_text"), engine_of("gemma3_text")
    config = family_config(path, **SETTINGS)
    planned, _ = memory_needs(config, read_model_facts(config), on_gpu=False, with_pools=True)
    padding = padding_pages(8) * 8 * family_model(path).kv_layout.bytes_per_token
    assert kv_bytes(engine) == planned.kv_pool + padding
    close(engine)


async def test_an_engine_with_a_host_cache_keeps_every_page(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        engine = engine_of("gemma3_text", host_cache_tokens=64)
    assert engine._state.ledger.rings is None
    assert "have pages for all tokens: host_cache_tokens keeps pages" in caplog.text
    await read(engine, random_prompt(100))
    close(engine)

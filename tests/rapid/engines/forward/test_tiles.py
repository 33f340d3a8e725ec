"""Deterministic engines: the same bits whatever is computed beside a row, in bfloat16."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from rapid.config import EngineConfig, SpeculationConfig, WindowDrafting
from rapid.engines.attention.batch import Feed
from rapid.engines.engine import Engine
from rapid.engines.forward.tiles import tiles
from rapid.engines.forward.weights.loading import LoadedModel, load_model
from rapid.engines.kv.cache import PageRun, PageTable
from rapid.engines.local_ports import EngineDrafter, EngineVerifier
from rapid.errors import ConfigurationError
from rapid.messages import Float32Array, Int32Array, Verdict
from rapid.speculation.loop import speculate
from tests.rapid.engines.forward.sharding.test_shards import headed
from tests.rapid.engines.test_engine import block_of
from tests.rapid.tiny_models import (
    FAMILIES,
    engine_config,
    lease_request,
    random_prompt,
    reference_logits,
)

PROMPT = random_prompt(75, seed=3)
ANSWER = random_prompt(24, seed=4).tolist()
WAYS: dict[str, dict[str, Any]] = {
    "blocks of ten": {"block": 10},
    "blocks of four": {"block": 4},
    "one at a time": {"block": 1},
    "small chunks": {"block": 10, "step_tokens": 16},
    "odd chunks": {"block": 7, "step_tokens": 23},
    "other pages": {"block": 10, "page_tokens": 5},
    "in a crowd": {"block": 10, "crowd": 3},
    "cached": {"block": 10, "is_cached": True},
    "cached in another prompt": {"block": 10, "is_cached": True, "cached_tokens": 61},
    "replayed": {"block": 6, "replayed": 9},
    "in scattered pages": {"block": 10, "is_scattered": True, "kv_cache_tokens": 416},
}


def bfloat16_model(family: str) -> LoadedModel:
    return load_model(engine_config(family, dtype="bfloat16"))


async def scored(
    loaded: LoadedModel,
    *,
    block: int,
    deterministic: bool = True,
    crowd: int = 0,
    is_cached: bool = False,
    cached_tokens: int | None = None,
    replayed: int = 0,
    is_scattered: bool = False,
    **settings: object,
) -> Float32Array:
    """Logits of every token of `ANSWER` behind `PROMPT`, got in a certain way [24, vocab]."""
    config = loaded.config.model_copy(update={"deterministic": deterministic, **settings})
    engine = Engine(loaded, config)

    async def ask(lease_id: str, prompt: Int32Array, committed: list[int]) -> list[Float32Array]:
        await engine.open(lease_request(lease_id, prompt, committed=(tuple(committed),)))
        await engine.prefill(lease_id)
        sequence = engine._state.ledger.get(lease_id).sequences[0]
        assert len(sequence.table.runs) > 1 or not is_scattered
        rows = []
        for start in range(len(committed), len(ANSWER), block):
            drafted = block_of(ANSWER[start : start + block], start)
            rows.append((await engine.score(lease_id, 0, drafted)).logits)
            await engine.commit(lease_id, verdict(lease_id, drafted.token_ids.tolist(), start))
        return rows

    if is_scattered:  # what is free of the pool's 52 pages lies in holes of five
        for i in range(10):
            await engine.open(lease_request(f"hole-{i}", random_prompt(16, seed=i), max_tokens=8))
        for i in range(0, 10, 2):
            engine.release(f"hole-{i}")
    if is_cached:
        first = np.append(PROMPT[:cached_tokens], random_prompt(20, seed=9)).astype(np.int32)
        await ask("before", first, [])
        engine.release("before")
    others = [ask(f"other-{i}", random_prompt(40 + i, seed=i), []) for i in range(crowd)]
    rows, *_ = await asyncio.gather(ask("a", PROMPT, ANSWER[:replayed]), *others)
    engine.close()
    logits = np.concatenate(rows)
    return np.concatenate([np.full((replayed, logits.shape[1]), np.nan, np.float32), logits])


def verdict(lease_id: str, token_ids: list[int], position: int) -> Verdict:
    num = len(token_ids)
    return Verdict(lease_id, 0, position, tuple(token_ids), num, num, is_finished=False)


@pytest.mark.parametrize("family", FAMILIES)
async def test_no_bit_depends_on_what_is_computed_together(family: str) -> None:
    loaded = bfloat16_model(family)
    expected = await scored(loaded, block=10)
    for name, way in WAYS.items():
        logits = await scored(loaded, **way)
        known = ~np.isnan(logits[:, 0])
        assert np.array_equal(logits[known], expected[known]), name


@pytest.mark.parametrize("method", ["int8", "int4", "fp8"])
async def test_nor_does_one_of_quantized_weights(tmp_path: Path, method: str) -> None:
    wide = {"hidden_size": 64, "intermediate_size": 192, "head_dim": 16}
    config = headed(tmp_path, "llama", **wide)
    loaded = load_model(config.model_copy(update={"dtype": "bfloat16", "quantization": method}))
    expected = await scored(loaded, block=10)
    for name in ("one at a time", "odd chunks", "in a crowd", "cached"):
        assert np.array_equal(await scored(loaded, **WAYS[name]), expected), name


async def test_without_it_bits_do_depend_on_it() -> None:
    """Else the test above would show nothing."""
    loaded = bfloat16_model("llama")
    expected = await scored(loaded, block=10, deterministic=False)
    for way in ("one at a time", "odd chunks"):
        assert not np.array_equal(
            await scored(loaded, deterministic=False, **WAYS[way]), expected
        ), way


async def test_seeded_answers_are_the_same_however_they_are_drafted() -> None:
    loaded = bfloat16_model("qwen3")
    config = loaded.config.model_copy(update={"deterministic": True, "draft_ahead": False})
    target, drafter = Engine(loaded, config), Engine(loaded, config)

    async def answer(seed: int, eta: float, max_draft: int, *, is_drafted: bool) -> list[int]:
        speculation = SpeculationConfig(eta=eta, max_draft=max_draft, coupling="shared_noise")
        held = {target: PROMPT, drafter: PROMPT[:40]} if is_drafted else {target: PROMPT}
        for engine, prompt in held.items():
            await engine.open(
                lease_request("a", prompt, temperature=1.0, seed=seed, speculation=speculation)
            )
            await engine.prefill("a")
        token_ids: list[int] = []
        async for verdict in speculate(
            EngineDrafter(drafter, "a") if is_drafted else None,
            EngineVerifier(target, "a"),
            max_tokens=32,
            max_draft=max_draft,
        ):
            token_ids += verdict.token_ids
        for engine in held:
            engine.release("a")
        return token_ids

    moved = 0
    for seed in range(4):
        plain = await answer(seed, 0.0, 10, is_drafted=False)
        fused = await answer(seed, 4.0, 10, is_drafted=True)
        moved += fused != plain
        for max_draft in (4, 1):
            assert await answer(seed, 0.0, max_draft, is_drafted=True) == plain
            assert await answer(seed, 4.0, max_draft, is_drafted=True) == fused
    assert moved > 0
    target.close()
    drafter.close()


@pytest.mark.parametrize("family", FAMILIES)
async def test_the_numbers_are_the_models(family: str) -> None:
    loaded = load_model(engine_config(family))
    expected = reference_logits([*PROMPT.tolist(), *ANSWER], family)[len(PROMPT) - 1 : -1]
    for way in ("blocks of ten", "small chunks"):
        np.testing.assert_allclose(await scored(loaded, **WAYS[way]), expected, atol=2e-5)


def test_a_feed_falls_into_tiles() -> None:
    feed = Feed(list(range(40)), 30, PageTable([PageRun(0, 20)], 8), num_wanted=1)
    cut = list(tiles(feed))
    assert [(position, len(token_ids)) for position, token_ids in cut] == [
        (30, 2), (32, 16), (48, 16), (64, 6),
    ]  # fmt: skip
    assert [id_ for _, token_ids in cut for id_ in token_ids] == feed.token_ids


async def test_a_window_of_the_kv_is_refused() -> None:
    loaded = load_model(engine_config())
    engine = Engine(loaded, engine_config(deterministic=True))
    with pytest.raises(ConfigurationError, match="does not draft in a window"):
        await engine.draft_in_window("a", 0, WindowDrafting(), 4)
    engine.close()


@pytest.mark.parametrize("more", [{"device": "balanced"}, {"quantization": {"load_in_4bit": True}}])
def test_weights_whose_rows_are_not_computed_apart_are_refused(more: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="neither quantized by transformers nor spread"):
        EngineConfig(model="m", deterministic=True, **more)

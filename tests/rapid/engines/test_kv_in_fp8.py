"""Engines that keep KV in fp8: one model more, which answers the same in every way of computing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rapid.config import EngineConfig
from rapid.engines.forward.weights.loading import load_model
from rapid.pair.pair import Pair
from rapid.pair.pair_opening import open_pair
from tests.rapid.engines.forward.test_tiles import WAYS, bfloat16_model, scored
from tests.rapid.tiny_models import engine_config

FACTS = {
    "What is the banner of Tezawe?": "The banner of Tezawe is sozo sema 40.",
    "What is the well of Ruki?": "The well of Ruki is dry.",
}
ASKED: dict[str, dict[str, Any]] = dict(
    zip(FACTS, ({"temperature": 0.0}, {"temperature": 1.0, "seed": 7}), strict=True)
)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
async def test_no_bit_depends_on_what_is_computed_together(family: str) -> None:
    """Prefill, judging and decoding; what is cached, rejected, and beside it."""
    model = bfloat16_model(family)
    expected = await scored(model, block=10, kv_cache_dtype="fp8")
    assert not np.array_equal(expected, await scored(model, block=10))
    for name, way in WAYS.items():
        logits = await scored(model, kv_cache_dtype="fp8", **way)
        known = ~np.isnan(logits[:, 0])
        assert np.array_equal(logits[known], expected[known]), name


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
async def test_other_engines_differ_by_what_the_last_digit_rounds_to(family: str) -> None:
    """In float32 few numbers lie where another order of adding rounds them to another one."""
    model = load_model(engine_config(family))
    exact = await scored(model, block=10, deterministic=False)
    kept = await scored(model, block=10, deterministic=False, kv_cache_dtype="fp8")
    lost = np.abs(kept - exact).max(-1)
    for name in ("one at a time", "odd chunks", "in a crowd", "cached", "in scattered pages"):
        other = await scored(model, deterministic=False, kv_cache_dtype="fp8", **WAYS[name])
        moved = np.abs(other - kept).max(-1)
        assert np.median(moved) < 1e-3 * np.median(lost), name


def opened(folder: Path) -> Pair:
    """Models with KV in fp8, whose pool holds one of two documents at a time."""
    kept: dict[str, Any] = {"kv_cache_dtype": "fp8", "deterministic": True, "max_context": 512}
    tiers = {"host_cache_tokens": 1024, "disk_cache_folder": str(folder), "disk_cache_gib": 0.5}
    return open_pair(
        EngineConfig(model="embedded:target", kv_cache_tokens=512, **kept, **tiers),
        drafter=EngineConfig(model="embedded:drafter", kv_cache_tokens=512, **kept),
    )


@pytest.mark.usefixtures("always_restores")
def test_lossless_says_what_plain_says(tmp_path: Path) -> None:
    """Greedy and seeded, after rejections, from the pool, host memory, and an earlier process."""
    said: dict[str, str] = {}
    for modes in (("plain", "lossless"), ("lossless",)):
        with opened(tmp_path) as pair:
            for mode in modes:
                for asked, way in ASKED.items():
                    answer = pair.answer(
                        asked, documents=[f"{FACTS[asked]} " * 12], mode=mode, max_tokens=24, **way
                    )
                    is_known = asked in said
                    assert said.setdefault(asked, answer.text) == answer.text
                    assert (answer.receipt.cached_tokens > 100) == is_known
                    assert answer.receipt.kv_cache_dtype["target"] == "fp8"
    assert len(set(said.values())) == 2


def test_receipts_say_nothing_of_engines_that_keep_their_dtype() -> None:
    (question, fact), *_ = FACTS.items()
    with open_pair(
        EngineConfig(model="embedded:target"),
        drafter=EngineConfig(model="embedded:drafter", kv_cache_dtype="fp8"),
    ) as pair:
        fused, plain = (
            pair.answer(question, documents=[fact], mode=mode, max_tokens=4)
            for mode in ("fused", "plain")
        )
    assert fused.receipt.kv_cache_dtype == {"drafter": "fp8"}
    assert plain.receipt.kv_cache_dtype == {}

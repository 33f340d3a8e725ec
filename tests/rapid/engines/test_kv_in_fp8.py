"""Engines that keep KV in fp8: one model more, which answers the same in every way of computing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rapid.config import EngineConfig
from rapid.engines.forward.loading import load_model
from rapid.messages import Message
from rapid.pair import Pair, open_pair
from tests.rapid.engines.forward.test_tiles import WAYS, bfloat16_model, scored
from tests.rapid.tiny_models import engine_config

FACTS = "The banner of Tezawe is sozo sema 40. The well of Ruki is dry. " * 6
QUESTIONS = ("What is the banner of Tezawe?", "What is the well of Ruki?")
WAYS_OF_ASKING: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 1.0, "seed": 7}]


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


@pytest.fixture(params=["in the pool alone", "over host memory and disk"])
def pairs(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """Opens embedded models with KV in fp8, one pair after another."""
    opened: list[Pair] = []
    more: dict[str, Any] = {}
    if request.param != "in the pool alone":
        more = {"kv_cache_tokens": 1024, "max_context": 1024, "host_cache_tokens": 1024}
        more |= {"disk_cache_folder": str(tmp_path), "disk_cache_gib": 0.5}

    def again() -> Pair:
        if opened:
            opened.pop().close()
        target, drafter = (
            EngineConfig(
                model=f"embedded:{role}",
                kv_cache_dtype="fp8",
                deterministic=True,
                **(more if role == "target" else {}),
            )
            for role in ("target", "drafter")
        )
        opened.append(open_pair(target, drafter=drafter))
        return opened[0]

    yield again
    opened.pop().close()


def test_lossless_says_what_plain_says(pairs: Any) -> None:
    """Greedy and seeded, after rejections, found in the pool or not, and by a later process."""
    pair = pairs()
    said: dict[tuple[int, str], str] = {}
    for _ in range(2):
        for mode in ("plain", "lossless", "plain"):
            for question in QUESTIONS:
                for number, way in enumerate(WAYS_OF_ASKING):
                    answer = pair.answer(
                        question, documents=[FACTS], mode=mode, max_tokens=24, **way
                    )
                    assert said.setdefault((number, question), answer.text) == answer.text
                    assert answer.receipt.kv_cache_dtype["target"] == "fp8"
        pair = pairs()
    assert len(set(said.values())) > 1


def test_receipts_say_nothing_of_engines_that_keep_their_dtype() -> None:
    with open_pair(
        EngineConfig(model="embedded:target"),
        drafter=EngineConfig(model="embedded:drafter", kv_cache_dtype="fp8"),
    ) as pair:
        fused = pair.answer([Message("user", QUESTIONS[0])], documents=[FACTS], mode="fused")
        plain = pair.answer([Message("user", QUESTIONS[0])], documents=[FACTS], mode="plain")
    assert fused.receipt.kv_cache_dtype == {"drafter": "fp8"}
    assert plain.receipt.kv_cache_dtype == {}

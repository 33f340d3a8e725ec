"""The comparison of decoding, on small models and short prompts."""

from __future__ import annotations

from benchmarks.decoding.decode import DRAFTER, TARGET, speculating
from benchmarks.engine.filled import random_model


async def test_speculation_keeps_to_its_script_and_ends_its_engines() -> None:
    seen = await speculating(
        random_model("float32", **TARGET | {"num_layers": 1}, vocab_size=256),
        random_model("float32", **DRAFTER, vocab_size=256),
        64,
        batch=1,
        num_tokens=8,
        repeats=1,
        with_assisted=False,
    )
    assert set(seen["ms"]) == {"plain", "lossless", "ahead"}

"""What KV in fp8 does to the next-token distributions of real models.

    python -m benchmarks.engine.kv_fp8_models MODEL... [--tokens 384]

A model (a name of `rapid models list`, or a GGUF file) reads the beginning of `docs/operations.md`
in chunks of 128 tokens, in float32, with KV kept in float32, in fp8, and in fp8 without taking off
the centre of its keys (`rapid.engines.forward.key_centres`). For every position the table compares
the distributions with those of float32: their divergence (nats), its 99th percentile, how often the
likeliest token is the same, and by how much the text's own tokens become less likely.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.reporting import ROOT, keep, settings, table
from rapid.config import EngineConfig
from rapid.engines.attention.batch import Feed
from rapid.engines.forward.key_centres import key_centres
from rapid.engines.forward.loading import LoadedModel, load_model
from rapid.engines.forward.runner import Runner
from rapid.engines.kv.cache import KVCache, PageRun, PageTable

TEXT = ROOT / "docs/operations.md"
CHUNK = 128
PAGE = 16


def log_probs(loaded: LoadedModel, token_ids: list[int], cache: KVCache) -> torch.Tensor:
    """Return the log-probabilities after every token, [tokens, vocab]."""
    runner = Runner(loaded.model, cache, loaded.device, loaded.vocab_size)
    pages = PageTable([PageRun(0, len(token_ids) // PAGE + 1)], PAGE)
    rows = []
    for start in range(0, len(token_ids), CHUNK):
        part = token_ids[start : start + CHUNK]
        rows += runner.run([Feed(part, start, pages, len(part))])
    return torch.cat(rows).log_softmax(-1)


def compare(exact: torch.Tensor, found: torch.Tensor, token_ids: list[int]) -> dict[str, float]:
    """Return what the table says of one way to keep KV."""
    divergence = (exact.exp() * (exact - found)).sum(-1)
    same = (exact.argmax(-1) == found.argmax(-1)).float().mean()
    said = torch.tensor(token_ids[1:])[:, None]
    lost = (exact[:-1].gather(1, said) - found[:-1].gather(1, said)).mean()
    return {
        "divergence": round(float(divergence.mean()), 5),
        "its 99th percentile": round(float(divergence.quantile(0.99)), 4),
        "same likeliest token": round(float(same), 3),
        "less likely text": round(float(lost), 4),
    }


def measure(model: str, num_tokens: int) -> dict[str, dict[str, Any]]:
    """Compare all ways to keep the KV of one model."""
    loaded = load_model(
        EngineConfig(model=model, dtype="float32", device="cpu", max_context=2 * num_tokens)
    )
    token_ids = loaded.tokenizer(TEXT.read_text())["input_ids"][:num_tokens]
    num_pages = num_tokens // PAGE + 1
    exact = log_probs(loaded, token_ids, KVCache(loaded.kv_layout, num_pages, PAGE))
    layout = replace(loaded.kv_layout, is_fp8=True)
    centres = key_centres(loaded.model)
    ways = {"fp8": centres}
    if any(centre is not None for centre in centres):
        ways["fp8, no centre"] = []
    return {
        way: compare(
            exact, log_probs(loaded, token_ids, KVCache(layout, num_pages, PAGE, own)), token_ids
        )
        for way, own in ways.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+")
    parser.add_argument("--tokens", type=int, default=384)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {Path(model).stem: measure(model, options.tokens) for model in options.models}
    rows = [
        [model, way, *told.values()] for model, ways in found.items() for way, told in ways.items()
    ]
    (header,) = {tuple(told) for ways in found.values() for told in ways.values()}
    options.models = list(found)
    text = table(["model", "KV", *header], rows)
    report = {"settings": settings(options), "models": found}
    keep("kv_fp8_models", "KV in fp8: next-token distributions of real models", text, report)


if __name__ == "__main__":
    main()

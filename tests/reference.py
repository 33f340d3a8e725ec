"""The slow reference: plain transformers forwards, one token at a time, no speculation.

It shares nothing with the engines and the rule but the noise generator, so equal texts mean that
the whole path (leases, blocks, page tables, ragged batches, acceptance) samples what it says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from rapid.speculation.noise import Purpose, uniforms


@dataclass(frozen=True)
class Settings:
    """A request's resolved values, as its receipt returns them."""

    seed: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    eta: float = 0.0
    transfer: str = "boost"
    plausibility: float = 0.1
    draft_top_k: int | None = 64
    transfer_temperature: float = 1.0
    choice: int = 0

    @property
    def tie(self) -> float:
        """Below this margin two correct forwards may differ (``docs/algorithm.md``, ties)."""
        return 1e-3 * max(1, self.eta / 10) * max(1, 0.1 / (self.temperature or 1))


@dataclass
class Step:
    """One reference token, how close another outcome was (log space), and the log odds after it."""

    token: int
    margin: float
    log_odds: float


@dataclass
class Reader:
    """A model with its own cache, fed one token at a time; padded logits are cut off."""

    model: torch.nn.Module
    vocab: int | None = None
    cache: DynamicCache = field(default_factory=DynamicCache)

    @torch.inference_mode()
    def feed(self, ids: Sequence[int]) -> np.ndarray:
        out = self.model(torch.tensor([list(ids)]), past_key_values=self.cache, use_cache=True)
        return out.logits[0, -1, : self.vocab].double().numpy()


@cache
def load_reference(path: str | Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


def edge(sorted_probs: np.ndarray, size: int | None) -> float:
    """How near the token after the cut is to the last one kept."""
    if size is None or size >= len(sorted_probs) or sorted_probs[size] <= 0:
        return np.inf
    return float(np.log(sorted_probs[size - 1]) - np.log(sorted_probs[size]))


def keep(probs: np.ndarray, top_k: int | None, top_p: float) -> tuple[np.ndarray, float]:
    """Top-k, then top-p of what it left; with the distance to the nearest edge."""
    order = np.argsort(-probs, kind="stable")
    distance = edge(probs[order], top_k)
    kept = np.zeros_like(probs)
    chosen = order[: top_k or len(order)]
    mass = probs[chosen] / probs[chosen].sum()
    if top_p < 1:
        before = np.cumsum(mass) - mass
        distance = min(distance, float(np.abs(before - top_p).min()))
        chosen = chosen[before < top_p]
    kept[chosen] = probs[chosen]
    return kept / kept.sum(), distance


def proposal(logits: np.ndarray, settings: Settings) -> tuple[np.ndarray, float]:
    temperature = settings.temperature or settings.transfer_temperature
    probs, distance = keep(softmax(logits / temperature), settings.top_k, settings.top_p)
    order = np.argsort(-probs, kind="stable")
    best = order[: settings.draft_top_k or len(order)]
    cut = np.zeros_like(probs, dtype=np.float32)  # as it is sent; the rule normalises in float64
    cut[best] = probs[best]
    distance = min(distance, edge(probs[order], settings.draft_top_k))
    if settings.plausibility:
        offered = cut[cut > 0]
        margins = np.log(offered) - np.log(offered.max() * settings.plausibility)
        distance = min(distance, float(np.abs(margins).min()))
    return cut.astype(np.float64) / cut.sum(dtype=np.float64), distance


def step(
    target: np.ndarray,
    draft: np.ndarray | None,
    position: int,
    settings: Settings,
    log_odds: float = 0.0,
    witness: np.ndarray | None = None,
) -> Step:
    """Sample one token of p (no drafter logits, or eta 0) or p_hat.

    `witness` has the logits of the target's own reading of the retrieved text.
    """
    temperature = settings.temperature or settings.transfer_temperature
    scaled, distance = target / temperature, np.inf
    p = q = softmax(scaled)
    if draft is not None and settings.eta:
        q, distance = proposal(draft, settings)
        if settings.transfer == "adaptive":
            if witness is not None:
                q = (q + softmax(witness / temperature)) / 2
                margins = np.log(q[q > 0]) - np.log(q.max() * settings.plausibility)
                distance = min(distance, float(np.abs(margins).min()))
            odds = 0.999 * np.exp(0.4 * log_odds)
            weight = odds / (1 + odds)
            mixed = (1 - weight) * p + weight * q * (q >= settings.plausibility * q.max())
            scaled = np.log(mixed) + settings.eta * weight * mixed
        elif settings.transfer == "mixture":
            scaled = np.log(p + settings.eta * q)
        else:
            move = q - p
            if settings.transfer == "boost":
                move = np.maximum(move, 0) * 2 * q.max() / (q.max() + p.max())
            move[q < settings.plausibility * q.max()] = 0
            scaled = scaled + settings.eta * move
    fused = softmax(scaled)
    with np.errstate(divide="ignore"):
        if settings.temperature == 0:
            scores = np.log(fused)
        else:
            fused, fused_distance = keep(fused, settings.top_k, settings.top_p)
            distance = min(distance, fused_distance)
            noise = uniforms(settings.seed, settings.choice, position, Purpose.RESULT, len(fused))
            scores = np.log(fused) - np.log(-np.log(noise))
    best, second = np.sort(scores)[::-1][:2]
    token = int(scores.argmax())
    told = np.log(max(q[token], 1e-3) / max(p[token], 1e-3))
    return Step(token, min(float(best - second), distance), 0.85 * log_odds + told)


def answer(
    target: torch.nn.Module,
    target_prompt: Sequence[int],
    settings: Settings,
    *,
    num_tokens: int,
    drafter: torch.nn.Module | None = None,
    drafter_prompt: Sequence[int] = (),
    witness_prompt: Sequence[int] | None = None,
    eos_ids: Sequence[int] = (),
    vocab: int | None = None,
) -> list[Step]:
    """The reference answer, up to and including its end-of-sequence token.

    With a `witness_prompt` the target reads that too, and `adaptive` listens to it.
    """
    models = [target] if drafter is None else [target, drafter]
    prompts = [target_prompt, drafter_prompt]
    if witness_prompt is not None:
        models, prompts = [*models, target], [*prompts, witness_prompt]
    readers = [Reader(model, vocab) for model in models]
    logits = [reader.feed(prompt) for reader, prompt in zip(readers, prompts, strict=False)]
    steps: list[Step] = []
    while len(steps) < num_tokens:
        log_odds = steps[-1].log_odds if steps else 0.0
        draft = logits[1] if drafter else None
        witness = logits[2] if len(logits) > 2 else None
        steps.append(step(logits[0], draft, len(steps), settings, log_odds, witness))
        if steps[-1].token in eos_ids:
            break
        logits = [reader.feed([steps[-1].token]) for reader in readers]
    return steps


def is_tied(got: Sequence[int], reference: Sequence[Step], settings: Settings) -> bool:
    """False when the texts are equal; True when they part at a numeric tie; else the test fails."""
    for position, (token, want) in enumerate(zip(got, reference, strict=False)):
        if token != want.token:
            assert want.margin < settings.tie, (
                f"position {position}: {token} != {want.token}, margin {want.margin:.2g}"
            )
            return True
    assert len(got) == len(reference)
    return False

"""Draft blocks made from logits, without an engine, and rows of every kind to judge."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from rapid.messages import DraftBlock
from rapid.speculation.acceptance import propose
from rapid.speculation.draw import Draw
from rapid.speculation.questions import ToJudge
from rapid.speculation.sampling import proposal


def drafted(logits: torch.Tensor, draw: Draw) -> DraftBlock:
    """Draw a block from a drafter's rows [k, vocab]."""
    rows = [(*proposal(row, draw.after(i)), draw.after(i)) for i, row in enumerate(logits)]
    shape = (len(rows), max(len(ids) for ids, _, _ in rows))
    ids, probs = np.full(shape, -1, dtype=np.int32), np.zeros(shape, dtype=np.float32)
    for row, (row_ids, row_probs, _) in enumerate(rows):
        ids[row, : len(row_ids)], probs[row, : len(row_ids)] = row_ids, row_probs
    tokens = np.array([propose(*row) for row in rows], dtype=np.int32)
    return DraftBlock("lease", draw.choice, draw.position, tokens, ids, probs)


ROWS: dict[str, Callable[[np.random.Generator, tuple[int, int]], Any]] = {
    "usual": lambda numbers, shape: numbers.normal(size=shape) * numbers.choice([0.5, 3, 10]),
    "flat": lambda numbers, shape: np.full(shape, numbers.choice([-30.0, 0, 1e4])),
    "few values": lambda numbers, shape: numbers.integers(5, size=shape) * 0.25,
    "a peak over a flat tail": lambda numbers, shape: np.where(
        np.arange(shape[1]) == numbers.integers(shape[1]), numbers.choice([3.0, 9, 25]), 0.0
    ) + np.zeros(shape),
    "mostly impossible": lambda numbers, shape: np.where(
        (numbers.random(shape) < 0.1) | (np.arange(shape[1]) == 1),
        numbers.normal(size=shape) * 4, -np.inf,
    ),
    "far from zero": lambda numbers, shape: numbers.normal(size=shape) * 3 - 1e5,
}  # fmt: skip


def blocks(
    numbers: np.random.Generator,
    draws: Sequence[Draw],
    vocab: int,
    *,
    is_witnessed: bool = False,
    rounds_to: torch.dtype = torch.bfloat16,
    kind: str = "usual",
) -> list[ToJudge]:
    """Blocks of random lengths whose drafter is more or less like the target."""
    questions = []
    for draw in draws:
        shape = (int(numbers.choice([1, 2, 4, 8])), vocab)
        target = ROWS[kind](numbers, shape)
        draft, witness = (
            target + numbers.normal(size=shape) * numbers.choice([0, 0.1, 1, 3]) for _ in range(2)
        )
        rows, drafts, told = (
            torch.tensor(part, dtype=rounds_to).float() for part in (target, draft, witness)
        )
        block = drafted(drafts, draw)
        eos_ids = {int(numbers.choice(block.token_ids))} if numbers.random() < 0.2 else set()
        log_odds = float(numbers.choice([0, 1.3, -8, 40]))
        seen = told if is_witnessed else None
        questions.append(ToJudge(block, rows, draw, eos_ids, None, log_odds, seen))
    return questions

"""Draft blocks made from logits, without an engine."""

from __future__ import annotations

import numpy as np
import torch

from rapid.messages import DraftBlock
from rapid.speculation.acceptance import propose
from rapid.speculation.draw import Draw
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

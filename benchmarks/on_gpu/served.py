"""A model over a pool of random KV, and tables of the pool's pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rapid.engines.attention.batch import Feed
from rapid.engines.attention.kernel_inputs import Kernels
from rapid.engines.forward.graphs.cuda_graphs import GraphCapture
from rapid.engines.forward.runner import Runner
from rapid.engines.kv.cache import KVCache, PageRun, PageTable

PAGE = 16


def tables_of(context: int, batch: int) -> list[PageTable]:
    each = context // PAGE
    return [PageTable([PageRun(i * each, (i + 1) * each)], PAGE) for i in range(batch)]


def questions_of(context: int, number: int = 6) -> list[PageTable]:
    """Return the pages of questions that share all but their last pages."""
    own = 4
    shared = context // PAGE - own
    return [
        PageTable([PageRun(0, shared), PageRun(shared + i * own, shared + (i + 1) * own)], PAGE)
        for i in range(number)
    ]


@dataclass
class Served:
    """The model, its pool, and an engine's attention over it."""

    name: str
    model: Any
    cache: KVCache
    kernels: Kernels
    max_context: int
    device: torch.device
    bytes_per_s: float  # memory bandwidth of the device

    @property
    def vocab_size(self) -> int:
        size: int = self.model.config.vocab_size
        return size

    def runner(self, is_captured: bool = True) -> Runner:
        runner = Runner(self.model, self.cache, self.device, self.vocab_size, self.kernels)
        if is_captured and self.device.type == "cuda":
            runner.capture_steps(self.max_context, GraphCapture())
        return runner

    @property
    def weight_bytes(self) -> int:
        """The bytes of weights that a step reads: all but the embedding, unless it is the head."""
        embedding = self.model.model.embed_tokens.weight
        total = sum(p.numel() * p.element_size() for p in self.model.parameters())
        is_tied = embedding is self.model.lm_head.weight
        return total - (0 if is_tied else embedding.numel() * embedding.element_size())

    def least_ms(self, context: int, batch: int) -> float:
        """Return the least milliseconds of a step, which are its bytes over the bandwidth."""
        keys = self.cache.layers[0][0]
        per_token = 2 * len(self.cache.layers) * keys.shape[0] * keys.shape[2] * keys.element_size()
        return (self.weight_bytes + batch * context * per_token) / self.bytes_per_s * 1e3

    def feeds(
        self,
        context: int,
        batch: int,
        rows: int,
        wanted: int | None = None,
        tables: list[PageTable] | None = None,
    ) -> list[Feed]:
        ids = np.random.default_rng(0).integers(4, self.vocab_size, (batch, rows))
        wanted = rows if wanted is None else wanted
        return [
            Feed(own.tolist(), context - rows, table, wanted)
            for own, table in zip(ids, tables or tables_of(context, batch), strict=True)
        ]

"""A tiny language made of hashes: logits are a function of the prefix alone."""

from __future__ import annotations

import asyncio
import functools
import zlib
from collections.abc import Awaitable, Sequence

import numpy as np
import torch

from rapid.config import SamplingConfig, SpeculationConfig
from rapid.errors import DrafterUnavailable
from rapid.messages import DraftBlock, Verdict
from rapid.speculation.acceptance import decode_token, ends_block, judge, num_rows, propose
from rapid.speculation.draw import Draw
from rapid.speculation.sampling import proposal


class ToyModel:
    """`logits(prefix)` is gaussian noise keyed by (name, prefix): no state, no training."""

    def __init__(self, name: str, vocab: int = 5, scale: float = 2.0) -> None:
        self.name, self.vocab, self.scale = name, vocab, scale

    def logits(self, prefix: Sequence[int]) -> torch.Tensor:
        return noise(self.name, tuple(prefix), self.vocab, self.scale)


@functools.lru_cache(2**16)  # enumerations ask for the same prefixes again and again
def noise(name: str, prefix: tuple[int, ...], vocab: int, scale: float) -> torch.Tensor:
    key = zlib.crc32(f"{name}:{list(prefix)}".encode())
    numbers = np.random.default_rng(key).normal(size=vocab)
    return torch.from_numpy((numbers * scale).astype(np.float32))


def stack_rows(rows: Sequence[np.ndarray], fill: float) -> np.ndarray:
    """Rows of several lengths as one array."""
    filled = np.full((len(rows), max(map(len, rows))), fill, rows[0].dtype)
    for place, row in enumerate(rows):
        filled[place, : len(row)] = row
    return filled


class ToyDrafter:
    """A drafter port over a toy model; `lost_at` makes it die at that position."""

    def __init__(
        self,
        model: ToyModel,
        sampling: SamplingConfig,
        speculation: SpeculationConfig,
        choice: int = 0,
        lost_at: int | None = None,
    ) -> None:
        self.model, self.sampling, self.speculation = model, sampling, speculation
        self.choice, self.lost_at = choice, lost_at
        self.committed: list[int] = []

    def draft(self, verdict: Verdict | None, num_tokens: int) -> asyncio.Future[DraftBlock]:
        self.committed.extend(verdict.token_ids if verdict else ())
        block = asyncio.get_running_loop().create_future()
        if self.lost_at is not None and len(self.committed) >= self.lost_at:
            block.set_exception(DrafterUnavailable("the drafter died"))
        else:
            block.set_result(self.block(self.committed, num_tokens))
        return block

    def block(self, prefix: Sequence[int], num_tokens: int) -> DraftBlock:
        tokens, all_ids, all_probs = list(prefix), [], []
        for _ in range(num_tokens):
            draw = Draw(self.sampling, self.speculation, self.choice, len(tokens))
            ids, probs = proposal(self.model.logits(tokens), draw)
            tokens.append(propose(ids, probs, draw))
            all_ids.append(ids)
            all_probs.append(probs)
            if ends_block(tokens[-1], ids, probs, self.speculation):
                break
        return DraftBlock(
            lease_id="toy",
            choice=self.choice,
            position=len(prefix),
            token_ids=np.array(tokens[len(prefix) :], dtype=np.int32),
            candidate_ids=stack_rows(all_ids, -1),
            candidate_probs=stack_rows(all_probs, 0),
        )


class ToyVerifier:
    """A verifier port over a toy model; `max_tokens` is the longest answer.

    `witness` stands for the target's own reading of the retrieved text.
    """

    def __init__(
        self,
        model: ToyModel,
        sampling: SamplingConfig,
        speculation: SpeculationConfig,
        choice: int = 0,
        eos_ids: frozenset[int] = frozenset(),
        max_tokens: int = 40,
        witness: ToyModel | None = None,
    ) -> None:
        self.model, self.sampling, self.speculation = model, sampling, speculation
        self.choice, self.eos_ids, self.max_tokens = choice, eos_ids, max_tokens
        self.witness = witness
        self.committed: list[int] = []
        self.log_odds = 0.0

    async def verify(self, block: DraftBlock | Awaitable[DraftBlock]) -> Verdict:
        drafted = block if isinstance(block, DraftBlock) else await block
        assert drafted.position == len(self.committed)
        prefix = [*self.committed, *drafted.token_ids.tolist()]
        first = drafted.position
        num_wanted = num_rows(len(drafted), self.max_tokens - first, self.speculation)

        def rows(model: ToyModel) -> torch.Tensor:
            return torch.stack([model.logits(prefix[: first + i]) for i in range(num_wanted)])

        judgement = judge(
            drafted,
            rows(self.model),
            self._draw(),
            self.eos_ids,
            2,
            self.log_odds,
            rows(self.witness) if self.witness else None,
        )
        self.log_odds = judgement.log_odds
        self.committed.extend(judgement.token_ids)
        return judgement.verdict(drafted)

    async def decode(self, num_tokens: int) -> Verdict:
        first, finished = len(self.committed), False
        while len(self.committed) < first + num_tokens and not finished:
            token, _ = decode_token(self.model.logits(self.committed), self._draw())
            self.committed.append(token)
            finished = token in self.eos_ids
        tokens = tuple(self.committed[first:])
        return Verdict("toy", self.choice, first, tokens, 0, 0, finished)

    def _draw(self) -> Draw:
        return Draw(self.sampling, self.speculation, self.choice, len(self.committed))

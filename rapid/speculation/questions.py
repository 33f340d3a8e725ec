"""Questions about the rows of a step, each with all that its tokens depend on, and the answers."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch

from rapid.messages import DraftBlock, Float32Array, Int32Array, TokenLogprobs
from rapid.receipt import TokenProbs
from rapid.speculation.acceptance import Judgement, decode_token, judge, own_probs, propose
from rapid.speculation.draw import Draw
from rapid.speculation.sampling import proposal


@dataclass(frozen=True, slots=True)
class ToPropose:
    """A token to draft."""

    logits: torch.Tensor  # one row of the drafter [vocab]
    draw: Draw  # sampling settings, and the position of the token

    def by_specification(self) -> Proposed:
        """Return the proposal, with what `propose` draws from it."""
        ids, probs = proposal(self.logits, self.draw)
        return Proposed(propose(ids, probs, self.draw), ids, probs)


@dataclass(frozen=True, slots=True)
class ToDecode:
    """A token to draw from the model's own distribution."""

    logits: torch.Tensor  # one row [vocab]
    draw: Draw  # sampling settings, and the position of the token
    # Number of alternatives beside the token; None for no log-probabilities.
    num_logprobs: int | None = None
    explains: bool = False  # whether the answer says how likely its token was

    def by_specification(self) -> Decoded:
        """Return what `decode_token` says of the row."""
        token, logprobs = decode_token(self.logits, self.draw, self.num_logprobs)
        probs = own_probs(self.logits, token, self.draw) if self.explains else None
        return Decoded(token, logprobs, probs, num_specified=1)


@dataclass(frozen=True, slots=True)
class ToJudge:
    """A block to judge; see `rapid.speculation.acceptance.judge` for the attributes."""

    block: DraftBlock
    logits: torch.Tensor
    draw: Draw
    eos_ids: Set[int]
    num_logprobs: int | None = None
    log_odds: float = 0.0
    witness: torch.Tensor | None = None
    explains: bool = False

    def by_specification(
        self, num_settled: int = 0, log_odds: float | None = None, num_rows: int | None = None
    ) -> Judgement:
        """Return what `judge` says of the block, or of its tokens after some that are settled.

        Args:
            num_settled: Drafted tokens that are accepted already.
            log_odds: Those after the settled tokens; None for those before the block.
            num_rows: Rows of logits that are judged; None for all.
        """
        end = None if num_rows is None else num_settled + num_rows
        block, rest = self.block, slice(num_settled, end)
        return judge(
            replace(
                block,
                position=block.position + num_settled,
                token_ids=block.token_ids[rest],
                candidate_ids=block.candidate_ids[rest],
                candidate_probs=block.candidate_probs[rest],
            ),
            self.logits[rest],
            self.draw.after(num_settled),
            self.eos_ids,
            self.num_logprobs,
            self.log_odds if log_odds is None else log_odds,
            None if self.witness is None else self.witness[rest],
            explains=self.explains,
        )


@dataclass(frozen=True, slots=True)
class Proposed:
    """A drafted token, with the proposal that it was drawn from."""

    token: int
    candidate_ids: Int32Array
    candidate_probs: Float32Array


@dataclass(frozen=True, slots=True)
class Decoded:
    """A token of the model's own distribution, and how likely it was if that was asked for."""

    token: int
    logprobs: TokenLogprobs | None = None
    probs: TokenProbs | None = None
    num_specified: int = field(default=0, compare=False)  # 1 if `decode_token` drew it


Question: TypeAlias = ToPropose | ToDecode | ToJudge
Answer: TypeAlias = Proposed | Decoded | Judgement

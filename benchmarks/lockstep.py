"""Greedy decoding of one prompt under many rules at once, for studies of the rule itself.

What a rule answers does not need speculation: `fused` commits exactly what its distribution, taken
token by token, gives (`tests/end_to_end/test_slow_reference.py`). So every variant of the rule is
one row of a batch whose rows share the two prompts' keys and values: one forward of each model
advances all variants by a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import AttentionInterface

from rapid.engines.loading import LoadedModel

NAME = "rapid_lockstep"
Rule = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(target logits, drafter logits, which variants), [rows, vocab] twice and [rows], to scores."""


@dataclass(slots=True)
class Layer:
    """Keys and values of the prompt [heads, n, d], and of rows [rows, heads, n, d]."""

    prompt: tuple[torch.Tensor, torch.Tensor] | None = None
    rows: tuple[torch.Tensor, torch.Tensor] | None = None


class Reader:
    """One model with one prompt, read for many rows."""

    def __init__(self, loaded: LoadedModel, prompt_ids: Sequence[int]) -> None:
        self._model = loaded.model
        self._layers = [Layer() for _ in self._model.model.layers]
        self._length = 0
        self._vocab = loaded.vocab_size
        self.logits = self._forward(torch.tensor([list(prompt_ids)]))

    def feed(self, tokens: torch.Tensor) -> None:
        """Advance every row by its token [rows]."""
        self.logits = self._forward(tokens[:, None])

    def keep(self, rows: torch.Tensor) -> None:
        """Go on with some of the rows; of the prompt alone, with as many copies."""
        self.logits = self.logits[rows]
        for layer in self._layers:
            if layer.rows is not None:
                layer.rows = (layer.rows[0][rows], layer.rows[1][rows])

    @torch.inference_mode()
    def _forward(self, ids: torch.Tensor) -> torch.Tensor:
        implementation = self._model.config._attn_implementation
        self._model.config._attn_implementation = NAME
        try:
            positions = torch.arange(self._length, self._length + ids.shape[1])
            hidden = self._model.model(
                input_ids=ids,
                position_ids=positions.expand(ids.shape),
                use_cache=False,
                lockstep=self._layers,
            ).last_hidden_state
        finally:
            self._model.config._attn_implementation = implementation
        self._length += ids.shape[1]
        return self._model.lm_head(hidden[:, -1])[:, : self._vocab].float()


def attention(module, query, key, value, attention_mask, scaling=None, *, lockstep, **_):
    """The prompt once for all rows, each row's own tokens beside it."""
    layer = lockstep[module.layer_idx]
    if layer.prompt is None:
        layer.prompt = (key[0], value[0])
        output = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True, scale=scaling
        )
        return output.transpose(1, 2), None
    own = (key, value)
    if layer.rows is not None:
        own = tuple(torch.cat(pair, dim=2) for pair in zip(layer.rows, own, strict=True))
    layer.rows = own
    rows, heads, _, width = query.shape
    kv_heads = key.shape[1]
    grouped = query.reshape(rows, kv_heads, heads // kv_heads, width) * scaling
    packed = grouped.transpose(0, 1).reshape(kv_heads, -1, width)
    shared = (packed @ layer.prompt[0].mT).view(kv_heads, rows, -1, layer.prompt[0].shape[1])
    scores = torch.cat((shared.transpose(0, 1), grouped @ own[0].mT), dim=-1)
    weights = torch.softmax(scores, dim=-1)
    on_prompt, on_own = weights.split((layer.prompt[0].shape[1], own[0].shape[2]), dim=-1)
    output = (
        on_prompt.transpose(0, 1).reshape(kv_heads, -1, layer.prompt[0].shape[1]) @ layer.prompt[1]
    ).view(kv_heads, rows, -1, width).transpose(0, 1) + on_own @ own[1]
    return output.reshape(rows, 1, heads, width), None


AttentionInterface.register(NAME, attention)


@dataclass(slots=True)
class Answer:
    """Whether a variant was right, and how often it agreed with the drafter on the way."""

    is_right: bool = False
    num_tokens: int = 0
    num_agreed: int = 0


def decode(
    target: Reader, drafter: Reader, rule: Rule, num_variants: int, right: Sequence[int]
) -> list[Answer]:
    """Answer under every variant of a rule; each step commits the best token of its scores.

    A variant that leaves the right answer is wrong, and is not decoded further.

    Args:
        rule: called with the logits of the variants that are still right, and their numbers.
        right: token ids of the answer, with the end of sequence.
    """
    answers = [Answer() for _ in range(num_variants)]
    alive = torch.arange(num_variants)
    for reader in (target, drafter):
        reader.keep(torch.zeros(num_variants, dtype=torch.long))
    for position, token in enumerate(right):
        chosen = rule(target.logits, drafter.logits, alive).argmax(-1)
        agreed = chosen == drafter.logits.argmax(-1)
        for row, same in zip(alive.tolist(), agreed.tolist(), strict=True):
            answers[row].num_tokens += 1
            answers[row].num_agreed += same
        still = (chosen == token).nonzero()[:, 0]
        alive = alive[still]
        if not len(alive):
            break
        if position + 1 < len(right):
            for reader in (target, drafter):
                reader.keep(still)
                reader.feed(torch.full((len(alive),), token))
    for row in alive.tolist():
        answers[row].is_right = True
    return answers

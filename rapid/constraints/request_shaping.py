"""The shaping that a request asks of its models, from its settings."""

from __future__ import annotations

from collections.abc import Callable, Collection

from rapid.config import SamplingConfig
from rapid.constraints.penalties import (
    AllowedTokens,
    BadWords,
    LeastLength,
    Penalties,
    RepetitionPenalty,
    SomeTokenLeft,
)
from rapid.constraints.shaping import LogitBias, Shaping, Shapings
from rapid.constraints.thinking_budget import ThinkingShaping
from rapid.errors import BadRequest


def open_shaping(
    sampling: SamplingConfig,
    eos_ids: Collection[int] = (),
    open_grammar: Callable[[str], Shaping] | None = None,
    prompt_set: bytes = b"",
) -> Shaping | None:
    """Return the shaping that a request asks for; None, at no cost, if for none.

    Args:
        sampling: The request's settings.
        eos_ids: The model's tokens that end an answer.
        open_grammar: Returns the shaping of a grammar; None for an engine that follows none.
        prompt_set: See `rapid.messages.Terms`.

    Raises:
        BadRequest: The engine cannot follow the grammar.
    """
    parts: list[Shaping] = []
    if sampling.logit_bias:
        parts.append(LogitBias(sampling.logit_bias))
    if sampling.repetition_penalty != 1:
        parts.append(RepetitionPenalty(sampling.repetition_penalty, prompt_set))
    if sampling.presence_penalty or sampling.frequency_penalty:
        parts.append(Penalties(sampling.presence_penalty, sampling.frequency_penalty))
    bounds: list[Shaping] = []
    if sampling.min_tokens:
        bounds.append(LeastLength(sampling.min_tokens, sampling.ends(frozenset(eos_ids))))
    if sampling.allowed_token_ids:
        bounds.append(AllowedTokens(sampling.allowed_token_ids))
    if sampling.bad_words:
        bounds.append(BadWords(sampling.bad_words))
    parts += [*bounds, *([SomeTokenLeft()] if len(bounds) > 1 else [])]
    if sampling.grammar is not None:
        if open_grammar is None:
            raise BadRequest("This model cannot follow grammars.", "response_format")
        parts.append(open_grammar(sampling.grammar))
    if sampling.thinking is not None:
        grammar = parts.pop() if sampling.grammar is not None else None
        ends = sampling.ends(frozenset(eos_ids))
        parts.append(ThinkingShaping(sampling.thinking, grammar, ends))
    return Shapings(parts) if len(parts) > 1 else next(iter(parts), None)

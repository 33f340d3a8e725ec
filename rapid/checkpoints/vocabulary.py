"""Drafter and target must mean the same by every token id."""

from __future__ import annotations

from collections.abc import Set
from typing import Any, Protocol

from rapid.errors import ConfigurationError


class Vocabulary(Protocol):
    """What two models must share; a `rapid.engines.forward.loading.LoadedModel` is one."""

    @property
    def tokenizer(self) -> Any:
        """Of the checkpoint."""

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""


def check_same_vocabulary(target: Vocabulary, drafter: Vocabulary) -> int:
    """Refuse two models whose token ids mean different things.

    Widths of logits may differ by padding; both are cut to the size returned. Chat templates may
    differ.

    Returns:
        The number of ids, from 0, that both use.

    Raises:
        ConfigurationError: naming the first token that differs.
    """
    ours, theirs = _by_id(target.tokenizer), _by_id(drafter.tokenizer)
    shared = min(len(ours), len(theirs))
    for token_id in range(shared):
        if ours[token_id] != theirs[token_id]:
            raise ConfigurationError(
                "target and drafter have different vocabularies: token id "
                f"{token_id} is {ours[token_id]!r} for the target and {theirs[token_id]!r} for "
                "the drafter; choose a drafter of the target's family"
            )
    longer, owner = (ours, "target") if len(ours) > len(theirs) else (theirs, "drafter")
    if len(longer) > shared:
        raise ConfigurationError(
            f"target and drafter have different vocabularies: only the {owner} has the token "
            f"{longer[shared]!r} (id {shared}); choose a drafter of the target's family"
        )
    if target.eos_ids != drafter.eos_ids:
        raise ConfigurationError(
            "target and drafter end answers with different tokens: "
            f"{_names(ours, target.eos_ids)} and {_names(theirs, drafter.eos_ids)}; "
            "use checkpoints of the same kind (both instruct)"
        )
    return shared


def num_ids(tokenizer: Any) -> int:
    """How many ids, from 0, a tokenizer uses; added tokens count, holes too."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def _by_id(tokenizer: Any) -> list[str | None]:
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    tokens: list[str | None] = [None] * num_ids(tokenizer)
    for token, token_id in vocabulary.items():
        tokens[token_id] = token
    return tokens


def _names(tokens: list[str | None], ids: Set[int]) -> str:
    names = [repr(tokens[i]) if i < len(tokens) else str(i) for i in sorted(ids)]
    return ", ".join(names) or "none"

"""Check that drafter and target use the same vocabulary, so that every id means the same."""

from __future__ import annotations

from collections.abc import Set
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from rapid.errors import ConfigurationError


class Vocabulary(Protocol):
    """The vocabulary of a model, as `rapid.engines.forward.weights.loading.LoadedModel` has one."""

    @property
    def tokenizer(self) -> Any:
        """The Hugging Face tokenizer of the checkpoint."""

    @property
    def eos_ids(self) -> frozenset[int]:
        """Ids of the tokens that end an answer."""


class ModelVocabulary(NamedTuple):
    """The vocabulary of a model whose weights are not loaded; see `Vocabulary`."""

    tokenizer: Any
    eos_ids: frozenset[int]


def check_same_vocabulary(target: Vocabulary, drafter: Vocabulary) -> int:
    """Return how many ids, counted from 0, mean the same in two models; logits may be padded.

    Raises:
        ConfigurationError: the vocabularies or end-of-sequence tokens differ; the message names
            the first id that differs, or the end-of-sequence tokens of both.
    """
    ours, theirs = _by_id(target.tokenizer), _by_id(drafter.tokenizer)
    shared = min(len(ours), len(theirs))
    for token_id in range(shared):
        if ours[token_id] != theirs[token_id]:
            raise different_vocabularies(
                f"token id {token_id} is {ours[token_id]!r} for the target and "
                f"{theirs[token_id]!r} for the drafter"
            )
    longer, owner = (ours, "target") if len(ours) > len(theirs) else (theirs, "drafter")
    if len(longer) > shared:
        raise different_vocabularies(
            f"only the {owner} has the token {longer[shared]!r} (id {shared})"
        )
    if target.eos_ids != drafter.eos_ids:
        raise ConfigurationError(
            "target and drafter end answers with different tokens: "
            f"{_names(ours, target.eos_ids)} and {_names(theirs, drafter.eos_ids)}; "
            "use checkpoints of the same kind (both instruct)"
        )
    return shared


def different_vocabularies(how: str) -> ConfigurationError:
    """Return the error for a target and a drafter whose vocabularies differ, which says how."""
    return ConfigurationError(
        f"target and drafter have different vocabularies: {how}; choose a drafter of the target's "
        "family"
    )


def num_ids(tokenizer: Any) -> int:
    """Return the number of ids, counted from 0, of a tokenizer, with added tokens and gaps."""
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


def pack_tokens(token_ids: npt.ArrayLike) -> bytes:
    """Return the set of some tokens, a bit for each id up to the highest."""
    ids = np.asarray(token_ids, dtype=np.int64)
    is_there = np.zeros(ids.max(initial=-1) + 1, dtype=np.bool_)
    is_there[ids] = True
    return np.packbits(is_there, bitorder="little").tobytes()

"""Which drafters may draft for which targets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from rapid.checkpoints.vocabulary import check_same_vocabulary, num_ids
from rapid.errors import ConfigurationError


@dataclass(frozen=True)
class OwnVocabulary:
    tokenizer: Any
    eos_ids: frozenset[int]


def vocabulary(words: str, eos_ids: tuple[int, ...] = (0,), extra: str = "") -> OwnVocabulary:
    ids = {word: index for index, word in enumerate(words.split())}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(ids, unk_token="a")), unk_token="a"
    )
    tokenizer.add_tokens(extra.split())
    return OwnVocabulary(tokenizer, frozenset(eos_ids))


def test_equal_tables_share_all_ids_added_tokens_included() -> None:
    target, drafter = vocabulary("a b c", extra="<x>"), vocabulary("a b c", extra="<x>")
    assert check_same_vocabulary(target, drafter) == num_ids(target.tokenizer) == 4


@pytest.mark.parametrize(
    ("drafter", "sentence"),
    [
        (vocabulary("a c b"), "token id 1 is 'b' for the target and 'c' for the drafter"),
        (vocabulary("a b"), r"only the target has the token 'c' \(id 2\)"),
        (vocabulary("a b c d"), "only the drafter has the token 'd'"),
        (
            vocabulary("a b c", eos_ids=(0, 2)),
            "end answers with different tokens: 'a' and 'a', 'c'",
        ),
    ],
)
def test_tables_that_differ_are_refused_by_name(drafter: OwnVocabulary, sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        check_same_vocabulary(vocabulary("a b c"), drafter)

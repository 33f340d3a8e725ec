"""Tokenizers made here: nothing is downloaded."""

import re

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast


def words(text: str) -> list[tuple[int, int]]:
    """A token is a word or one other visible character; white space belongs to nobody."""
    return [match.span() for match in re.finditer(r"\w+|[^\w\s]", text)]


def characters(text: str) -> list[tuple[int, int]]:
    return [(i, i + 1) for i in range(len(text))]


def utf8_bytes(text: str) -> list[tuple[int, int]]:
    """A token is a byte, so one character may be four tokens with the same offsets."""
    return [(i, i + 1) for i, char in enumerate(text) for _ in char.encode()]


def everything(text: str) -> list[tuple[int, int]]:
    """One token, whatever the text: WordPiece on 40,000 unbroken characters."""
    return [(0, len(text))] if text else []


def byte_level_bpe(corpus: list[str], vocab_size: int = 400) -> PreTrainedTokenizerFast:
    """A small tokenizer of the kind Llama 3 and Qwen have: words own the space before them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)

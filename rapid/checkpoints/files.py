"""Location of a checkpoint, its small files and its tokenizer; usable without torch."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from rapid.catalogue import find, local_path
from rapid.checkpoints.gguf import SUFFIX, is_gguf, read_settings, read_tokenizer
from rapid.documents import keep_no_words
from rapid.embedded import DRAFTER, TARGET
from rapid.errors import ConfigurationError, first_line

EMBEDDED = {"embedded:target": TARGET, "embedded:drafter": DRAFTER}


def checkpoint_source(model: str) -> str:
    """Return the directory, GGUF file or hub name (``owner/model``) that a model is loaded from.

    Raises:
        ConfigurationError: there is no such directory, file or embedded model, or it is a model of
            the catalogue that has not been fetched.
    """
    if model.startswith("embedded:"):
        if model not in EMBEDDED:
            raise ConfigurationError(f"model {model!r}: embedded models are {', '.join(EMBEDDED)}")
        model = str(EMBEDDED[model])
    model = local_path(model)
    path = Path(os.path.expanduser(model))  # unlike Path's, it leaves unknown users as they are
    if path.is_file() if is_gguf(model) else path.is_dir():
        return str(path)
    if is_gguf(model):
        raise ConfigurationError(f"model {model!r}: there is no such {SUFFIX} file")
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        raise ConfigurationError(f"model {model!r}: there is no such checkpoint directory")
    if "/" not in model:
        find(model)
    return model


def read_json(source: str, filename: str) -> dict[str, Any] | None:
    """Return the content of one of the checkpoint's JSON files, or None if it has no such file.

    A GGUF file has a ``config.json`` only: its metadata.

    Raises:
        ConfigurationError: the source is a GGUF file that cannot be used.
    """
    if is_gguf(source):
        return read_settings(source) if filename == "config.json" else None
    from transformers.utils.hub import cached_file  # takes as long as most commands

    try:
        found = cached_file(source, filename)
    except OSError:
        return None
    if found is None:
        return None
    content: dict[str, Any] = json.loads(Path(found).read_text(encoding="utf-8"))
    return content


def load_tokenizer(model: str) -> Any:
    """Load a checkpoint's tokenizer, which keeps no words of the texts that it reads.

    Raises:
        ConfigurationError: It has no usable one.
    """
    from transformers import PreTrainedTokenizerFast

    source = checkpoint_source(model)
    try:
        if is_gguf(source):
            tokenizer = read_tokenizer(source)
        else:
            tokenizer = PreTrainedTokenizerFast.from_pretrained(source)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigurationError(
            f"model {model!r} has no usable tokenizer: {first_line(error)}"
        ) from error
    keep_no_words(tokenizer)
    return tokenizer


def read_eos_ids(source: str, tokenizer: Any) -> frozenset[int]:
    """Return the ids of the tokens that end an answer."""
    for filename in ("generation_config.json", "config.json"):
        eos = (read_json(source, filename) or {}).get("eos_token_id")
        if eos is not None:
            return frozenset(eos if isinstance(eos, list) else [eos])
    return frozenset() if tokenizer.eos_token_id is None else frozenset([tokenizer.eos_token_id])


def read_temperature(source: str) -> float:
    """Return the temperature that the generation config recommends, or else 1, as vLLM does."""
    found = (read_json(source, "generation_config.json") or {}).get("temperature")
    return float(found) if isinstance(found, int | float) and 0 <= found <= 2 else 1.0

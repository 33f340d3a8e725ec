"""Location of a checkpoint and its small files; usable without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers.utils.hub import cached_file

from rapid.embedded import DRAFTER, TARGET
from rapid.errors import ConfigurationError

EMBEDDED = {"embedded:target": TARGET, "embedded:drafter": DRAFTER}


def checkpoint_source(model: str) -> str:
    """Return the directory or hub name that transformers loads a model from.

    Raises:
        ConfigurationError: the name is that of a missing directory or unknown embedded model.
    """
    if model.startswith("embedded:"):
        if model not in EMBEDDED:
            raise ConfigurationError(f"model {model!r}: embedded models are {', '.join(EMBEDDED)}")
        model = str(EMBEDDED[model])
    path = Path(model).expanduser()
    if path.is_dir():
        return str(path)
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        raise ConfigurationError(f"model {model!r}: there is no such checkpoint directory")
    return model


def read_json(source: str, filename: str) -> dict[str, Any] | None:
    """Return the content of one of the checkpoint's JSON files, or None if it has no such file."""
    try:
        found = cached_file(source, filename)
    except OSError:
        return None
    if found is None:
        return None
    content: dict[str, Any] = json.loads(Path(found).read_text(encoding="utf-8"))
    return content


def read_eos_ids(source: str, tokenizer: Any) -> frozenset[int]:
    """Return the ids of the tokens that end an answer.

    They are those of the generation config, or else of the model's config, or else the tokenizer's.
    """
    for filename in ("generation_config.json", "config.json"):
        eos = (read_json(source, filename) or {}).get("eos_token_id")
        if eos is not None:
            return frozenset(eos if isinstance(eos, list) else [eos])
    return frozenset() if tokenizer.eos_token_id is None else frozenset([tokenizer.eos_token_id])

"""Where a checkpoint is; without torch, for those who need its tokenizer only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers.utils.hub import cached_file

from rapid.embedded import DRAFTER, TARGET
from rapid.errors import ConfigurationError

EMBEDDED = {"embedded:target": TARGET, "embedded:drafter": DRAFTER}


def checkpoint_source(model: str) -> str:
    """A directory or hub name for transformers; a missing directory is refused at once."""
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
    """One of the checkpoint's small files; None where it has none."""
    try:
        found = cached_file(source, filename)
    except OSError:
        return None
    if found is None:
        return None
    content: dict[str, Any] = json.loads(Path(found).read_text(encoding="utf-8"))
    return content


def read_eos_ids(source: str, tokenizer: Any) -> frozenset[int]:
    """Tokens that end an answer: the generation config's, or else the model's or tokenizer's."""
    for filename in ("generation_config.json", "config.json"):
        eos = (read_json(source, filename) or {}).get("eos_token_id")
        if eos is not None:
            return frozenset(eos if isinstance(eos, list) else [eos])
    return frozenset() if tokenizer.eos_token_id is None else frozenset([tokenizer.eos_token_id])

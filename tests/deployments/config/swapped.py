"""A checkpoint whose vocabulary differs from the embedded models' in two tokens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from rapid.embedded import TARGET


def swap_tokens(folder: Path, model: Path = TARGET) -> Path:
    """Copy an embedded model below `folder`, with two of its tokens swapped; where it is."""
    swapped = folder / "swapped"
    shutil.copytree(model, swapped)
    tokenizer = json.loads((swapped / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[100:102]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (swapped / "tokenizer.json").write_text(json.dumps(tokenizer))
    return swapped

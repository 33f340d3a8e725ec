"""Who wrote each token of an answer, as a table for the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table
from rich.text import Text


def list_tokens(receipt: Mapping[str, Any]) -> Table:
    """Return a row for each token: its writer, the probabilities, and the number of its passage."""
    explained = receipt["explain"]
    numbers = {chunk["id"]: str(at) for at, chunk in enumerate(receipt["chunks"], 1)}
    table = Table("token", "written", "target", "drafter", "sampled", "passage", box=None)
    for token in explained["tokens"][0]:
        probs = (_write(token[name]) for name in ("target", "drafter", "sampled"))
        passage = numbers.get(token["passage"], "")
        # Texts of models are no markup of the terminal.
        table.add_row(Text(repr(token["text"])), token["writer"], *probs, passage)
    if explained["truncated"]:
        table.add_row("...", "the rest of the answer is not explained")
    return table


def _write(prob: float | None) -> str:
    return "-" if prob is None else f"{prob:.4f}"

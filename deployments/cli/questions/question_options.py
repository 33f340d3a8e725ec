"""The options that ``rapid ask`` and ``rapid chat`` share, and the body that they make."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from deployments.cli.terminal import USAGE, fail

# As in `rapid.config` and `rapid.transfers`, whose import takes longer than most commands.
Mode = Literal["plain", "lossless", "fused", "paper", "rag", "auto"]
Transfer = Literal["distill", "boost", "adaptive", "mixture"]

ModelOption = Annotated[
    str | None, typer.Option("--model", help="By default the first that the server has.")
]
ModeOption = Annotated[
    Mode | None, typer.Option("--mode", help="How it is answered; auto by default.")
]
SectionsOption = Annotated[
    bool,
    typer.Option(
        "--sections",
        help="Have the target read the passages that fit, where documents are too long for it.",
    ),
]
TemperatureOption = Annotated[float, typer.Option("--temperature", help="0 is greedy.")]
SeedOption = Annotated[
    int | None, typer.Option("--seed", help="The same seed gives the same answer.")
]
MaxTokensOption = Annotated[int | None, typer.Option("--max-tokens", help="Longest answer.", min=1)]
DocumentOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--document",
        "-d",
        metavar="FILE",
        help="Text, Markdown, HTML, PDF or DOCX; a folder; a pattern in quotes; or - for standard "
        "input. May be repeated.",
    ),
]


def make_body(
    model: str, messages: list[dict[str, str]], rapid: dict[str, Any], **fields: Any
) -> dict[str, Any]:
    """Return the body of a streamed question with progress; what is None is left out."""
    given = {key: value for key, value in rapid.items() if value is not None}
    return {
        "model": model,
        "messages": messages,
        "stream": True,
        "stream_options": {"include_usage": True},
        "rapid": given | {"progress": True},
    } | {key: value for key, value in fields.items() if value is not None}


def check_writable(given: dict[str, str | float | None]) -> None:
    """Refuse what JSON cannot say: numbers that are not finite, and text that is not UTF-8."""
    for name, value in given.items():
        if isinstance(value, float) and not math.isfinite(value):
            fail(f"{name} must be a finite number, and it is {value}", USAGE)
        if isinstance(value, str) and (shown := show_text(value)) != value:
            fail(f"{name} is no UTF-8 text: {shown}", USAGE)


def show_text(text: str) -> str:
    """Return a text that was typed, with a sign for what is no UTF-8."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")

"""A task of seconds: generated documents that the embedded models can read."""

from __future__ import annotations

from typing import Any

from evaluation.tasks import Task

SETTINGS: dict[str, Any] = {
    "name": "tiny",
    "description": "two generated documents",
    "source": {
        "loader": "generated",
        "split": "dev",
        # Every model answers the second of them differently, from the text and from chunks.
        "options": {"lengths": {900: 2}, "questions": ["list"]},
    },
    "metrics": ["exact"],
    "max_tokens": 24,
    "retrieval": {"chunk_tokens": 64, "tokens": 160, "embedder": "lexical"},
    "groups": ["length"],
}


def tiny_task(**changes: Any) -> Task:
    return Task.model_validate(SETTINGS | changes)

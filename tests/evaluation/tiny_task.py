"""A task of seconds: generated documents that the embedded models can read."""

from __future__ import annotations

from typing import Any

from evaluation.tasks import Task

SETTINGS: dict[str, Any] = {
    "name": "tiny",
    "description": "two generated documents",
    "source": {"loader": "generated", "split": "dev", "options": {"lengths": {300: 2}}},
    "metrics": ["exact"],
    "max_tokens": 24,
    "retrieval": {"chunk_tokens": 64, "tokens": 160, "embedder": "lexical"},
    "groups": ["length"],
}


def tiny_task(**changes: Any) -> Task:
    return Task.model_validate(SETTINGS | changes)

"""Runs what is tried with a client, against the server at the address on the command line.

Behind it may stand the name of the server's embedder, by which embeddings are tried.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Literal

from pydantic import BaseModel

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
MODEL = "rapid-embedded"
EMBEDDER = sys.argv[2] if len(sys.argv) > 2 else ""  # where the server has one with vectors
KEY = "none"  # a server without keys takes any
QUESTION = "What is the harbor of Gake?"  # in words of the embedded models, which else do not end


class Light(BaseModel):
    """The state of a light."""

    colour: Literal["red", "green", "white"]
    is_lit: bool


def light_of(place: Literal["harbour", "bridge"]) -> str:
    """Return the state of the light at a place."""
    return f"The light of the {place} is white."


def run(*tries: Callable[[], None], embeddings: Callable[[], None] | None = None) -> None:
    """Try each, print `ok` or `failed` with its name, and exit with 1 if any failed.

    `embeddings` are tried where the server has an embedder with vectors.
    """
    has_failed = False
    for each in (*tries, embeddings if EMBEDDER else None):
        if each is None:
            continue
        try:
            each()
        except Exception as error:
            has_failed = True
            print(f"failed {each.__name__}: {type(error).__name__}: {error}"[:300], flush=True)
        else:
            print(f"ok {each.__name__}", flush=True)
    sys.exit(has_failed)

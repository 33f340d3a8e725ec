"""Runs what is tried with a client, against the server at the address on the command line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Literal

from pydantic import BaseModel

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
MODEL = "rapid-embedded"
KEY = "none"  # a server without keys takes any
QUESTION = "Which code opens the door of the harbour?"


class Light(BaseModel):
    """The state of a light."""

    colour: Literal["red", "green", "white"]
    is_lit: bool


def light_of(place: Literal["harbour", "bridge"]) -> str:
    """Return the state of the light at a place."""
    return f"The light of the {place} is white."


def run(*tries: Callable[[], None]) -> None:
    """Try each, print `ok` or `failed` with its name, and exit with 1 if any failed."""
    has_failed = False
    for each in tries:
        try:
            each()
        except Exception as error:
            has_failed = True
            print(f"failed {each.__name__}: {type(error).__name__}: {error}"[:300], flush=True)
        else:
            print(f"ok {each.__name__}", flush=True)
    sys.exit(has_failed)

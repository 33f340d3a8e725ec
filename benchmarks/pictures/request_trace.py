"""The diagram of `docs/structure.md`: the modules that one question passes through.

    python -m benchmarks.pictures.request_trace

A question is asked in process, of the embedded models (`rapid.open`). Every call from a module of
the packages to another one is counted in all threads, and drawn between their rooms: a package's
folder or module at its top level. The numbers are those of the first calls, in their order.
"""

from __future__ import annotations

import argparse
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import rapid
from benchmarks.reporting import ROOT

PAGE = ROOT / "docs" / "structure.md"
PACKAGES = ("rapid", "retrieval", "cluster", "library", "evaluation", "deployments")
DOCUMENT = "The code of the north gate is maki. " + "Rain fell on the hills all day. " * 40
QUESTION = "What is the code of the north gate?"
_BLOCK = re.compile(r"```mermaid\n.*?```", flags=re.DOTALL)

Call = tuple[str, str]


def room_of(path: str) -> str | None:
    """Return the room that a file belongs to, such as `rapid.engines`; None for other files."""
    if not path.startswith(f"{ROOT}/"):
        return None
    package, *inner = Path(path).relative_to(ROOT).with_suffix("").parts
    if package not in PACKAGES or inner[0] == "__init__":
        return None
    return f"{package}.{inner[0]}"


def callers(frame: FrameType) -> Iterator[FrameType]:
    outer = frame.f_back
    while outer:
        yield outer
        outer = outer.f_back


def trace() -> list[Call]:
    """Ask the question, and return the calls between rooms in the order of their first."""
    found: dict[Call, None] = {}
    asked = False

    def look(frame: FrameType, event: str, _: object) -> None:
        if not asked or event != "call" or not (room := room_of(frame.f_code.co_filename)):
            return
        outer = (room_of(each.f_code.co_filename) for each in callers(frame))
        caller = next((each for each in outer if each), None)
        if caller and caller != room:
            found.setdefault((caller, room))

    threading.setprofile(look)  # of threads that start from now on: the models' own
    try:
        with rapid.open("embedded:target", drafter="embedded:drafter") as pair:
            sys.setprofile(look)
            asked = True
            pair.answer(QUESTION, documents=[DOCUMENT], mode="fused", max_tokens=16)
            asked = False
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return list(found)


def draw(calls: list[Call]) -> str:
    """Return the calls as a diagram of Mermaid."""
    lines = ["```mermaid", "flowchart TD"]
    lines += [f"  {caller} -- {n} --> {room}" for n, (caller, room) in enumerate(calls, 1)]
    return "\n".join([*lines, "```"])


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0]).parse_args()
    PAGE.write_text(_BLOCK.sub(lambda _: draw(trace()), PAGE.read_text()))


if __name__ == "__main__":
    main()

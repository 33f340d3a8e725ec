"""How far and how fast a server reads, in the words of one line."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rapid.ports import Clock

_PROGRESS = re.compile(
    r"(?P<what>reading|embedding passages) (?P<done>[\d,]+) of (?P<all>[\d,]+)(?P<unit> tokens)?"
)
_LEAST_S = 1.0  # of reading, before a rate is told


class ReadingPace:
    """The comments of a stream that say how far something is, with percent, rate and what is left.

    The rate is that since the first comment of its kind.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._first: dict[str, tuple[float, int]] = {}

    def tell(self, comment: str) -> str:
        """Return what a comment says, as a person reads it; other comments as they are."""
        found = _PROGRESS.fullmatch(comment)
        if found is None:
            return comment
        what, unit = found["what"], found["unit"] or ""
        done, most = (int(found[name].replace(",", "")) for name in ("done", "all"))
        if not unit:
            said = f"{what} {done:,} of {most:,}"
        else:
            said = f"{what} {done / max(most, 1):.0%} of {most:,}{unit}"
        now = self._clock()
        began, first = self._first.setdefault(what, (now, done))
        if now - began < _LEAST_S or done <= first:
            return said
        rate = (done - first) / (now - began)
        return f"{said}, {rate:,.0f}{unit} a second, {(most - done) / rate:,.0f} s left"

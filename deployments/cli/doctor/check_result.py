"""The result of a check: how bad it is, the fact, and what mends it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Mark = Literal["ok", "warning", "error"]
"""Well; it works, but perhaps badly; it cannot work."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of a check.

    Attributes:
        check: The name of the check, as the checklist has it.
        mark: How bad it is.
        fact: What was found, in a sentence without its full stop.
        mend: The command that mends it, or what to change; empty where nothing is to be done.
    """

    check: str = field(default="", kw_only=True)
    mark: Mark
    fact: str
    mend: str = ""


def approve(fact: str) -> CheckResult:
    """Return that all is well."""
    return CheckResult("ok", fact)


def warn(fact: str, mend: str) -> CheckResult:
    """Return that it works, but perhaps badly."""
    return CheckResult("warning", fact, mend)


def refuse(fact: str, mend: str = "") -> CheckResult:
    """Return that it cannot work."""
    return CheckResult("error", fact, mend)


def say_size(num_bytes: float) -> str:
    """Return a number of bytes as people write it."""
    return f"{num_bytes / 2**30:,.1f} GiB"

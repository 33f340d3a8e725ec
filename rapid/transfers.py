"""Names of transfer rules: those of the method, and those that a program registers for itself."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from rapid.errors import ConfigurationError

if TYPE_CHECKING:
    import torch

Transfer = Literal["distill", "boost", "adaptive", "mixture"]
OwnRule: TypeAlias = "Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]"

OWN_RULES: dict[str, OwnRule] = {}
"""Rules of this process by name; servers, whose replicas are other processes, have none."""


def register_transfer(name: str, rule: OwnRule) -> None:
    """Make a function a transfer rule of this process, in place of an earlier one of that name.

    ``rule(target_probs, draft_probs, eta)`` gets p and q, float64 [..., vocab], at the request's
    temperature and before its filters; q is 0 where the proposal was cut (`draft_top_k`). It
    returns the weights of p_hat, of the same shape: finite, at least 0, not all 0 in a row, and 0
    where p and q are. They are divided by their sum. It must depend on nothing else, so that a
    seed fixes the answer; with eta 0 it is not asked. An engine's own thread calls it.

    Raises:
        ValueError: The name is one of the method's, or is not made of letters, digits, - and _.
    """
    if name in get_args(Transfer):
        raise ValueError(f"{name!r} is a rule of the method: give yours another name")
    if not re.fullmatch(r"[\w-]+", name):
        raise ValueError(f"{name!r} is no name: use letters, digits, - and _")
    OWN_RULES[name] = rule


def run_rules(path: Path) -> None:
    """Run a Python file that registers rules; ``__name__`` is not ``__main__`` there.

    Raises:
        ConfigurationError: The file cannot be read or run, or registers nothing.
    """
    before = dict(OWN_RULES)
    try:
        runpy.run_path(str(path), run_name="rules")
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise ConfigurationError(f"{path} cannot be run ({why})") from error
    if before == OWN_RULES:
        raise ConfigurationError(f"{path} registers no rule: call rapid.register_transfer there")


def is_known(name: str) -> bool:
    """Return whether this process has a transfer rule of a name."""
    return name in get_args(Transfer) or name in OWN_RULES

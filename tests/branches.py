"""Every branch of the rule, with its exact probability: enumeration instead of statistics."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from rapid.speculation import acceptance


class Branches:
    """An oracle in the place of `accepts` and `race`, the only random decisions under `maximal`.

    ::

        for _ in branches:  # once for every way that the decisions can fall
            outcome = run()
            chance[outcome] += branches.probability

    Depth first: each pass repeats the decisions of the last one up to the deepest that has an
    option left, and takes that.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(acceptance, "accepts", self._accepts)
        monkeypatch.setattr(acceptance, "race", self._race)
        self.probability = 1.0
        self._left: list[list[tuple[Any, float]]] = []  # per decision of this pass
        self._depth = 0

    def __iter__(self) -> Iterator[None]:
        self._left = []
        while True:
            self.probability, self._depth = 1.0, 0
            yield
            while self._left and len(self._left[-1]) == 1:
                self._left.pop()
            if not self._left:
                return
            del self._left[-1][0]

    def chances(self, run: Callable[[], Hashable]) -> dict[Any, float]:
        """The distribution of what `run` returns."""
        chances: dict[Any, float] = {}
        for _ in self:
            outcome = run()
            chances[outcome] = chances.get(outcome, 0.0) + self.probability
        return chances

    def _accepts(self, probability: float, uniform: float) -> bool:
        assert 0 <= probability <= 1
        return bool(self._decide([(True, probability), (False, 1 - probability)]))

    def _race(self, probs: np.ndarray, noise: np.ndarray) -> int:
        assert (probs >= 0).all()
        mass = math.fsum(probs)
        return int(self._decide([(index, prob / mass) for index, prob in enumerate(probs)]))

    def _decide(self, options: Sequence[tuple[Any, float]]) -> Any:
        if self._depth == len(self._left):
            self._left.append([each for each in options if each[1] > 0])
        outcome, chance = self._left[self._depth][0]
        self._depth += 1
        self.probability *= chance
        return outcome


@pytest.fixture
def branches(monkeypatch: pytest.MonkeyPatch) -> Branches:
    return Branches(monkeypatch)


def assert_same(got: dict[Any, float], want: dict[Any, float]) -> None:
    """Equal distributions, to rounding."""
    for outcome in got.keys() | want.keys():
        assert got.get(outcome, 0.0) == pytest.approx(want.get(outcome, 0.0), abs=1e-12), outcome

"""`benchmarks/method/trainings.py`: pairs of trainings, and intervals that cover models too."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.method import trainings


def test_a_rule_is_right_where_each_right_token_is_its_best() -> None:
    knows = torch.full((3, 128), 0.0005).scatter(1, torch.tensor([[1], [2], [3]]), 0.9365)
    thinks = torch.full((3, 128), 0.0005).scatter(1, torch.tensor([[4], [2], [3]]), 0.9365)
    told = trainings.judged(thinks, knows, knows, [1, 2, 3])
    assert (told["plain"], told["target, retrieved"], told["drafter, retrieved"]) == (0, 1, 1)


def test_pairs_of_equals_have_two_different_targets() -> None:
    voice = torch.full((1, 128), 1 / 128)
    states = {"right": [voice, voice]}
    told = trainings.Read([0], [voice, voice], states, states)
    numbers = {
        kind: [(target, drafter) for target, drafter, _ in trainings.pairs_of(told, kind, "right")]
        for kind in ("upward", "equal")
    }
    assert numbers == {"upward": [(0, 0), (0, 1), (1, 0), (1, 1)], "equal": [(0, 1), (1, 0)]}


def test_an_interval_covers_models_that_differ_more_than_items() -> None:
    of_models = np.array([0.2, 0.5, 0.8])
    gap = np.broadcast_to(of_models[:, None, None], (3, 3, 50)).copy()
    low, high = trainings.interval(gap)
    assert (low, high) == pytest.approx((0.2, 0.8))
    gap[np.arange(3), np.arange(3)] = np.nan  # equals: no target drafts for itself
    assert trainings.by_pair(gap).tolist() == pytest.approx([0.2, 0.2, 0.5, 0.5, 0.8, 0.8])
    low, high = trainings.interval(gap)
    assert 0.19 < low < 0.5 < high < 0.81

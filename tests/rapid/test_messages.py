"""What messages derive from their fields, and what they can be imported without."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rapid.messages import Verdict, as_prompt
from rapid.receipt import ChoiceStatistics

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("num_tokens", "num_drafted", "num_accepted", "origins"),
    [
        (3, 3, 3, ("drafted", "drafted", "drafted")),
        (2, 3, 1, ("drafted", "corrected")),
        (1, 3, 0, ("corrected",)),
        (4, 3, 3, ("drafted", "drafted", "drafted", "bonus")),
        (2, 0, 0, ("target", "target")),
    ],
)
def test_every_committed_token_has_an_origin(
    num_tokens: int, num_drafted: int, num_accepted: int, origins: tuple[str, ...]
) -> None:
    token_ids = tuple(range(num_tokens))
    verdict = Verdict("a", 0, 0, token_ids, num_drafted, num_accepted, is_finished=False)
    assert verdict.origins == origins


def test_rounds_without_a_draft_are_not_drafted_rounds() -> None:
    statistics = ChoiceStatistics(
        rounds=6,
        drafted=9,
        accepted=5,
        corrected=3,
        bonus=0,
        completion_tokens=10,
        histogram={1: (1, 1), 3: (0, 1, 0, 1)},
    )
    assert statistics.drafted_rounds == 4


def test_token_ids_are_sent_as_32_bit_integers() -> None:
    prompt = as_prompt([1, 2, 3])
    assert prompt.dtype == np.int32
    assert prompt.tolist() == [1, 2, 3]


def test_messages_need_neither_pydantic_nor_torch() -> None:
    code = "import sys; sys.modules.update(pydantic=None, torch=None); import rapid.messages"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stderr == ""

"""Which models run on how many GPUs, for a few machines and demands."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rapid.planning.division import Demand, divide, find_fewest_gpus, find_most_questions
from rapid.planning.gpus import GPUS

LONG = Demand(context=131_072, drafter_context=9_216, questions=4, acceptance=0.77)
SHORT = replace(LONG, context=32_768)


def told(gpu: str, num_gpus: int, demand: Demand) -> str:
    found = divide(GPUS[gpu], num_gpus, demand)
    if found is None:
        return "none"
    drafter = "itself"
    if found.num_drafters:
        drafter = f"{found.num_drafters} {found.drafter} {found.drafts.layer_bits} bits"
    return f"{found.num_targets} {found.target}, {drafter}"


@pytest.mark.parametrize(
    ("gpu", "num_gpus", "demand", "parts"),
    [
        ("h100-sxm", 1, SHORT, "1 qwen3-8b, itself"),
        ("h100-sxm", 2, SHORT, "1 qwen3-8b, 1 qwen3-32b 8 bits"),
        ("h100-sxm", 4, LONG, "2 qwen3-8b, 1 qwen3-32b 16 bits"),
        ("h100-sxm", 4, replace(LONG, questions=6), "3 qwen3-8b, 1 qwen3-32b 8 bits"),
        ("a100-80gb", 2, SHORT, "1 qwen3-8b, 1 qwen3-14b 16 bits"),  # which multiplies no fp8
        ("l4", 1, replace(SHORT, questions=1), "1 qwen3-4b, itself"),
        ("l4", 1, LONG, "none"),
    ],
)
def test_the_largest_models_that_hold_all_questions_are_taken(gpu, num_gpus, demand, parts):
    assert told(gpu, num_gpus, demand) == parts


@pytest.mark.parametrize("num_gpus", range(1, 9))
@pytest.mark.parametrize("gpu", ["h100-sxm", "l4", "b200"])
def test_a_division_has_the_gpus_and_holds_what_is_asked(gpu, num_gpus):
    for questions in (1, 5, 12):
        found = divide(GPUS[gpu], num_gpus, replace(SHORT, questions=questions))
        if found is None:
            continue
        assert found.num_gpus <= num_gpus
        assert found.most_questions >= questions
        need = found.reads.need(2 * found.each)
        assert need.weights + need.work + found.reads.kv_of(found.each) <= found.reads.usable


def test_what_would_hold_it_is_the_least_that_does():
    l4 = GPUS["l4"]
    fewest = find_fewest_gpus(l4, LONG, range(2, 65))
    assert fewest is not None
    assert divide(l4, fewest, LONG) is not None
    assert divide(l4, fewest - 1, LONG) is None
    most = find_most_questions(l4, 2, LONG)
    assert divide(l4, 2, replace(LONG, questions=most)) is not None
    assert divide(l4, 2, replace(LONG, questions=most + 1)) is None
    assert find_most_questions(l4, 1, LONG) == 0
    assert find_fewest_gpus(l4, LONG, range(1, 2)) is None


def test_more_questions_at_once_are_slower_each():
    found = divide(GPUS["h100-sxm"], 4, SHORT)
    assert found is not None
    busy = replace(SHORT, questions=found.most_questions)
    assert found.tokens_per_s(busy) < found.tokens_per_s(replace(SHORT, questions=1))

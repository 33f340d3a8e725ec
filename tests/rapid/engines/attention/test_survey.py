"""Candidates are checked before they are timed, and the fastest correct one is taken."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import pytest
import torch

from rapid.engines.attention.cases import Case, chunk_checks
from rapid.engines.attention.kernel_inputs import Attend, AttentionInputs
from rapid.engines.attention.survey import TOLERANCES, KernelCandidate, Measure, fastest, survey
from rapid.errors import ConfigurationError
from tests.rapid.engines.attention.small_cases import HEADS, cache_of, right, step_cases


def unavailable() -> Attend:
    raise ImportError("no module named 'flash_attn'")


def wrong_beyond_the_first_sequence(inputs: AttentionInputs) -> torch.Tensor:
    output = right(inputs)
    output[:, inputs.rows.segments[0].stop :] *= 1.01
    return output


def blind_to_the_last_key(inputs: AttentionInputs) -> torch.Tensor:
    """Reads one slot too few of every span that is long."""
    for segment in inputs.rows.segments:
        segment.past = [(a, b - (b - a > 100)) for a, b in segment.past]
        segment.all_spans = [(a, b - (b - a > 100)) for a, b in segment.all_spans]
    return right(inputs)


def timer(**ms: float) -> Callable[[Callable[[], object]], float]:
    """Milliseconds by the name of the function that is timed."""

    def measure(run: Callable[[], object]) -> float:
        (attend,) = run.args  # type: ignore[attr-defined]
        return ms[attend.__name__]

    return measure


def test_the_fastest_of_the_right_ones_wins(caplog: pytest.LogCaptureFixture) -> None:
    def slow(inputs: AttentionInputs) -> torch.Tensor:
        return right(inputs)

    candidates = [
        KernelCandidate("slow", lambda: slow),
        KernelCandidate("right", lambda: right),
        KernelCandidate("wrong", lambda: wrong_beyond_the_first_sequence),
        KernelCandidate("missing", unavailable),
    ]
    cases = step_cases()
    with caplog.at_level(logging.WARNING):
        found = survey(candidates, cases, cases[:2], 1e-4, timer(slow=3, right=2))
    assert fastest(found).candidate.name == "right"
    assert fastest(found).ms == 4
    assert [finding.attend is None for finding in found] == [False, False, True, True]
    assert found[2].error > 1e-3
    (warning,) = caplog.messages
    assert warning.startswith("attention candidate refused: wrong is wrong: ")
    assert found[3].problem == "is not available (no module named 'flash_attn')"
    with pytest.raises(ConfigurationError, match="no attention is right on this device: wrong"):
        fastest(found[2:])


def test_a_single_key_left_out_is_found_in_bfloat16_too() -> None:
    torch.manual_seed(0)
    cache = cache_of(torch.bfloat16)
    tolerance = TOLERANCES[torch.bfloat16]
    candidates = [KernelCandidate("blind", lambda: blind_to_the_last_key)]
    chunks = chunk_checks(cache.layout, HEADS, 128)  # long spans
    (found,) = survey(candidates, chunks, [], tolerance, timer())
    assert "is wrong" in found.problem


def test_a_candidate_that_raises_or_runs_out_of_memory_is_left_out() -> None:
    def broken(inputs: AttentionInputs) -> torch.Tensor:
        raise RuntimeError("no kernel image\nmore")

    def large(run: Callable[[], object]) -> float:
        raise MemoryError("out of memory")

    cases = step_cases()
    candidates = [KernelCandidate("broken", lambda: broken)]
    (found,) = survey(candidates, cases, [], 1e-4, timer())
    assert found.problem == "cannot run here, on decode (no kernel image)"
    (found,) = survey([KernelCandidate("right", lambda: right)], cases, cases, 1e-4, large)
    assert found.problem == "could not be timed (out of memory)"
    assert found.attend is None


def test_the_form_that_a_kernel_chooses_is_the_one_that_is_checked() -> None:
    class OfTwoForms:
        """Its faster form is wrong."""

        is_right = True

        def __call__(self, inputs: AttentionInputs) -> torch.Tensor:
            return right(inputs) if self.is_right else wrong_beyond_the_first_sequence(inputs)

        def tune(self, cases: Sequence[Case], measure: Measure) -> None:
            assert cases is tuned
            self.is_right = False

    cases = step_cases()
    tuned = cases[:1]
    (found,) = survey([KernelCandidate("two", OfTwoForms)], cases, [], 1e-4, timer(), tuned)
    assert found.problem.startswith("is wrong: ")

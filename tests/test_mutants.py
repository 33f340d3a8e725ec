"""The list of mutants fits the code, and its runner tells mistakes that are noticed from others."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.mutants import ROOT, Mutant, failure, is_killed, out_of_date, read_mutants

MUTANTS = read_mutants()
HALF = "def half(number):\n    return number / 2\n"
MISTAKE = Mutant(
    module="halves",
    file="halves.py",
    breaks="Halves are doubles.",
    text="number / 2",
    becomes="number * 2",
    tests=("test_halves.py",),
)


def test_every_mutant_still_fits_its_file() -> None:
    """What to do when it fails: give the mutant its new text, or drop it with what it was about."""
    assert out_of_date(MUTANTS) == []


def test_no_mutant_is_there_twice_and_all_say_what_they_break() -> None:
    changes = {(mutant.file, mutant.text, mutant.becomes) for mutant in MUTANTS}
    assert len(changes) == len({mutant.breaks for mutant in MUTANTS}) == len(MUTANTS)


def test_the_tests_that_should_notice_exist() -> None:
    for test in {test for mutant in MUTANTS for test in mutant.tests}:
        file, _, name = test.partition("::")
        assert f"def {name}" in (ROOT / file).read_text(), test


def test_a_list_that_is_out_of_date_says_where(tmp_path: Path) -> None:
    (tmp_path / "halves.py").write_text(HALF)
    assert out_of_date([MISTAKE], tmp_path) == []
    for change, problem in (
        ({"text": "number // 2"}, "holds 0 times"),
        ({"text": "number"}, "holds 2 times"),
        ({"becomes": "number *"}, "invalid syntax"),
        ({"file": "gone.py"}, "No such file"),
    ):
        (said,) = out_of_date([dataclasses.replace(MISTAKE, **change)], tmp_path)
        assert problem in said


@pytest.mark.parametrize(
    ("becomes", "killed"),
    [("number * 2", True), ("__import__('os').abort()", True), ("number * 0.5", False)],
)
def test_a_mistake_survives_unless_a_test_notices(
    tmp_path: Path, becomes: str, killed: bool
) -> None:
    (tmp_path / "halves.py").write_text(HALF)
    (tmp_path / "test_halves.py").write_text(
        "import halves\n\ndef test_it():\n    assert halves.half(6) == 3\n"
    )
    assert is_killed(dataclasses.replace(MISTAKE, becomes=becomes), tmp_path) == killed
    assert (tmp_path / "halves.py").read_text() == HALF


def test_tests_that_cannot_be_run_kill_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="pytest ended with 4"):
        failure(["test_gone.py"], tmp_path)

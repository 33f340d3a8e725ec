"""The table of a fault run, and its kept form."""

from __future__ import annotations

from dataclasses import replace

from tests.faults.judgement import Run
from tests.faults.table import HEADINGS, as_markdown, formatted, row, row_not_tried
from tests.faults.test_judgement import TEXTS, outcome, run


def test_a_row_counts_and_judges() -> None:
    seen = run(outcome(), outcome(question=1))
    assert row(seen, TEXTS, None)[:4] == ("kill it", "2+0+0", "2", "2")
    assert row(seen, TEXTS, None)[-1] == "ok"
    assert row(replace(seen, leaks=["a page"]), TEXTS, None)[-1] == "FAILS"


def test_a_row_that_broke_off_fails() -> None:
    broken = Run("kill it", run().allowed, error="TimeoutError")
    assert row(broken, TEXTS, None)[-1] == "FAILS"
    assert len(row(broken, TEXTS, None)) == len(row_not_tried("it", "no Redis")) == len(HEADINGS)


def test_columns_line_up() -> None:
    table = formatted([row(run(outcome()), TEXTS, None)] * 2).splitlines()
    assert len(table) == 3
    assert table[0].split("  ")[0] == HEADINGS[0]


def test_the_kept_table_says_what_is_wrong() -> None:
    kept = as_markdown([row(run(outcome()), TEXTS, None)], {"kill it": ["a leak"]}, "by hand")
    assert "| kill it | 1+0+0 |" in kept
    assert "- kill it: a leak" in kept
    assert "by hand" in kept

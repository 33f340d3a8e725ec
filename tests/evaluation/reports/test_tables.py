from __future__ import annotations

from evaluation.reports.drawing.curves import spread
from evaluation.reports.estimates import Estimate, mean
from evaluation.reports.report import write
from evaluation.reports.tables import table, with_interval, with_sign
from tests.evaluation.reports.handmade import result, row, run_dir, section, task


def test_a_system_with_fewer_items_says_so(tmp_path):
    lines = [result(0, "plain", 1.0), result(1, "plain", 1.0), result(0, "sd", 1.0)]
    page = write(run_dir(tmp_path, task("plain", "sd"), lines)).read_text()
    assert row(section(page, "exact by length"), "sd")[1].endswith("(n = 1)")
    assert row(section(page, "exact by length"), "sd")[2] == "- (n = 0)"


def test_a_cell_cannot_break_its_table():
    assert table(["a", "b"], [["x | y", "two\nlines"]]) == (
        "| a | b |\n| --- | --- |\n| x / y | two lines |\n"
    )


def test_estimates_stand_with_their_interval_and_a_mark_where_it_is_on_one_side_of_zero():
    assert with_interval(Estimate(1234.5, 1000.0, 1300.0, 10), ".3g") == "1.23e+03 (1e+03-1.3e+03)"
    assert with_sign(Estimate(-0.5, -0.75, -0.25, 10)) == "-0.500 (-0.750 to -0.250) ▼"
    assert with_sign(Estimate(0.5, -0.25, 0.75, 10)) == "+0.500 (-0.250 to +0.750)"
    assert with_interval(None) == with_sign(None) == "-"


def test_two_items_have_no_interval_and_no_mark():
    assert with_interval(mean([1.0, 1.0])) == "1.000"
    assert with_sign(mean([0.5, 1.0])) == "+0.750"
    assert spread([mean([0.0, 1.0]), mean([0.0, 1.0] * 5)])[0][0] == 0.0
    assert with_interval(mean([1.0] * 10)) == "1.000 (1.000-1.000)"

"""Two runs over the same items, one minus the other."""

from __future__ import annotations

import pytest

from evaluation.reports.comparison import compare
from rapid.errors import ConfigurationError
from tests.evaluation.reports.handmade import result, row, run_dir, task

SYSTEMS = ("plain", "rapid-boost")


def lines(scores: dict[str, float], items: range = range(40)):
    return [result(number, name, score) for number in items for name, score in scores.items()]


def test_differences_are_paired_by_item_and_have_intervals(tmp_path):
    before = run_dir(tmp_path / "a", task(*SYSTEMS), lines({"plain": 0.0, "rapid-boost": 1.0}))
    half = [result(n, "plain", float(n % 2)) for n in range(40)]  # those of length 500
    after = run_dir(tmp_path / "b", task("plain"), half)
    told = compare(before, after)
    name, count, then, now, over_all, short, long = row(told, "plain")
    assert (name, count) == ("plain", "40")
    assert (then, now) == ("0.000", "0.500")
    assert over_all.startswith("+0.500 (")
    assert over_all.endswith("▲")
    assert short == "+1.000 (+1.000 to +1.000) ▲"
    assert long == "+0.000 (+0.000 to +0.000)"
    assert "rapid-boost" not in told  # which only the first has


def test_few_items_have_no_interval_and_items_of_one_run_alone_are_left_out(tmp_path):
    before = run_dir(tmp_path / "a", task("plain"), lines({"plain": 0.0}, range(5)))
    after = run_dir(tmp_path / "b", task("plain"), lines({"plain": 1.0}, range(2, 9)))
    assert row(compare(before, after), "plain")[1:5] == ["3", "0.000", "1.000", "+1.000"]


def test_other_items_are_refused_with_what_differs(tmp_path):
    before = run_dir(tmp_path / "a", task("plain"), lines({"plain": 0.0}), items={"digest": "x"})
    after = run_dir(tmp_path / "b", task("plain"), lines({"plain": 0.0}), items={"digest": "y"})
    with pytest.raises(ConfigurationError, match=r'items.digest: "x" then, "y" now'):
        compare(before, after)


def test_runs_without_a_common_system_are_refused(tmp_path):
    before, after = (run_dir(tmp_path / name, task(name), lines({name: 0.0})) for name in SYSTEMS)
    with pytest.raises(ConfigurationError, match="no system and condition in common"):
        compare(before, after)

from __future__ import annotations

from evaluation.reports import plots
from evaluation.reports.report import write
from evaluation.reports.run_results import RunResults
from tests.evaluation.reports.handmade import result, run_dir, task


def test_the_same_results_make_the_same_files(small):
    def made() -> dict[str, bytes]:
        page = write(small)
        return {p.name: p.read_bytes() for p in [page, *(small / "plots").iterdir()]}

    first = made()
    assert {"accuracy.svg", "speed.svg", "acceptance.svg", "won_and_lost.svg"} < set(first)
    assert made() == first


def test_a_picture_without_results_is_not_drawn(tmp_path):
    run = RunResults.read(run_dir(tmp_path, task("plain"), [result(0, "plain", 1.0)]))
    assert plots.draw(run, tmp_path / "plots") == {}
    assert not (tmp_path / "plots").exists()

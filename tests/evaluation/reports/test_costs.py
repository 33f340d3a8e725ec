from __future__ import annotations

from evaluation.reports.report import write
from rapid.planning.shapes import ModelShape
from tests.evaluation.reports.handmade import SHAPE, result, row, run_dir, section, task


def test_wins_speed_and_acceptance(small):
    page = write(small).read_text()
    assert row(section(page, "Items won and lost"), "rag-drafter")[1].startswith("0.500")
    assert row(section(page, "Items won and lost"), "rag-drafter")[2].startswith("0.250")
    over_plain = section(page, "Speed by length").split("Over plain")[1]
    assert row(over_plain, "rapid-boost")[1] == "2 (2-2)"
    rate, positions = section(page, "Drafts accepted").split("By position")
    assert row(rate, "rapid-boost")[1] == "0.750 (0.750-0.750)"
    assert [cell[:5] for cell in row(positions, "rapid-boost")[1:]] == [
        "3.333",
        "1.000",
        "0.667",
        "0.500",
    ]


def test_operations_are_counted_by_us_and_by_the_paper(small):
    ours, theirs = section(write(small).read_text(), "FLOPs of an answer").split("By the formulas")
    shape = ModelShape.model_validate(SHAPE)
    alone = shape.prefill_flops(500) + shape.decode_flops(10, 505)
    assert row(ours, "plain")[1].startswith(f"{alone:.2e} (")
    fused = (
        shape.prefill_flops(500)
        + shape.prefill_flops(100)
        + shape.decode_flops(12, 105)
        + shape.decode_flops(12, 505)
    )
    assert row(ours, "rapid-boost")[1].startswith(f"{fused:.2e} (")
    assert row(theirs, "plain")[1] == f"{2 * 10 * shape.weights * 500 + 100 * shape.weights:.2e}"


def test_times_of_answers_made_at_once_are_not_told(tmp_path):
    settings = {"batch": 8, "workers": 1}
    out = run_dir(tmp_path, task("plain"), [result(0, "plain", 1.0)], settings=settings)
    page = write(out).read_text()
    assert "Not told" in section(page, "Speed by length")
    assert "Where the time goes" not in page
    assert not (out / "plots" / "speed.svg").exists()

from __future__ import annotations

from evaluation.reports.report import write
from evaluation.tasks import Condition
from tests.evaluation.reports.handmade import result, row, run_dir, section, task


def test_conditions_stand_with_acceptance_and_speed(tmp_path):
    """The grid of context and retrieval lengths: three conditions, no eta."""
    conditions = [Condition(name=f"context {n}", context_tokens=n) for n in (16, 32, 64)]
    lines = []
    for number in range(10):
        for rank, each in enumerate(conditions):
            drafted = {"drafted": 10, "accepted": 2 * rank, "ms": {"decode": 100.0 / (rank + 1)}}
            lines.append(result(number, "plain", 0.0, each.name))
            lines.append(result(number, "sd", 1.0, each.name, **drafted))
    out = run_dir(tmp_path, task("plain", "sd", conditions=conditions), lines)
    text = section(write(out).read_text(), "Conditions")
    score, accepted, _, over_plain = text.strip().split("\n\n")
    assert row(score, "context 64")[1:] == ["0.000 (0.000-0.000)", "1.000 (1.000-1.000) ▲"]
    assert row(accepted, "context 32") == ["context 32", "0.200 (0.200-0.200)"]
    assert row(over_plain, "context 64") == ["context 64", "3 (3-3)"]


def test_etas_of_one_retrieval_share_a_table_and_the_highest_is_named(tmp_path):
    conditions = [Condition(name="as is")] + [
        Condition(name=f"unrelated {eta}", corruption="unrelated", eta=eta) for eta in (0, 10, 20)
    ]
    lines = []
    for number in range(12):
        for each in conditions:
            right = float(each.eta == 10 or number == 0)
            lines.append(result(number, "plain", float(number == 0), each.name))
            lines.append(result(number, "rapid-boost", right, each.name))
    out = run_dir(tmp_path, task("plain", "rapid-boost", conditions=conditions), lines)
    text = section(write(out).read_text(), "Eta")
    assert "| rapid-boost | 0.083 (0.000-0.250) | 1.000 (1.000-1.000) ▲ |" in text
    assert row(text.split("The eta of")[1], "rapid-boost") == [
        "rapid-boost",
        "unrelated",
        "10",
        "1.000",
    ]
    assert (out / "plots" / "eta.svg").exists()

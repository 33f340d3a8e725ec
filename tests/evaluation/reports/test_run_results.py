from __future__ import annotations

import pytest

from evaluation.reports.report import merge, summary, write
from evaluation.reports.run_results import RunResults
from evaluation.tasks import Condition
from rapid.errors import ConfigurationError
from tests.evaluation.reports.handmade import result, row, run_dir, section, task


def test_an_answer_that_had_rounds_without_its_drafter_is_in_no_report(tmp_path):
    whole = {"rounds": 3, "drafted": 12, "accepted": 7, "by_position": ((3, 3), (3, 2), (2, 2))}
    lines = [result(0, "rapid-boost", 1.0, **whole), result(1, "rapid-boost", 1.0, **whole)]
    assert write(run_dir(tmp_path / "whole", task("rapid-boost"), lines)).exists()
    lines[1] = result(1, "rapid-boost", 1.0, **whole | {"rounds": 4})  # one of them decoded plainly
    out = run_dir(tmp_path / "lost", task("rapid-boost"), lines)
    for page in (write, summary, lambda out: merge([out], tmp_path / "kept")):
        with pytest.raises(ConfigurationError, match=r"1 answers .* item item-1, rapid-boost"):
            page(out)


def test_rounds_in_which_nothing_is_drafted_are_prompt_lookups_and_a_servers_own(tmp_path):
    some = {"rounds": 4, "drafted": 2, "accepted": 1, "by_position": ((2, 1),)}
    lookup = [result(0, "prompt-lookup", 1.0, **some)]
    assert write(run_dir(tmp_path / "lookup", task("prompt-lookup"), lookup)).exists()
    rested, server = [result(0, "sd", 1.0, **some)], {"url": "http://127.0.0.1:8000"}
    out = run_dir(tmp_path / "served", task("sd"), rested, models={}, server=server)
    assert write(out).exists()


def test_equal_answers_have_equal_intervals_in_whatever_order_they_came(tmp_path):
    scores = [float(number % 3 == 0) for number in range(30)]
    lines = [result(n, "plain", score) for n, score in enumerate(scores)]
    lines += reversed([result(n, "sd", s, prediction="other") for n, s in enumerate(scores)])
    text = section(
        write(run_dir(tmp_path, task("plain", "sd"), lines)).read_text(), "exact by length"
    )
    assert row(text, "plain")[1:] == row(text, "sd")[1:]


def test_a_directory_without_a_run_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="results"):
        write(tmp_path)


def test_conditions_that_differ_by_eta_alone_are_a_family_in_ascending_order(tmp_path):
    conditions = [
        Condition(name="as is"),
        *(Condition(name=f"half {n}", corruption="replaced", share=0.5, eta=n) for n in (20, 5)),
        Condition(name="alone", corruption="unrelated", eta=5),
    ]
    lines = [result(0, "plain", 1.0, each.name) for each in conditions]
    run = RunResults.read(run_dir(tmp_path, task("plain", conditions=conditions), lines))
    families = {name: [each.eta for each in members] for name, members in run.families.items()}
    assert families == {"50% replaced": [5, 20]}

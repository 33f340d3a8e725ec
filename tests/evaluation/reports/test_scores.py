from __future__ import annotations

from evaluation.reports.report import write
from tests.evaluation.reports.handmade import result, row, run_dir, section, task


def test_scores_stand_by_length_with_interval_and_items(small):
    text = section(write(small).read_text(), "exact by length")
    assert row(text, "system") == ["system", "all (n = 40)", "500 (n = 20)", "1000 (n = 20)"]
    assert row(text, "plain")[1].startswith("0.250 (0.1")
    assert row(text, "rapid-boost")[2].startswith("0.750 (0.5")
    assert "All evidence retrieved: all 0.75, 500 0.75, 1000 0.75." in text


def test_differences_are_marked_when_their_whole_interval_is_on_one_side(small):
    text = section(write(small).read_text(), "Against plain and against the best RAG")
    to_plain, to_rag = text.split("Minus the better RAG")
    assert row(to_plain, "rapid-boost")[1].startswith("+0.500 (+0.3")
    assert row(to_plain, "rapid-boost")[1].endswith("▲")
    assert row(to_rag, "rag-drafter")[1] == "is it"
    assert row(to_rag, "plain")[1].startswith("-0.250 (")


def test_answers_that_should_be_plains_and_are_not_are_counted(tmp_path):
    lines = [result(n, "plain", 1.0, prediction="yes") for n in range(3)]
    lines += [result(n, "sd", 1.0, prediction="no" if n else "yes") for n in range(3)]
    page = write(run_dir(tmp_path, task("plain", "sd"), lines)).read_text()
    assert "letter for letter: sd 2 of 3." in page


def test_published_numbers_are_marked_as_theirs(tmp_path):
    out = run_dir(tmp_path, task("plain"), [result(0, "plain", 1.0)], recipe="llama-3.1-8b-self")
    text = section(write(out).read_text(), "Published")
    assert "Ours: plain exact 1.000 (1.000-1.000)." in text
    assert "not measured here" in text
    assert len(text.splitlines()) > 4

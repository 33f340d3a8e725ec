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


def test_items_won_and_lost_alone_are_those_that_neither_part_gets_right_or_wrong(tmp_path):
    """Figure 2 of the paper: of ten items each system wins or loses some with its RAG, or alone."""
    right = {
        "plain": (1, 1, 1, 1, 0, 0, 0, 0, 0, 0),
        "rag-target": (0, 1, 1, 1, 1, 1, 0, 0, 0, 0),
        "sd-self": (1, 1, 1, 1, 0, 0, 0, 0, 0, 1),  # sampled: it differs from plain by chance
        "rapid-self-boost": (0, 0, 0, 1, 1, 1, 1, 1, 1, 0),
        "rapid-boost": (1, 1, 1, 1, 1, 0, 0, 0, 0, 0),  # no rag-drafter was run
    }
    lines = [
        result(number, name, float(score))
        for name, scores in right.items()
        for number, score in enumerate(scores)
    ]
    page = write(run_dir(tmp_path, task(*right), lines)).read_text()
    text = section(page, "Items won and lost")

    def shares(system: str) -> list[str]:
        return [cell.split(" ")[0] for cell in row(text, system)[1:]]

    assert shares("rag-target") == ["0.200", "0.100", "-", "-"]
    assert shares("sd-self") == ["0.100", "0.000", "0.100", "0.000"]
    assert shares("rapid-self-boost") == ["0.500", "0.300", "0.300", "0.200"]
    assert shares("rapid-boost") == ["0.100", "0.000", "-", "-"]
    picture = (tmp_path / "plots" / "won_and_lost.svg").read_text()
    assert "hatched" in picture
    assert "sd-self" in picture


def test_published_numbers_stand_beside_ours_of_the_same_items(tmp_path):
    of = task("plain").model_copy(update={"groups": ("length", "difficulty")})
    lines = [
        result(n, "plain", float(n == 0), groups={"length": "short", "difficulty": level})
        for n, level in enumerate(("easy", "hard", "hard", "hard"))
    ]
    out = run_dir(tmp_path, of, lines, recipe="llama-3.1-8b")
    text = section(write(out).read_text(), "Published")
    assert "Theirs: recipe `llama-3.1-8b`, not measured here." in text
    assert row(text, "column") == ["column", "n", "theirs", "plain exact"]
    assert row(text, "overall")[:3] == ["overall", "4", "28%"]
    assert row(text, "overall")[3].startswith("25.0% (")
    assert row(text, "easy") == ["easy", "1", "29.2%", "100.0% (100.0%-100.0%)"]
    assert row(text, "hard") == ["hard", "3", "27.3%", "0.0% (0.0%-0.0%)"]
    assert row(text, "short")[3] == row(text, "overall")[3]
    assert row(text, "long") == ["long", "-", "25%", "-"]  # the run has no such items


def test_of_several_published_tasks_the_runs_own_is_compared(tmp_path):
    of = task("plain").model_copy(update={"name": "infinitebench-mc"})
    lines = [result(n, "plain", 1.0) for n in range(2)]
    out = run_dir(tmp_path, of, lines, recipe="infinitebench-llama-3.1-8b")
    text = section(write(out).read_text(), "Published")
    assert row(text, "infinitebench-mc") == [
        "infinitebench-mc",
        "2",
        "53.28%",
        "100.0% (100.0%-100.0%)",
    ]
    assert row(text, "infinitebench-qa") == ["infinitebench-qa", "-", "34.58%", "-"]

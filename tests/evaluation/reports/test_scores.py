from __future__ import annotations

from evaluation.reports.report import summary, write
from tests.evaluation.reports.handmade import result, row, run_dir, section, task


def test_scores_stand_by_length_with_interval_and_items(small):
    text = section(write(small).read_text(), "exact by length")
    assert row(text, "system")[:4] == ["system", "all (n = 40)", "500 (n = 20)", "1000 (n = 20)"]
    assert row(text, "plain")[1].startswith("0.250 (0.1")
    assert row(text, "rapid-boost")[2].startswith("0.750 (0.5")
    assert "All evidence retrieved: all 0.75, 500 0.75, 1000 0.75." in text


def test_scores_stand_by_what_retrieval_found_for_every_system(small):
    page = write(small).read_text()
    text = section(page, "exact by length")
    assert row(text, "system")[4:] == ["evidence found (n = 30)", "evidence missed (n = 10)"]
    assert [cell[:5] for cell in row(text, "plain")[4:]] == ["0.333", "0.000"]
    assert [cell[:5] for cell in row(text, "rapid-boost")[4:]] == ["1.000", "0.000"]
    minus_plain = section(page, "Against plain and against the best RAG").split("Minus the")[0]
    assert row(minus_plain, "rapid-boost")[4].startswith("+0.667 (")
    assert row(minus_plain, "rapid-boost")[5] == "+0.000 (+0.000 to +0.000)"


def test_items_are_not_split_where_all_evidence_was_retrieved(tmp_path):
    lines = [result(n, "rag-drafter", 1.0, evidence_found=True) for n in range(4)]
    page = write(run_dir(tmp_path, task("rag-drafter"), lines)).read_text()
    assert "All evidence retrieved: all 1.00" in page
    assert "evidence missed" not in page


def test_what_neither_part_got_right_is_counted_against_the_systems_own_rag(tmp_path):
    names = ("plain", "rag-target", "rag-drafter", "rapid-boost", "rapid-self-boost", "rag-both")
    right = {  # of each name, on four items
        "plain": (1, 0, 0, 0),
        "rag-target": (0, 0, 0, 1),
        "rag-drafter": (0, 1, 0, 0),
        "rapid-boost": (0, 1, 1, 1),
        "rapid-self-boost": (1, 0, 1, 0),
        "rag-both": (0, 0, 0, 0),
    }
    lines = [result(n, name, float(right[name][n])) for n in range(4) for name in names]
    out = run_dir(tmp_path, task(*names), lines)
    for text in (section(write(out).read_text(), "Right where neither was"), summary(out)):
        told = text.split("below the better of both |\n")[1]
        cells = {name: row(told, name)[1:] for name in names[3:]}
        assert [each[0] for each in cells.values()] == ["rag-drafter", "rag-target", "rag-drafter"]
        counts = {name: [cell.split(":")[0] for cell in each[1:]] for name, each in cells.items()}
        assert counts == {
            "rapid-boost": ["2 of 4", "1 of 4"],
            "rapid-self-boost": ["1 of 4", "1 of 4"],
            "rag-both": ["0 of 4", "2 of 4"],
        }
        assert cells["rapid-boost"][1].startswith("2 of 4: 0.500")


def test_without_plain_or_rag_no_part_is_compared(tmp_path):
    lines = [result(0, name, 1.0) for name in ("plain", "rag-target", "rapid-boost")]
    names = ("plain", "rag-target", "rapid-boost")
    assert "neither was" not in write(run_dir(tmp_path, task(*names), lines)).read_text()


def test_lossless_systems_that_say_what_plain_says_share_its_row(tmp_path):
    names = ("plain", "sd", "magicdec", "naive-sd")
    lines = [result(n, name, 1.0, prediction="yes") for n in range(10) for name in names[:3]]
    lines += [result(n, "naive-sd", 1.0, prediction="no" if n else "yes") for n in range(10)]
    page = write(run_dir(tmp_path, task(*names), lines)).read_text()
    shared = "plain (and 2 lossless systems, same answers)"
    for title in ("exact by length", "exact by other groups"):
        text = section(page, title)
        assert row(text, shared)[1] == row(text, "naive-sd")[1] == "1.000 (1.000-1.000)"
        assert "| sd |" not in text
        assert "| magicdec |" not in text
    for title in ("Against plain and against the best RAG", "Items won and lost"):
        assert row(section(page, title), "naive-sd")
        assert "| sd |" not in section(page, title)
    assert "letter for letter: sd 0 of 10, magicdec 0 of 10, naive-sd 9 of 10." in page
    assert row(section(page, "Drafts accepted").split("By position")[0], "sd")


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
    out = run_dir(tmp_path, of, lines, recipes=["llama-3.1-8b"])
    text = section(write(out).read_text(), "Published")
    assert "Theirs are not measured here." in text
    assert row(text, "recipe") == ["recipe", "system", "column", "n", "theirs", "ours"]
    ours = published(text, "llama-3.1-8b", "plain")
    assert ours["overall"] == ["4", "28%", "25.0% exact"]
    assert ours["easy"] == ["1", "29.2%", "100.0% exact"]
    assert ours["hard"] == ["3", "27.3%", "0.0% exact"]
    assert ours["short"][2] == ours["overall"][2]
    assert ours["long"] == ["-", "25%", "-"]  # the run has no such items


def test_of_several_published_tasks_the_runs_own_is_compared(tmp_path):
    of = task("plain").model_copy(update={"name": "infinitebench-mc"})
    lines = [result(n, "plain", 1.0) for n in range(10)]
    out = run_dir(tmp_path, of, lines, recipes=["infinitebench-llama-3.1-8b"])
    text = section(write(out).read_text(), "Published")
    ours = published(text, "infinitebench-llama-3.1-8b", "plain")
    assert ours["infinitebench-mc"] == ["10", "53.28%", "100.0% (100.0%-100.0%) exact"]
    assert ours["infinitebench-qa"] == ["-", "34.58%", "-"]


def test_each_of_several_recipes_is_compared_with_its_own_system(tmp_path):
    of = task("plain", "rag-target")
    lines = [result(0, "plain", 1.0), result(0, "rag-target", 0.0)]
    out = run_dir(tmp_path, of, lines, recipes=["llama-3.1-8b", "llama-3.1-8b-rag"])
    text = section(write(out).read_text(), "Published")
    assert published(text, "llama-3.1-8b", "plain")["overall"] == ["1", "28%", "100.0% exact"]
    assert published(text, "llama-3.1-8b-rag", "rag-target") == {
        "overall": ["1", "29.2%", "0.0% exact"]
    }


def published(text: str, recipe: str, system: str) -> dict[str, list[str]]:
    rows = [line.strip("| \n").split(" | ") for line in text.splitlines() if "%" in line]
    return {cells[2]: cells[3:] for cells in rows if cells[:2] == [recipe, system]}


def test_regret_is_what_lacks_to_the_better_of_plain_and_two_models_on_retrieved_text(tmp_path):
    right = {"plain": (0, 1, 0, 1), "rag-both": (1, 0, 1, 1), "rapid-adaptive": (1, 1, 0, 1)}
    lines = [
        result(number, name, float(score))
        for name, scores in right.items()
        for number, score in enumerate(scores)
    ]
    text = section(write(run_dir(tmp_path, task(*right), lines)).read_text(), "Regret")
    assert "rag-both (all), plain (500), rag-both (1000)" in text
    assert row(text, "rapid-adaptive")[1:] == ["+0.000", "+0.000", "-0.500"]
    assert row(text, "plain")[1:] == ["-0.250", "is it", "-1.000"]


def test_without_two_models_on_retrieved_text_nothing_is_said_of_regret(small):
    assert "## Regret" not in write(small).read_text()

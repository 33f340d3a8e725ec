from __future__ import annotations

import gzip
from collections.abc import Iterable
from pathlib import Path

import pytest

from evaluation.reports.flops import of_answer
from evaluation.reports.report import merge, summary, write
from evaluation.reports.run_results import RunResults
from evaluation.results import Log, Result
from evaluation.systems import BASELINES
from evaluation.tasks import Condition, Task
from rapid.errors import ConfigurationError
from rapid.planning.shapes import ModelShape

SHAPE = {
    "layers": 2,
    "hidden": 8,
    "heads": 2,
    "kv_heads": 1,
    "head_dim": 4,
    "intermediate": 16,
    "vocabulary": 32,
}


def task(*systems: str, conditions: Iterable[Condition] = (Condition(),)) -> Task:
    return Task.model_validate(
        {
            "name": "small",
            "description": "Hand-made lines",
            "source": {"loader": "generated"},
            "metrics": ["exact"],
            "groups": ["length", "kind"],
            "systems": systems,
            "conditions": [each.model_dump() for each in conditions],
        }
    )


def configuration(of: Task, **more: object) -> dict[str, object]:
    return {
        "task": of.model_dump(mode="json", exclude={"systems", "conditions"}),
        "systems": [each.model_dump(mode="json") for each in of.systems],
        "conditions": [each.model_dump(mode="json") for each in of.conditions],
        "models": {"target": {"model": "t", "shape": SHAPE}},
        "server": None,
        "settings": {"batch": 1, "workers": 1},
        "made": {"date": "2000-01-01", "commit": "abc"},
    } | more


def result(number: int, system: str, score: float, condition: str = "as is", **more) -> Result:
    is_drafted = system in BASELINES and BASELINES[system].is_drafted
    judged = ((more.get("rounds", 10), 0),) if is_drafted else ()
    return Result(
        item=f"item-{number}",
        system=system,
        condition=condition,
        scores={"exact": score},
        groups={"length": "500" if number % 2 else "1000", "kind": "fact"},
        **{
            "context_tokens": 500,
            "retrieved_tokens": 100,
            "tokens": 10,
            "rounds": 10,
            "by_position": judged,
            "ms": {"decode": 100.0, "target_prefill": 50.0},
        }
        | more,
    )


def run_dir(path: Path, of: Task, results: Iterable[Result], **more: object) -> Path:
    with Log(path / "results.jsonl", configuration(of, **more)) as log:
        for each in results:
            log.append(each)
    return path


@pytest.fixture
def small(tmp_path):
    """Plain is right on a quarter of 40 items, the drafter on half, boost on three quarters."""
    drafted = {"rounds": 3, "drafted": 12, "accepted": 9, "by_position": ((3, 3), (3, 2), (2, 1))}
    lines = []
    for number in range(40):
        place = number // 2 % 4
        lines += [
            result(number, "plain", float(place == 0)),
            result(number, "rag-drafter", float(place in (1, 2)), evidence_found=place != 3),
            result(number, "rapid-boost", float(place < 3), ms={"decode": 50.0}, **drafted),
        ]
    return run_dir(tmp_path / "run", task("plain", "rag-drafter", "rapid-boost"), lines)


def section(page: str, title: str) -> str:
    return page.split(f"## {title}\n")[1].split("\n## ")[0]


def row(text: str, system: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {system} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


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


def test_a_bonus_token_is_one_more_position_for_the_target():
    shape = ModelShape.model_validate(SHAPE)
    answer = result(0, "x", 1.0, rounds=3, drafted=12, accepted=9, by_position=((3, 3), (3, 3)))
    paper, boost = (
        of_answer(answer, BASELINES[name], shape, shape) for name in ("rapid-paper", "rapid-boost")
    )
    assert paper - boost == shape.decode_flops(3, 505)


def test_a_refresh_is_one_more_prefill_for_the_drafter():
    shape = ModelShape.model_validate(SHAPE)
    once = result(0, "x", 1.0)
    again = once.model_copy(update={"refreshes": 2})
    first, more = (of_answer(each, BASELINES["sd"], shape, shape) for each in (once, again))
    assert more - first == 2 * shape.prefill_flops(100)


def test_conditions_stand_with_acceptance_and_speed(tmp_path):
    """The grid of context and retrieval lengths: three conditions, no eta."""
    conditions = [Condition(name=f"context {n}", context_tokens=n) for n in (16, 32, 64)]
    lines = []
    for number in range(6):
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


def test_a_servers_retrieval_is_not_the_tasks(tmp_path):
    server = {"url": "http://127.0.0.1:8000", "tokenizer": None}
    lines = [result(0, "plain", 1.0)]
    page = write(run_dir(tmp_path, task("plain"), lines, models={}, server=server)).read_text()
    assert "- models: those of the server at http://127.0.0.1:8000\n" in page
    assert "- retrieval: the server's own, tokens as it is configured\n" in page


def test_a_system_with_fewer_items_says_so(tmp_path):
    lines = [result(0, "plain", 1.0), result(1, "plain", 1.0), result(0, "sd", 1.0)]
    page = write(run_dir(tmp_path, task("plain", "sd"), lines)).read_text()
    assert row(section(page, "exact by length"), "sd")[1].endswith("(n = 1)")
    assert row(section(page, "exact by length"), "sd")[2] == "- (n = 0)"


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


def test_an_error_scores_nothing_and_is_told(tmp_path):
    lines = [result(0, "plain", 1.0), result(1, "plain", 0.0, error="no | room", tokens=0, ms={})]
    page = write(run_dir(tmp_path, task("plain"), lines)).read_text()
    assert "1 answers ended in an error" in section(page, "Errors")
    assert "1 answers ended in an error" in summary(tmp_path)
    assert row(section(page, "exact by length"), "plain")[1].startswith("0.500")


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
    lines += reversed([result(n, "sd", score) for n, score in enumerate(scores)])
    text = section(
        write(run_dir(tmp_path, task("plain", "sd"), lines)).read_text(), "exact by length"
    )
    assert row(text, "plain")[1:] == row(text, "sd")[1:]


def test_answers_that_should_be_plains_and_are_not_are_counted(tmp_path):
    lines = [result(n, "plain", 1.0, prediction="yes") for n in range(3)]
    lines += [result(n, "sd", 1.0, prediction="no" if n else "yes") for n in range(3)]
    page = write(run_dir(tmp_path, task("plain", "sd"), lines)).read_text()
    assert "letter for letter: sd 2 of 3." in page


def test_times_of_answers_made_at_once_are_not_told(tmp_path):
    settings = {"batch": 8, "workers": 1}
    out = run_dir(tmp_path, task("plain"), [result(0, "plain", 1.0)], settings=settings)
    page = write(out).read_text()
    assert "Not told" in section(page, "Speed by length")
    assert "Where the time goes" not in page
    assert not (out / "plots" / "speed.svg").exists()


def test_published_numbers_are_marked_as_theirs(tmp_path):
    out = run_dir(tmp_path, task("plain"), [result(0, "plain", 1.0)], recipe="llama-3.1-8b-self")
    text = section(write(out).read_text(), "Published")
    assert "Ours: plain exact 1.000 (1.000-1.000)." in text
    assert "not measured here" in text
    assert len(text.splitlines()) > 4


def test_the_same_results_make_the_same_files(small):
    def made() -> dict[str, bytes]:
        page = write(small)
        return {p.name: p.read_bytes() for p in [page, *(small / "plots").iterdir()]}

    first = made()
    assert {"accuracy.svg", "speed.svg", "acceptance.svg", "won_and_lost.svg"} < set(first)
    assert made() == first


def test_runs_are_merged_into_one_page_with_their_results(small, tmp_path):
    out = tmp_path / "merged"
    page = merge([small], out).read_text()
    assert "## small\n" in page
    assert "### exact by length\n" in page
    assert "](small/plots/accuracy.svg)" in page
    kept = gzip.decompress((out / "small" / "results.jsonl.gz").read_bytes()).decode()
    assert len(kept.splitlines()) == 121
    assert RunResults.read(out / "small").results == RunResults.read(small).results


def test_a_directory_without_a_run_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="results"):
        write(tmp_path)

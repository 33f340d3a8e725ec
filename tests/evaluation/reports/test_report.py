from __future__ import annotations

import gzip

import pytest

from evaluation.reports.report import merge, summary, write
from evaluation.reports.run_results import RunResults
from rapid.errors import ConfigurationError
from tests.evaluation.reports.handmade import result, row, run_dir, section, task


def test_a_servers_retrieval_is_not_the_tasks(tmp_path):
    server = {"url": "http://127.0.0.1:8000", "tokenizer": None}
    lines = [result(0, "plain", 1.0)]
    page = write(run_dir(tmp_path, task("plain"), lines, models={}, server=server)).read_text()
    assert "- models: those of the server at http://127.0.0.1:8000\n" in page
    assert "- retrieval: the server's own, tokens as it is configured\n" in page


def test_an_error_scores_nothing_and_is_told(tmp_path):
    lines = [result(0, "plain", 1.0), result(1, "plain", 0.0, error="no | room", tokens=0, ms={})]
    page = write(run_dir(tmp_path, task("plain"), lines)).read_text()
    assert "1 answers ended in an error" in section(page, "Errors")
    assert "1 answers ended in an error" in summary(tmp_path)
    assert row(section(page, "exact by length"), "plain")[1].startswith("0.500")


def test_runs_are_merged_into_one_page_with_their_results(small, tmp_path):
    out = tmp_path / "merged"
    page = merge([small], out).read_text()
    assert "## small\n" in page
    assert "### exact by length\n" in page
    assert "](small/plots/accuracy.svg)" in page
    kept = gzip.decompress((out / "small" / "results.jsonl.gz").read_bytes()).decode()
    assert len(kept.splitlines()) == 121
    assert RunResults.read(out / "small").results == RunResults.read(small).results


def test_a_kept_page_is_made_again_from_what_was_kept(small, tmp_path):
    out = tmp_path / "merged"
    page = merge([small], out)
    first = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    page.unlink()
    assert merge([out / "small"], out) == page
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == first


def a_part(folder, number, **more):
    lines = [result(number, "plain", 1.0)]
    more = {"shard": f"{number}-of-2", "items": {"number": 3, "digest": "d"}} | more
    return run_dir(folder / f"{number}-of-2", task("plain"), lines, **more)


def test_parts_of_a_run_are_reported_as_one_wherever_they_were_made(tmp_path):
    parts = [a_part(tmp_path / str(n), n, made={"date": f"2000-01-0{n}"}) for n in (1, 2)]
    page = merge(parts, tmp_path / "merged")
    text = page.read_text()
    assert text.count("## small\n") == 1
    assert "- items: 2 of 3 (all)" in text
    assert "in parts 1-of-2, 2-of-2\n" in text
    kept = page.read_bytes()
    assert merge([tmp_path / "merged" / "small"], tmp_path / "merged") == page
    assert page.read_bytes() == kept


def test_parts_of_different_runs_are_refused_with_the_differences(tmp_path):
    parts = [a_part(tmp_path, 1), a_part(tmp_path, 2, settings={"batch": 8, "workers": 1})]
    for told in (parts, [tmp_path]):
        with pytest.raises(ConfigurationError, match=r"settings\.batch: 1 then, 8 now"):
            merge(told, tmp_path / "merged")

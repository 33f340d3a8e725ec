"""The file of a run: what it keeps when a run is interrupted, edited or repeated differently."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from evaluation.results import MADE, Log, Result, read
from rapid.errors import ConfigurationError

CONFIGURATION = {"task": {"name": "tiny", "max_tokens": 8}, "systems": [{"name": "plain"}]}


def path_with(tmp_path: Path, *results: Result) -> Path:
    path = tmp_path / "run" / "results.jsonl"
    with Log(path, CONFIGURATION) as log:
        for each in results:
            log.append(each)
    return path


def test_a_resumed_run_knows_what_is_done_and_appends(tmp_path):
    path = path_with(tmp_path, Result(item="a", system="plain", prediction="42"))
    with Log(path, CONFIGURATION) as log:
        assert log.done == {("a", "plain", "as is")}
        log.append(Result(item="b", system="plain"))
    configuration, results = read(path)
    assert configuration == CONFIGURATION
    assert [each.item for each in results] == ["a", "b"]
    assert results[0].prediction == "42"


def test_an_answer_that_failed_is_made_again_and_its_last_line_counts(tmp_path):
    path = path_with(tmp_path, Result(item="a", system="plain", error="no room"))
    with Log(path, CONFIGURATION) as log:
        assert not log.done
        log.append(Result(item="a", system="plain", prediction="42"))
    assert [each.prediction for each in read(path)[1]] == ["42"]


def test_a_line_that_does_not_parse_is_named_and_the_rest_kept(tmp_path, caplog):
    path = path_with(tmp_path, *(Result(item=name, system="plain") for name in "abc"))
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:2], lines[2][:30] + "\n", *lines[3:]]))
    with caplog.at_level(logging.WARNING), Log(path, CONFIGURATION) as log:
        assert {item for item, _, _ in log.done} == {"a", "c"}
    assert f"{path}: line 3 is no result" in caplog.text


def test_a_run_that_ended_in_the_middle_of_a_line_goes_on_in_a_new_one(tmp_path):
    path = path_with(tmp_path, Result(item="a", system="plain"))
    path.write_text(path.read_text() + '{"item": "b", "sys')
    with Log(path, CONFIGURATION) as log:
        log.append(Result(item="b", system="plain"))
    assert [each.item for each in read(path)[1]] == ["a", "b"]


def test_another_configuration_is_refused_with_what_differs(tmp_path):
    path = path_with(tmp_path, Result(item="a", system="plain"))
    other = {
        "task": {"name": "tiny", "max_tokens": 16},
        "systems": [{"name": "plain"}, {"name": "sd"}],
    }
    with pytest.raises(ConfigurationError) as refused:
        Log(path, other)
    assert "task.max_tokens: 8 then, 16 now" in str(refused.value)
    assert "systems: plain then, plain, sd now" in str(refused.value)
    assert "name" not in str(refused.value).replace("task.name", "")


def test_a_run_is_extended_by_systems_and_keeps_its_answers(tmp_path):
    path = path_with(tmp_path, Result(item="a", system="plain", prediction="42"))
    wider = CONFIGURATION | {"systems": [{"name": "sd"}, {"name": "plain"}]}
    with Log(path, wider) as log:
        assert log.done == {("a", "plain", "as is")}
        log.append(Result(item="a", system="sd"))
    configuration, results = read(path)
    assert configuration == wider
    assert [(each.system, each.prediction) for each in results] == [("plain", "42"), ("sd", "")]
    with pytest.raises(ConfigurationError, match="systems: sd, plain then, plain now"):
        Log(path, CONFIGURATION)


def test_a_run_that_gave_no_answer_leaves_its_file_as_it_was(tmp_path):
    new = tmp_path / "new" / "results.jsonl"
    Log(new, CONFIGURATION).close()
    assert not new.parent.exists()
    path = path_with(tmp_path, Result(item="a", system="plain"))
    before = path.read_bytes()
    Log(path, CONFIGURATION | {"systems": [{"name": "sd"}, {"name": "plain"}]}).close()
    assert path.read_bytes() == before


def test_a_run_is_not_extended_where_anything_else_differs(tmp_path):
    path = path_with(tmp_path, Result(item="a", system="plain"))
    before = path.read_bytes()
    wider = {"task": {"name": "tiny", "max_tokens": 9}}
    systems = {"systems": [{"name": "plain"}, {"name": "sd"}]}
    with pytest.raises(ConfigurationError, match="max_tokens: 8 then, 9 now"):
        Log(path, wider | systems)
    assert path.read_bytes() == before


def test_another_day_is_no_other_configuration(tmp_path):
    path = tmp_path / "results.jsonl"
    for date in ("2026-11-20", "2026-11-21"):
        with Log(path, CONFIGURATION | {MADE: {"date": date}}) as log:
            log.append(Result(item="a", system="plain"))
    assert read(path)[0][MADE] == {"date": "2026-11-20"}


def test_a_file_of_something_else_is_left_alone(tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_text("my shopping list\n")
    with pytest.raises(ConfigurationError, match="line 1 is no configuration"):
        Log(path, CONFIGURATION)
    assert path.read_text() == "my shopping list\n"

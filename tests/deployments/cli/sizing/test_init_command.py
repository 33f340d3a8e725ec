"""`rapid init`: what it asks, what it writes, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from deployments.config.serve_file import read_applications
from deployments.config.tenants import hash_key
from tests.deployments.cli.command import rapid


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def init(**given: str) -> tuple[str, ...]:
    options = {"gpus": "4xh100", "document-tokens": "60000", "people": "40", "teams": "0"} | given
    return ("init", *(f"--{name}={value}" for name, value in options.items()))


def test_each_team_has_a_key_that_is_told_once_and_stored_as_a_hash(folder):
    result = rapid(*init(teams="law,sales"))
    assert result.exit_code == 0, result.output
    keys = dict(line.split("\t") for line in result.stdout.splitlines())
    assert list(keys) == ["law", "sales", "operator"]
    text = (folder / "my.yaml").read_text(encoding="utf-8")
    assert not any(key in text for key in keys.values())
    (config,) = read_applications(yaml.safe_load(text)).values()
    found = {key.tenant: key for key in config.api.keys}
    assert {name: key.sha256 for name, key in found.items()} == {
        name: hash_key(key) for name, key in keys.items()
    }
    assert [name for name, key in found.items() if key.operator] == ["operator"]


def test_teams_may_be_a_number():
    result = rapid(*init(teams="2"), "two.yaml")
    assert [line.split("\t")[0] for line in result.stdout.splitlines()] == [
        "team-1",
        "team-2",
        "operator",
    ]


def test_what_is_not_given_is_asked_for(folder):
    result = rapid("init", "asked.yaml", input="1 x h200\n20000\n10\n\n")
    assert result.exit_code == 0, result.output
    assert "1 x qwen3-8b (1 h200 each) for reading and drafting" in result.stderr
    assert "keys" not in (folder / "asked.yaml").read_text(encoding="utf-8")


def test_a_gpu_that_nobody_knows_is_told_before_the_next_question(folder):
    result = rapid("init", "asked.yaml", input="4xh10\n20000\n10\n\n")
    assert (result.exit_code, "no GPU 'h10' is known" in result.stderr) == (2, True)
    assert "longest document" not in result.output


def test_a_file_that_is_there_is_kept(folder):
    (folder / "my.yaml").write_text("mine")
    result = rapid(*init())
    assert result.exit_code == 2
    assert "is there already" in result.stderr
    assert (folder / "my.yaml").read_text() == "mine"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"gpus": "2xl4", "document-tokens": "125000"}, "what fits is --people 20 or --document-"),
        ({"gpus": "1xl4", "document-tokens": "125000"}, "or --gpus 4xl4"),
        ({"gpus": "many"}, "no GPU 'many' is known"),
        ({"gpus": "0xh100"}, "for a machine without GPUs there are"),
        ({"document-tokens": "200000"}, "give --document-tokens 128000 at most"),
        ({"teams": "law,law"}, "each name once"),
        ({"teams": "operator"}, "who gets a key anyhow"),
    ],
)
def test_what_cannot_be_is_refused_with_what_could(given, told, folder):
    result = rapid(*init(**given))
    assert result.exit_code == (1 if "1xl4" in given.values() or "2xl4" in given.values() else 2)
    assert told in " ".join(result.stderr.split())
    assert not (folder / "my.yaml").exists()

"""Where a checkpoint is, and what its small files say."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from rapid.checkpoints.files import checkpoint_source, read_eos_ids, read_json
from rapid.embedded import TARGET
from rapid.errors import ConfigurationError


def test_a_model_is_a_directory_an_embedded_one_or_a_name_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine").mkdir()
    assert checkpoint_source("~/mine") == str(tmp_path / "mine")
    assert checkpoint_source("embedded:target") == str(TARGET)
    assert checkpoint_source("owner/model") == "owner/model"


@pytest.mark.parametrize(
    "model", ["/no/such", "./no-such", "~/no-such", "~no-such-user/x", "a/b/c"]
)
def test_a_path_without_a_directory_is_not_taken_for_a_name(model: str) -> None:
    with pytest.raises(ConfigurationError, match="there is no such checkpoint directory"):
        checkpoint_source(model)


@pytest.mark.parametrize("model", ["~no-such-user.gguf", "folder.gguf"])
def test_what_is_named_like_a_gguf_file_must_be_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.gguf").mkdir()
    with pytest.raises(ConfigurationError, match=r"there is no such \.gguf file"):
        checkpoint_source(model)


def test_a_short_name_is_not_looked_for_on_the_hub() -> None:
    with pytest.raises(ConfigurationError, match="did you mean smollm2-135m"):
        checkpoint_source("smolm2-135m")


def test_an_unknown_embedded_model_is_told_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match="embedded:target, embedded:drafter"):
        checkpoint_source("embedded:judge")


def test_a_file_that_a_checkpoint_lacks_is_none_and_a_broken_one_an_error(tmp_path: Path) -> None:
    assert read_json(str(tmp_path), "config.json") is None
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="Expecting"):
        read_json(str(tmp_path), "config.json")


def test_the_first_file_that_names_ends_of_answers_decides(tmp_path: Path) -> None:
    tokenizer = SimpleNamespace(eos_token_id=1)
    found = [read_eos_ids(str(tmp_path), tokenizer)]
    for filename, eos in (("config.json", 2), ("generation_config.json", [3, 4])):
        (tmp_path / filename).write_text(json.dumps({"eos_token_id": eos}))
        found.append(read_eos_ids(str(tmp_path), tokenizer))
    assert found == [{1}, {2}, {3, 4}]


def test_a_checkpoint_may_name_no_end_at_all(tmp_path: Path) -> None:
    assert read_eos_ids(str(tmp_path), SimpleNamespace(eos_token_id=None)) == frozenset()

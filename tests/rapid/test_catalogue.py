"""Short names of models, and the places that they stand for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rapid.catalogue import (
    CATALOGUE,
    CatalogueFile,
    CatalogueRepository,
    check_weights,
    find,
    local_path,
    models_folder,
)
from rapid.checkpoints.facts import read_model_facts
from rapid.checkpoints.files import checkpoint_source
from rapid.config import EngineConfig
from rapid.engines.forward.weights.loading import load_model
from rapid.errors import ConfigurationError
from tests.rapid import tiny_gguf


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RAPID_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_every_entry_can_be_checked_and_told_apart() -> None:
    names = [entry.name for entry in CATALOGUE]
    assert len(set(names)) == len(names)
    for entry in CATALOGUE:
        assert re.fullmatch(r"[a-z0-9.-]+", entry.name)
        assert entry.licence == "Apache-2.0"
        if isinstance(entry, CatalogueFile):
            assert re.fullmatch(r"[0-9a-f]{64}", entry.sha256)
            assert entry.sources


def test_a_fetched_model_is_its_file(home: Path) -> None:
    entry = find("smollm2-135m")
    assert isinstance(entry, CatalogueFile)
    entry.path.parent.mkdir(parents=True)
    tiny_gguf.write(entry.path)
    assert checkpoint_source("SmolLM2-135m") == str(entry.path)
    assert entry.path.is_relative_to(home)
    assert read_model_facts(EngineConfig(model="smollm2-135m")).num_positions == 512


def test_damaged_weights_are_not_used() -> None:
    entry = find("smollm2-135m")
    assert isinstance(entry, CatalogueFile)
    entry.path.parent.mkdir(parents=True)
    tiny_gguf.write(entry.path)
    with pytest.raises(ConfigurationError, match=r"is damaged.* models get smollm2-135m`"):
        load_model(EngineConfig(model="smollm2-135m"))
    check_weights("some/other-model")


def test_a_model_that_is_not_there_says_how_to_get_it() -> None:
    with pytest.raises(ConfigurationError, match="run `rapid models get smollm2-135m`"):
        checkpoint_source("smollm2-135m")


def test_a_repository_stands_for_its_name_on_the_hub() -> None:
    entry = find("qwen2.5-0.5b")
    assert isinstance(entry, CatalogueRepository)
    assert local_path("qwen2.5-0.5b") == entry.repository == "Qwen/Qwen2.5-0.5B-Instruct"


def test_other_names_stand_for_themselves() -> None:
    assert local_path("some/other-model") == "some/other-model"


@pytest.mark.parametrize(
    ("name", "message"),
    [("smollm-135m", "did you mean smollm2-135m?"), ("zzz", "there are smollm2-135m, all-mini")],
)
def test_an_unknown_name_is_refused_with_a_near_one(name: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        find(name)


def test_the_cache_is_the_users_where_nothing_else_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAPID_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert models_folder() == tmp_path / "rapid" / "models"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert models_folder() == tmp_path / ".cache" / "rapid" / "models"

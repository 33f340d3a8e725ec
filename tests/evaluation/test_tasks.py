"""Task files: systems by name, and mistakes named by file and key."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from evaluation.systems import BASELINES, System
from evaluation.tasks import load_task
from rapid.errors import ConfigurationError
from tests.evaluation.tiny_task import SETTINGS


def written(tmp_path: Path, **changes: object) -> Path:
    path = tmp_path / "task.yaml"
    path.write_text(yaml.safe_dump(SETTINGS | changes))
    return path


def test_systems_are_baselines_by_name_or_written_out(tmp_path):
    mine = {"name": "mine", "method": "fused", "eta": 3}
    task = load_task(written(tmp_path, systems=["sd", mine]))
    assert task.systems == (BASELINES["sd"], System(name="mine", method="fused", eta=3))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"metrics": ["exakt"]}, "metrics.0: unknown metric 'exakt'; known: .*exact"),
        ({"max_token": 5}, "max_token: unknown key; did you mean max_tokens?"),
        ({"retrieval": {"chunk": 5}}, "retrieval.chunk: unknown key"),
        (
            {"retrieval": {"embedder": "lexical", "selection": "top-k"}},
            "retrieval: selection: top-k needs dense vectors, which lexical has none of",
        ),
        ({"systems": ["rapid-bost"]}, "unknown system 'rapid-bost'; did you mean rapid-boost?"),
        ({"systems": ["sd", "sd"]}, "systems: two are named 'sd'"),
        (
            {"systems": [{"name": "x", "method": "fused", "drafts": "lookup"}]},
            "system x: lookup reads nothing that the target does not: its method is lossless",
        ),
        (
            {"systems": [{"name": "x", "method": "paper", "temperature": 0}]},
            "system x: method paper samples: raise its temperature",
        ),
        (
            {"systems": [{"name": "x", "method": "paper", "refresh": True}]},
            "system x: refresh goes with a drafter that reads what was retrieved, and with method",
        ),
        (
            {"systems": [{"name": "x", "method": "lossless", "drafts": "naive", "refresh": True}]},
            "system x: refresh goes with a drafter that reads what was retrieved",
        ),
    ],
)
def test_a_mistake_is_named_by_file_and_key(tmp_path, changes, told):
    path = written(tmp_path, **changes)
    with pytest.raises(ConfigurationError, match=told.replace("?", r"\?")) as refused:
        load_task(path)
    assert str(refused.value).startswith(f"{path}: ")


def test_a_task_that_is_not_there_comes_with_those_that_are():
    with pytest.raises(ConfigurationError, match=r"there is no task 'longbench'.*longbench-v2"):
        load_task("longbench")


def test_runs_from_before_there_were_top_k_and_selection_go_on(tmp_path):
    settings = load_task(written(tmp_path)).model_dump(mode="json")
    assert "top_k" not in settings
    assert "selection" not in settings["retrieval"]
    assert load_task(written(tmp_path, top_k=5)).model_dump(mode="json")["top_k"] == 5

"""What a run records of its models."""

from __future__ import annotations

from pathlib import Path

from evaluation.drivers import runner
from rapid.config import EngineConfig
from tests.rapid import tiny_gguf


def test_gguf_files_of_other_weights_are_told_apart(tmp_path: Path) -> None:
    whole = tiny_gguf.write(tmp_path / "whole.gguf")
    tied = tiny_gguf.write(tmp_path / "tied.gguf", without="output.weight")
    described = [runner._model(EngineConfig(model=str(path))) for path in (whole, tied)]
    assert described[0]["weights"]
    assert described[0]["weights"] != described[1]["weights"]
    assert described[0]["shape"]["layers"] == tiny_gguf.LAYERS

"""Commands that take a model take a GGUF file and a short name; `models` is in `test_fetching`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deployments.cli import app
from rapid.catalogue import find
from tests.rapid import tiny_gguf

OPTIONS = ("--gpu", "h200", "--context", "512")


def of_itself(model: str) -> tuple[str, ...]:
    """A plan in which a model drafts for itself, as no known one has its vocabulary."""
    return ("--target", model, "--drafter", model, *OPTIONS)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAPID_HOME", str(tmp_path / "home"))


def test_a_plan_for_a_gguf_file(tmp_path: Path) -> None:
    path = tiny_gguf.write(tmp_path / "m.gguf")
    planned = CliRunner().invoke(app, ["plan", *of_itself(str(path))])
    assert planned.exit_code == 0
    # A model that drafts for itself costs as much as it saves.
    assert "this drafter likely costs speed" in " ".join(planned.stdout.split())


def test_a_plan_for_a_short_name_wants_its_file() -> None:
    command = ["plan", *of_itself("smollm2-135m")]
    refused = CliRunner().invoke(app, command)
    assert refused.exit_code == 2
    assert "rapid models get smollm2-135m" in " ".join(refused.stderr.split())
    entry = find("smollm2-135m")
    entry.path.parent.mkdir(parents=True)
    tiny_gguf.write(entry.path)
    assert CliRunner().invoke(app, command).exit_code == 0


def test_the_list_is_json_for_programs() -> None:
    listed = json.loads(CliRunner().invoke(app, ["models", "list", "--json"]).stdout)
    entry = find("smollm2-135m")
    (own,) = [each for each in listed if each["name"] == entry.name]
    assert (own["context_tokens"], own["bytes"]) == (entry.context_tokens, entry.num_bytes)
    assert own["is_here"] is False


@pytest.mark.parametrize("command", [[], ["list"], ["get"], ["path"]])
def test_every_command_explains_itself(command: list[str]) -> None:
    shown = CliRunner().invoke(app, ["models", *command, "--help"])
    assert shown.exit_code == 0
    assert "Usage" in shown.output

"""The stages of a start, in a log and on a terminal."""

from __future__ import annotations

from pathlib import Path

import pytest

from deployments.cli.server.server_state import ServerState
from deployments.cli.server.stages import Stages

SEEN = [
    (5.0, None),
    (9.0, ServerState("http://127.0.0.1:8265")),
    (11.0, ServerState("", {"target": "starting", "drafter": "starting"})),
    (18.0, ServerState("", {"target": "starting", "drafter": "ready"})),
    (30.0, ServerState("", {"target": "starting", "drafter": "ready"})),
    (61.0, ServerState("", {"target": "starting", "drafter": "ready"})),
    (70.0, ServerState("", {"target": "ready", "drafter": "ready"})),
]
LINES = [
    "Ray started (9 s)",
    "pools: target starting, drafter starting",
    "pools: target starting, drafter ready (18 s)",
    "pools: target ready (70 s), drafter ready (18 s)",
]
LONG = "still starting after 61 s: Ray's output is in .run/serve.log"


class Spinner:
    def __init__(self) -> None:
        self.texts: list[str] = []

    def update(self, text: str) -> None:
        self.texts.append(text)


@pytest.mark.parametrize("is_terminal", [False, True])
def test_each_stage_is_told_once(is_terminal, monkeypatch, capsys):
    monkeypatch.setattr(
        "deployments.cli.server.stages.err", type("", (), {"is_terminal": is_terminal})
    )
    now = 0.0
    spinner = Spinner()
    stages = Stages(spinner, Path("my.yaml"), Path(".run/serve.log"), clock=lambda: now)  # type: ignore[arg-type]
    for now, state in SEEN:  # noqa: B007
        stages.show(state)
    printed = capsys.readouterr().err.splitlines()
    if is_terminal:
        assert spinner.texts == [f"starting my.yaml: {line}" for line in LINES]
        assert printed == [LONG]
    else:
        assert printed == [*LINES[:3], LONG, LINES[3]]
        assert not spinner.texts

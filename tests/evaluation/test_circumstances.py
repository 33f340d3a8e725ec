from __future__ import annotations

import os
import subprocess
from datetime import date

from evaluation.circumstances import circumstances


def test_a_measurement_carries_its_day_its_commit_and_its_machine():
    told = circumstances()
    assert date.fromisoformat(told["date"]) <= date.today()
    assert told["machine"].endswith(f", {os.cpu_count()} cores")
    assert len(told["load_average_1_5_15_min"]) == 3
    assert isinstance(told["commit"], str)


def test_a_machine_without_git_has_no_commit(monkeypatch):
    def run(*_: object, **__: object) -> None:
        raise FileNotFoundError("git")

    monkeypatch.setattr(subprocess, "run", run)
    assert circumstances()["commit"] == ""

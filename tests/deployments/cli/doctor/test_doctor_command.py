"""`rapid doctor`: what it prints, and its exit status."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from deployments.cli import serving
from deployments.cli.doctor.check_result import refuse
from deployments.cli.doctor.checklist import CHECKS, Diagnosis, diagnose
from deployments.cli.doctor.machine import Machine
from tests.deployments.cli.command import rapid
from tests.deployments.cli.doctor.healthy import HEALTHY, ROOT, shipped, write_config

# Each takes a tenth of a second or more to import, and is for servers and engines.
SLOW = {"torch", "httpx", "sentence_transformers", "qdrant_client", "sqlalchemy", "scipy"}
INIT = "init {} --gpus 4xh100 --document-tokens 60000 --people 40 --teams 2"


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A folder in which nothing runs, on a machine on which all is well, and its free port."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("deployments.cli.doctor.configuration_checks.why_taken", lambda *_: None)
    monkeypatch.setattr(Machine, "look", lambda: HEALTHY)
    return tmp_path


def test_where_all_is_well_nothing_is_to_be_mended(elsewhere):
    diagnosis = diagnose(shipped(), HEALTHY)
    assert [each for each in diagnosis.findings if each.mark != "ok"] == []
    assert [each.check for each in diagnosis.findings] == [*CHECKS]


def test_the_exit_status_is_that_of_the_worst(elsewhere, monkeypatch):
    path = str(write_config(elsewhere))
    assert rapid("doctor", path).exit_code == 0
    monkeypatch.setattr(Machine, "look", lambda: replace(HEALTHY, load=99.0))
    result = rapid("doctor", path, env={"COLUMNS": "200"})
    assert result.exit_code == 1
    assert "see `top`" in result.stdout
    mistaken = rapid("doctor", str(write_config(elsewhere, api={"max_choices": 0})), "--json")
    assert mistaken.exit_code == 2
    told = json.loads(mistaken.stdout)
    assert {each["check"] for each in told if each["mark"] == "error"} == {"configuration"}
    assert set(told[0]) == {"check", "mark", "fact", "mend"}


def test_serve_refuses_what_cannot_work_in_the_same_words(elsewhere, monkeypatch):
    monkeypatch.setattr(Machine, "look", lambda: replace(HEALTHY, python=(3, 9), load=99.0))
    result = rapid("serve", str(write_config(elsewhere)))
    assert result.exit_code == 1
    assert "Python 3.9 on Linux x86_64 is too old: make PYTHON=python3.11" in result.stderr
    assert "99" not in result.stderr


def test_where_models_are_lacking_serve_takes_the_fallback(elsewhere, monkeypatch):
    monkeypatch.setenv("RAPID_HOME", str(elsewhere))
    both, alone = ROOT / "cluster/configs/with-own-text.yaml", write_config(elsewhere)
    wrong = elsewhere / "wrong.yaml"
    wrong.write_text(both.read_text().replace("max_draft:", "max_drafts:"))
    chosen, settings, lacking = serving._examine(both, alone)
    assert (chosen, [model.name for model in settings.served]) == (alone, ["rapid-embedded"])
    assert lacking.startswith(f"{alone} is served in place of {both}: 'smollm2-135m' and 'all-min")
    assert lacking.endswith("rapid models get smollm2-135m all-minilm-l6-v2`")
    assert serving._examine(alone, both)[::2] == (alone, "")
    result = rapid("serve", str(wrong), "--fallback", str(alone))
    assert (result.exit_code, "max_drafts" in result.stderr) == (2, True)


def test_a_check_that_fails_itself_says_so(elsewhere):
    def fail(machine, subject):
        raise RuntimeError("a mistake of ours")

    with pytest.raises(RuntimeError, match="a mistake of ours"):
        diagnose(shipped(), HEALTHY, checks={"x": fail})
    found = diagnose(shipped(), HEALTHY, checks={"x": lambda *_: refuse("y")})
    assert isinstance(found, Diagnosis)
    assert found.status == 2


@pytest.mark.parametrize(
    ("command", "without"),
    [
        ("doctor", SLOW),
        ("check-config", SLOW),
        (INIT, SLOW | {"ray", "transformers", "fastapi"}),
    ],
)
def test_a_command_imports_nothing_that_it_does_not_need(tmp_path, command, without):
    words = command.format(tmp_path / "my.yaml").split()
    code = (
        "import sys; from deployments.cli import app\n"
        f"try: app({words!r})\n"
        "finally: print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert "Traceback" not in done.stderr
    assert set(done.stderr.split()) & without == set()
    assert "deployments.cli" in done.stderr

"""The README's promises, as it makes them, on the real application."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ray

README = (Path(__file__).parents[2] / "README.md").read_text()
RAPID = Path(sys.executable).parent / "rapid"


def commands(name: str) -> list[list[str]]:
    """The README's `rapid NAME` lines, as argument lists."""
    lines = re.findall(rf"^\.venv/bin/rapid ({name} .*)$", README, flags=re.MULTILINE)
    return [shlex.split(line) for line in lines]


def right_answer(folder: Path, asked: str | list[str]) -> str:
    """The answer to the one question of the sample that `asked` holds."""
    lines = (folder / "sample/questions.jsonl").read_text().splitlines()
    questions = [json.loads(line) for line in lines]
    (answer,) = [each["answer"] for each in questions if each["question"] in asked]
    return answer


def test_the_sample_is_answered_right(application: str, tmp_path: Path) -> None:
    (sample,) = commands("sample-document")
    ask, own = commands("ask")
    assert (Path(__file__).parents[2] / own[own.index("--document") + 1]).is_file()

    def run(*args: str) -> str:
        done = subprocess.run(
            [RAPID, *args], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True
        )
        return done.stdout + done.stderr

    run(*sample)
    want = right_answer(tmp_path, ask)
    said = " ".join(run(*ask, "--url", application).split())
    assert want in said
    assert "fused" in said  # the receipt


def test_the_sdk_example_is_answered_right(
    application: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    (sample,) = commands("sample-document")
    subprocess.run([RAPID, *sample], cwd=tmp_path, check=True, capture_output=True, timeout=120)
    monkeypatch.chdir(tmp_path)
    (example,) = re.findall(r"```python\n([^`]*from openai.*?)```", README, flags=re.DOTALL)
    exec(compile(example.replace("http://127.0.0.1:8000", application), "README", "exec"), {})
    assert capsys.readouterr().out.startswith(right_answer(tmp_path, example))

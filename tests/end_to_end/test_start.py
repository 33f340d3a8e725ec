"""The page of the first ten minutes, as it is typed, on the real application."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rapid.embedded.generator import generate_document
from tests.library.parsing.small_pdf import write_pdf

pytestmark = pytest.mark.ray

PAGE = (Path(__file__).parents[2] / "docs/start.md").read_text()
PAGE = PAGE.replace("smollm2-135m", "rapid-embedded")  # which needs no download
COMMANDS, EXAMPLE = (
    re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)[-1]
    for language in ("bash", "python")
)


def test_a_pdf_is_read_asked_about_and_cited(
    application: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    document = generate_document(7, 300)
    lines = [line[at : at + 80] for line in document.text.splitlines() for at in (0, 80)]
    places = [(50, 740 - 14 * row, line) for row, line in enumerate(filter(None, lines[:50]))]
    (tmp_path / "paper.pdf").write_bytes(write_pdf([places]))
    rapid = str(Path(sys.executable).parent / "rapid")
    asked = COMMANDS.replace(".venv/bin/rapid", rapid).replace(
        "Which licence does it name?", document.questions[0].question
    )
    done = subprocess.run(
        ["bash", "-euc", asked],
        cwd=tmp_path,
        env=os.environ | {"RAPID_URL": application, "COLUMNS": "200"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"file-\S+ +paper\.pdf +processed", done.stdout)
    assert "contract" in done.stdout + done.stderr
    passage = re.search(r"^paper\.pdf, page 1:\n(.+)$", done.stdout, flags=re.MULTILINE)
    assert passage is not None
    assert any(passage[1].strip() in line for line in lines)
    monkeypatch.chdir(tmp_path)
    code = EXAMPLE.replace("http://127.0.0.1:8000", application)
    code = code.replace("Which licence does it name?", document.questions[0].question)
    exec(compile(code, "start", "exec"), {})
    assert capsys.readouterr().out.strip()

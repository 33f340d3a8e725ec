"""`rapid sample-document`: what it writes, and what it says to type next."""

from __future__ import annotations

import json
import shlex

from rapid.embedded.generator import generate_document
from tests.deployments.cli.command import rapid


class TestSampleDocument:
    def test_files_and_what_to_type_next(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        result = rapid("sample-document", "--seed", "7", "--tokens", "300", "--out", "my sample")
        assert result.exit_code == 0
        expected = generate_document(7, 300)
        folder = tmp_path / "my sample"
        assert (folder / "document.txt").read_text(encoding="utf-8") == expected.text
        lines = (folder / "questions.jsonl").read_text(encoding="utf-8").splitlines()
        questions = [json.loads(line) for line in lines]
        assert questions[0] == {
            "question": expected.questions[0].question,
            "answer": expected.questions[0].answer,
        }
        assert len(questions) == len(expected.questions)
        typed = shlex.split(result.stdout)
        assert typed[1:] == ["ask", "--document", "my sample/document.txt", typed[-1]]
        assert typed[-1] == expected.questions[0].question

    def test_a_folder_that_cannot_be_made(self, tmp_path):
        (tmp_path / "file").touch()
        result = rapid("sample-document", "--out", str(tmp_path / "file" / "x"))
        assert result.exit_code == 1
        assert "cannot be written" in result.stderr

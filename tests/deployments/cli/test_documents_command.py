"""`rapid documents` as programs use it; against a real server it is in tests/end_to_end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deployments.cli import documents_command
from tests.deployments.cli.command import rapid

FILE = {
    "id": "file-1",
    "filename": "a.pdf",
    "status": "processed",
    "bytes": 9,
    "rapid": {"characters": 1200, "pages": 3},
}
FAILED = FILE | {"id": "file-2", "status": "error", "status_details": "The file is broken."}
LONG = FILE | {"filename": "long.pdf", "rapid": {"characters": 20_000_000, "pages": 3}}


@pytest.fixture(autouse=True)
def server(monkeypatch: pytest.MonkeyPatch) -> None:
    def call(client: Any, method: str, path: str, **options: Any) -> Any:
        if method == "POST":
            return {"bad.pdf": FAILED, "long.pdf": LONG}.get(options["files"]["file"][0], FILE)
        if path == "/v1/models":
            return {"data": [{"id": "served", "rapid": {"max_characters": 1200}}]}
        return {"data": [FILE]} if path == "/v1/files" else dict(FILE)

    monkeypatch.setattr(documents_command, "call", call)


def test_lists_and_files_are_json_for_programs() -> None:
    assert json.loads(rapid("documents", "list", "--json").stdout) == [FILE]
    assert json.loads(rapid("documents", "show", "file-1", "--json").stdout) == FILE


def test_an_upload_is_an_object_too_and_its_failure_a_status(tmp_path: Path) -> None:
    for name in ("good.pdf", "bad.pdf"):
        (tmp_path / name).write_bytes(b"%PDF-")
    good = rapid("documents", "add", str(tmp_path / "good.pdf"), "--json")
    assert (json.loads(good.stdout), good.exit_code) == (FILE, 0)
    bad = rapid("documents", "add", str(tmp_path / "bad.pdf"), "--json")
    assert (json.loads(bad.stdout), bad.exit_code) == (FAILED, 1)


def test_of_a_folder_all_files_of_known_kinds_are_added(tmp_path: Path) -> None:
    folder = tmp_path / "contracts"
    (folder / "old").mkdir(parents=True)
    for name in ("a.pdf", "old/b.pdf"):
        (folder / name).write_bytes(b"%PDF-")
    (folder / "photo.jpg").write_bytes(b"\xff\xd8\xff\xe0\x00\x10JFIF\x00" + bytes(range(256)))
    added = rapid("documents", "add", str(folder), str(folder / "a.pdf"))
    assert added.exit_code == 0
    names = [line.split(": ")[0].split()[-1] for line in added.stdout.splitlines()]
    assert names == ["a.pdf", "b.pdf"]
    (tmp_path / "empty").mkdir()
    empty = rapid("documents", "add", str(tmp_path / "empty"))
    assert (empty.exit_code, "no file that can be read" in empty.stderr) == (2, True)


def test_of_a_file_too_long_for_a_question_it_is_said_when_it_is_added(tmp_path: Path) -> None:
    for name in ("good.pdf", "long.pdf"):
        (tmp_path / name).write_bytes(b"%PDF-")
    added = rapid("documents", "add", *(str(tmp_path / f"{each}.pdf") for each in ("good", "long")))
    assert (added.exit_code, len(added.stdout.splitlines())) == (0, 2)
    *_, said = added.stderr.splitlines()  # behind those about sending and reading
    assert said.startswith(
        "long.pdf is kept and can be searched, but not asked about: it has 20,000,000 characters, "
        "and this server takes 1,200 in a question."
    )


def test_people_get_a_table() -> None:
    shown = rapid("documents", "list").stdout
    assert "a.pdf" in shown
    assert "3 pages, 1,200 characters" in shown

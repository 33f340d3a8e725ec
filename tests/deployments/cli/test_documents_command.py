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

SEARCHED = [{"place": "files", "bytes": 1234, "removed": 3}]
IN_USE = {"place": "engine: memory", "bytes": 8, "removed": 0, "pending": "in use"}
GONE = {"id": "file-1", "deleted": True, "rapid": {"state": "gone", "searched": SEARCHED}}
PENDING = {"rapid": {"state": "pending", "searched": [*SEARCHED, IN_USE]}}


@pytest.fixture(autouse=True)
def server(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stand in for a server; return the list of the paths that it is told to delete."""
    deleted: list[str] = []

    def call(client: Any, method: str, path: str, **options: Any) -> Any:
        if method == "POST":
            return {"bad.pdf": FAILED, "long.pdf": LONG}.get(options["files"]["file"][0], FILE)
        if path == "/v1/models":
            return {"data": [{"id": "served", "rapid": {"max_characters": 1200}}]}
        if method == "DELETE":
            deleted.append(path)
            return GONE if path.endswith("/file-1") else PENDING
        return {"data": [FILE]} if path == "/v1/files" else dict(FILE)

    monkeypatch.setattr(documents_command, "call", call)
    return deleted


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


def test_of_a_file_all_that_is_known_is_shown_and_of_several_each() -> None:
    shown = rapid("documents", "show", "file-1", "file-2")
    assert shown.exit_code == 0
    rows = [line.split(maxsplit=1) for line in shown.stdout.splitlines()]
    once = [[key, str(value)] for key, value in {**FILE, **FILE["rapid"]}.items() if key != "rapid"]
    assert [[key, value.strip()] for key, value in rows] == 2 * once


def test_a_removal_says_where_it_looked_and_what_may_be_left(server: list[str]) -> None:
    removed = rapid("documents", "remove", "file-1", "file-2")
    assert removed.exit_code == 0
    assert server == ["/v1/files/file-1", "/v1/files/file-2"]
    rows = [line.split() for line in removed.stdout.splitlines()]
    head, files = ["place", "bytes", "removed"], ["files", "1,234", "3"]
    assert rows == [head, files, head, files, ["engine:", "memory", "8", "0", "in", "use"]]
    assert removed.stderr.splitlines() == [
        "file-1 is deleted: nothing is left of it",
        "file-2 is deleted: ask again whether all of it is gone",
    ]
    as_json = rapid("documents", "remove", "file-1", "--json")
    assert (json.loads(as_json.stdout), as_json.stderr) == (GONE, "")

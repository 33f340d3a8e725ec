"""What is looked at after everything was killed, on folders and a server that lack something."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import httpx
import pytest

from library.library_access import Library
from tests.faults.kills import Application, Upload, find_faults, find_litter

BROKEN = {"status": "failed", "last_error": {"code": "broken_file", "message": "It is broken."}}
WHOLE = {"status": "completed", "last_error": None}
UPLOADS = [
    Upload(0, "text", False, False, "file-0", True),
    Upload(1, "broken", False, False, "file-1", True),
    Upload(2, "page", True, False, "file-2", True, "deleted"),
]


async def faults(**changes: dict[str, Any]) -> list[str]:
    """What is found at a server that has the uploads, except for changes by path."""

    def answer(request: httpx.Request) -> httpx.Response:
        path = request.url.path.removeprefix("/v1/").replace("/", " ")
        if path.endswith("content"):
            return httpx.Response(200, content=UPLOADS[int(path.split()[1][-1])].file[1])
        entries = [{"id": "file-0"} | WHOLE, {"id": "file-1"} | BROKEN]
        bodies: dict[str, Any] = {
            "vector_stores s files": {"data": entries, "has_more": False},
            "files": {"data": [{"id": "file-0"}, {"id": "file-1"}], "has_more": False},
            "vector_stores s search": {"data": [{"file_id": "file-0"}]},
        }
        return httpx.Response(200, json=bodies[path] | changes.get(path.split()[-1], {}))

    transport = httpx.MockTransport(answer)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
        return [f"{one.number}: {what}" async for one, what in find_faults(http, "s", UPLOADS)]


async def test_what_is_as_it_was_acknowledged_is_no_fault() -> None:
    assert await faults() == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"search": {"data": []}}, ["0: it is not found by its phrase"]),
        (
            {"files": {"data": [{"id": "file-0"} | WHOLE, {"id": "file-2"} | WHOLE]}},
            ["1: it is not listed", "2: it is listed"],
        ),
        (
            {"files": {"data": [{"id": "file-0"} | BROKEN, {"id": "file-1"} | WHOLE]}},
            [
                "0: it is failed in the store, for a reason",
                "1: it is completed in the store, for no reason",
            ],
        ),
    ],
)
async def test_what_is_not_is_told(changes: dict[str, Any], expected: list[str]) -> None:
    assert await faults(**changes) == expected


async def test_what_lies_about_is_told(tmp_path: Path) -> None:
    application = Application(tmp_path)
    library = await Library.open(application.library)
    await library.blobs.put("texts/file-0", b"text")
    for path in (application.passages / "of" / "a.npz", application.temporary / "copy"):
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_bytes(b"text")
    (application.library.folder / "files" / "stray#1").write_bytes(b"text")
    assert [each async for each in find_litter(application, library, 2)] == [
        "stray#1 is in the library's folder",
        "copy is in the folder for temporary files",
        "there are passages of 1 texts, and 2 are searched",
    ]
    await library.close()


def test_uploads_are_drawn_of_every_kind_and_no_two_say_the_same() -> None:
    rng = random.Random(1)
    uploads = [Upload.draw(number, rng) for number in range(300)]
    assert len({each.phrase for each in uploads}) == 300
    assert {each.kind for each in uploads} == {"text", "page", "broken", "long"}
    assert {each.is_unwanted for each in uploads} == {each.is_read_ahead for each in uploads}

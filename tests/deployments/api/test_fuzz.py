"""Any request of anybody: no failure, no byte of another tenant, and a library that is whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deployments.api.reference.openapi import describe
from library.library_access import Library
from library.library_config import LibraryConfig
from library.storage.blobs import Blobs
from library.storage.database import Database
from tests.deployments.api.fuzzing import Fuzzed, make_cases, read_here
from tests.library.conftest import database, postgres

__all__ = ["database", "postgres"]


async def fuzz(
    database: Database,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    each: int,
    number: int,
    most_turns: int = 0,
) -> Fuzzed:
    """Send so many requests of anybody, and look at all answers and what is left of them.

    Then those that chance has left without any answer are asked a hundred times a turn.
    """
    read_here(monkeypatch)
    config = LibraryConfig(folder=folder, max_files=40, max_file_bytes=20_000)
    library = Library.over(config, database, Blobs.in_folder(folder / "blobs"))
    fuzzed = Fuzzed(library)
    await fuzzed.prepare()
    before = await fuzzed.state_of("quiet")
    assert len(before) == 3 + 1 + 3 + 1
    cases = make_cases(json.dumps(describe(fuzzed.app._app.routes)), each)
    await fuzzed.send(cases, number)
    for _ in range(most_turns):
        missing = find_unanswered(fuzzed)
        rare = [case for case in cases if f"{case.method.upper()} {case.path}" in missing]
        await fuzzed.send(rare, 100 if rare else 0)
    assert not fuzzed.findings, "\n".join(fuzzed.findings)
    assert await fuzzed.discrepancies() == []
    assert await fuzzed.state_of("quiet") == before
    await fuzzed.http.aclose()
    return fuzzed


async def test_some_hundred_requests(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    fuzzed = await fuzz(database, tmp_path, monkeypatch, each=1, number=300)
    assert fuzzed.num_sent == 300
    assert len(fuzzed.statuses) > 30


@pytest.mark.slow
async def test_twenty_thousand_requests(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    fuzzed = await fuzz(database, tmp_path, monkeypatch, each=16, number=10_000, most_turns=20)
    assert fuzzed.num_sent >= 10_000
    assert find_unanswered(fuzzed) == set()


def find_unanswered(fuzzed: Fuzzed) -> set[str]:
    """Return the operations that nobody has had an answer from."""
    described = describe(fuzzed.app._app.routes)["paths"]
    operations = {f"{m.upper()} {path}" for path, each in described.items() for m in each}
    return operations - {name for name, statuses in fuzzed.statuses.items() if 200 in statuses}

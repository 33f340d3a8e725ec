"""The examples run as they are typed, against an ingress whose orchestrator is scripted."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

import pytest
from starlette.types import Message, Receive, Scope, Send

from deployments.api.ingress import Ingress
from deployments.config.api_config import ApiConfig
from library.ingestion import Ingestion
from library.library_access import LibraryAccess
from library.library_config import LibraryConfig
from tests.deployments.api.files.test_files_by_sdk import Searching
from tests.deployments.scripted import ScriptedOrchestrator
from tests.deployments.serving import served
from tests.library.libraries import FakeIndex

EXAMPLES = Path(__file__).parent.parent / "examples"


async def run(
    orchestrator: ScriptedOrchestrator,
    script: str,
    *options: str,
    library: LibraryAccess | None = None,
) -> str:
    """Run a script of the examples against a server, and return what it prints."""
    async with served(Ingress(orchestrator, ApiConfig(model="scripted"), library=library)) as url:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(EXAMPLES / script), "--url", url, *options),
            stdout=asyncio.subprocess.PIPE,
        )
        printed, _ = await process.communicate()
    assert process.returncode == 0
    return printed.decode()


async def test_the_transcript_has_every_question_in_every_mode(tmp_path: Path) -> None:
    orchestrator = ScriptedOrchestrator()
    out = tmp_path / "transcript.md"
    await run(orchestrator, "own_text/transcript.py", "--out", str(out))
    modes = [request.speculation.mode for request in orchestrator.requests]
    assert modes == ["plain", "lossless", "auto"] * 5
    (texts,) = {request.documents[0].text for request in orchestrator.requests}
    assert texts.startswith("Mozilla Public License Version 2.0")
    written = out.read_text()
    assert "the model `scripted`" in written
    assert written.count("\n## ") == 5
    assert "| `plain` | 0 |" in written
    assert "`auto` (as `fused`)" in written
    assert written.count("> Hello, wörld!") == 5
    assert written.count("> the same as `plain`") == 10
    assert max(map(len, written.splitlines())) <= 120


async def test_a_file_is_kept_asked_about_and_deleted(tmp_path: Path) -> None:
    path = tmp_path / "doors.txt"
    path.write_text("The code of door 1 is 7.\nThe code of door 2 is 14.\n")
    access = LibraryAccess(LibraryConfig(folder=tmp_path / "library"))
    library = await access.get()
    working = asyncio.create_task(Ingestion(library, FakeIndex()).run())
    orchestrator = Searching(access)
    asked = str(path), "What is the code of door 2?"
    printed = await run(orchestrator, "documents.py", *asked, library=access)
    working.cancel()
    await asyncio.wait([working])
    await library.close()
    assert "doors.txt is read: 51 characters" in printed
    assert "nearest passage, lines 1-" in printed
    assert printed.count("\nHello, wörld!") == 2
    assert re.search(r"^files.*: [1-9]\d* removed", printed, re.MULTILINE)
    assert "deleted; left: []" in printed
    names = [[each.name for each in request.documents] for request in orchestrator.requests]
    assert names == [["doors.txt"], ["doors.txt"]]


def test_the_kept_transcript_is_of_the_questions_and_modes_of_the_script() -> None:
    """A transcript that was kept before the script changed would show something else."""
    script = (EXAMPLES / "own_text" / "transcript.py").read_text()
    kept = (EXAMPLES / "own_text" / "transcript.md").read_text()
    asked = re.findall(r"^## \d\. (.*)$", kept, flags=re.MULTILINE)
    assert len(asked) == 5
    for question in asked:
        assert question in script
    for mode in ("plain", "lossless", "auto"):
        assert len(re.findall(rf"^`{mode}`", kept, flags=re.MULTILINE)) == 5


class Cutting:
    """A proxy in front of an ingress that cuts every stream after so many events."""

    def __init__(self, app: Ingress, after: int) -> None:
        self.app, self.after = app, after
        self.num_streams = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        num_events = 0
        self.num_streams += scope["path"].endswith("completions")

        async def cutting(message: Message) -> None:
            nonlocal num_events
            num_events += message.get("body", b"").count(b"data: {")
            if num_events > self.after:
                raise ConnectionAbortedError("The proxy died.")
            await send(message)

        await self.app(scope, receive, cutting)


async def test_a_client_prints_the_answer_and_how_it_was_made(tmp_path: Path) -> None:
    document = tmp_path / "notes.txt"
    document.write_text("The banner is red.")
    printed = await run(ScriptedOrchestrator(), "client.py", str(document), "Red?")
    assert printed.startswith("Hello, wörld!\n\n")
    assert printed.endswith("drafted tokens kept\n")


@pytest.mark.parametrize("after", [1, 2])
async def test_a_stream_goes_on_over_broken_connections(tmp_path: Path, after: int) -> None:
    document = tmp_path / "notes.txt"
    document.write_text("The banner is red.")
    orchestrator = ScriptedOrchestrator()
    proxy = Cutting(Ingress(orchestrator, ApiConfig(model="scripted")), after)
    async with served(proxy) as url:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *(str(EXAMPLES / "continuing_client.py"), str(document), "Red?", "--url", url),
            stdout=asyncio.subprocess.PIPE,
        )
        printed, _ = await process.communicate()
    assert process.returncode == 0
    assert printed.decode() == "Hello, wörld!\n"
    assert proxy.num_streams == 4 // after  # a role and three rounds
    assert len({request.drawn_seed for request in orchestrator.requests}) == 1

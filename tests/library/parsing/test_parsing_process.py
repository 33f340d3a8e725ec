import asyncio
import os
import textwrap
from pathlib import Path

import pytest

from library.parsing import FileReaders, Location, ParsingLimits, UnreadableFile, parsing_process
from tests.library.parsing.small_pdf import write_pdf

WORKER = """
import os, socket, sys, time
from library.parsing import confinement, worker
from library.parsing.layout import Layout, ParsedText
from library.parsing.unreadable_file import UnreadableFile

LAYOUT = Layout.of("")
LONG = ParsedText("a" * 50, "text/plain", LAYOUT)

def read(file, suffix, limits, report):
{}

worker.main(read)
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "file"
    path.write_text("words")
    return path


@pytest.fixture
def replace_reader(monkeypatch):
    """Return a function that replaces what the worker does with the file."""

    def replace(body: str, before: str = "") -> None:
        code = WORKER.format(textwrap.indent(textwrap.dedent(body), "    "))
        monkeypatch.setattr(parsing_process, "_WORKER", ("-c", before + code))

    return replace


async def parse_file(path, *args, **kwargs):
    """Read one file, by processes that end with it."""
    readers = FileReaders()
    try:
        with path.open("rb") as file:
            return await readers.parse_file(file, *args, **kwargs)
    finally:
        readers.close()


async def refuse(file: Path, limits: ParsingLimits | None = None) -> tuple[str | None, str]:
    with pytest.raises(UnreadableFile) as caught:
        await parse_file(file, "a.txt", limits)
    return caught.value.code, str(caught.value)


async def test_a_file_is_read_elsewhere_as_here(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(write_pdf([[(72, 700, f"page {number}")] for number in range(1, 251)]))
    told = []
    parsed = await parse_file(
        path, "../a\n." + "\0" * 999_999, on_progress=lambda *each: told.append(each)
    )
    start = parsed.text.index("page 42\n")
    assert isinstance(where := parsed.layout.locate(start, start + 7), Location)
    assert where.pages == range(42, 43)
    assert parsed.media_type == "application/pdf"
    assert told[-1] == (249, 250)
    assert 50 < len(told) <= 100
    assert told == sorted(told)


async def test_a_refusal_comes_back(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(100))
    assert (await refuse(path))[0] == "unsupported_file"
    path.write_bytes(b"")
    assert (await refuse(path))[0] == "empty_file"
    path.write_bytes(b"a" * 101)
    assert (await refuse(path, ParsingLimits(file_bytes=100)))[0] == "file_too_large"


@pytest.mark.parametrize(
    ("body", "limits", "code", "says"),
    [
        ("time.sleep(600)", {"wall_s": 0.5}, "parsing_limit", "0.5 seconds"),
        ("while True: pass", {"cpu_s": 1}, "parsing_limit", "1 seconds of computing"),
        ("bytearray(1 << 30)", {"memory_bytes": 200 << 20}, "parsing_limit", "200 MiB"),
        ("os.abort()", {}, "broken_file", "crashed"),
        ("sys.exit(0)", {}, "broken_file", "crashed"),
        ("return LONG", {"text_chars": 9}, "broken_file", "sense"),
        ("return ParsedText('a', 'text/evil', LAYOUT)", {}, "broken_file", "sense"),
        ("raise UnreadableFile('x', 'new_code')", {}, "broken_file", "sense"),
        ("raise UnreadableFile('x' * 999_999, 'empty_file')", {}, "broken_file", "sense"),
    ],
)  # fmt: skip
async def test_limits_hold_and_answers_are_checked(file, replace_reader, body, limits, code, says):
    replace_reader(body)
    refused, message = await refuse(file, ParsingLimits(**limits))
    assert refused == code
    assert says in message


async def test_a_mistake_of_the_program_is_not_blamed_on_the_file(file, replace_reader):
    replace_reader("import no_such_library")
    with pytest.raises(RuntimeError, match="reader"):
        await parse_file(file, "a.txt")


REPORT = """
def attempt(what, *arguments):
    try:
        what(*arguments)
        return "done"
    except OSError as error:
        return type(error).__name__
outcomes = [attempt(socket.socket), attempt(socket.create_connection, ("127.0.0.1", 9)), {}]
text = " ".join(outcomes) + str(dict(os.environ))
return ParsedText(text, "text/plain", Layout.of(text))
"""
OTHERS = """
    attempt(os.fork), attempt(os.execv, sys.executable, ["python"]), attempt(os.kill, 1, 0),
    attempt(lambda: open("PLACE", "wb", 0).write(b"x")),
    attempt(lambda: [open("/dev/null") for _ in range(99)]),
"""


async def test_the_worker_can_do_nothing_but_read(file, replace_reader, monkeypatch, tmp_path):
    monkeypatch.setenv("RAPID_SECRET", "secret")
    replace_reader(REPORT.format(OTHERS.replace("PLACE", str(tmp_path / "written"))))
    outcomes, _, environment = (await parse_file(file, "a.txt")).text.partition("{")
    assert outcomes.split()[:5] == ["PermissionError"] * 5
    assert outcomes.split()[5:] == ["OSError", "OSError"]
    assert "RAPID" not in environment
    assert "PATH" not in environment


async def test_without_seccomp_python_has_no_sockets(file, replace_reader):
    before = "from library.parsing import confinement; confinement._CALLS = {}\n"
    replace_reader(REPORT.format(""), before)
    parsed = await parse_file(file, "a.txt")
    assert parsed.text.startswith("PermissionError PermissionError{")


async def test_a_cancelled_caller_leaves_no_process(file, replace_reader, tmp_path):
    replace_reader("report(os.getpid(), 1)\ntime.sleep(600)")
    told: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(
        parse_file(file, "a.txt", on_progress=lambda pid, _: told.set_result(pid))
    )
    pid = await told
    os.kill(pid, 0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)

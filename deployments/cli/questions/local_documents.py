"""The files that a question names, as documents: what is said of them, and whether they fit."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any, NoReturn

from deployments.cli.terminal import USAGE, Waiting, err, fail, note

if TYPE_CHECKING:
    import httpx

    from library.parsing import ParsedText

_ENCODINGS = {"cp1252": "Windows-1252 (Latin-1)", "utf-8": "UTF-8 with broken places"}
_QUICK_S = 2.0  # a thousand pages take longer; nobody wonders before
_MOST_NAMED = 3  # of the largest documents

NamedSize = tuple[str, int]
"""A document's name, and its characters."""

_Exceeded = tuple[str, str, int, int]  # a setting, its unit, what there is, what is taken


def read_documents(paths: Sequence[Path]) -> dict[str, ParsedText]:
    """Return the texts of files, folders and patterns by their names; `-` is standard input.

    A file that cannot be read ends the command with a sentence for each such file.
    """
    from library.parsing.local_files import STANDARD_INPUT, read_files

    if not paths:
        return {}
    waiting = Waiting("reading files")
    began = time.monotonic()

    def tell(path: Path, done: int, pages: int) -> None:
        if time.monotonic() - began > _QUICK_S:
            waiting.say(f"reading {path.name}: page {done} of {pages}")

    try:
        read = read_files(paths, sys.stdin.buffer if STANDARD_INPUT in paths else None, tell)
    finally:
        waiting.stop()
    if read.problems:
        for problem in read.problems[:-1]:
            err.print(f"error: {problem}", soft_wrap=True, highlight=False, markup=False)
        fail(read.problems[-1], USAGE)
    if read.num_hidden or read.num_other:
        hidden = f"{read.num_hidden} hidden" if read.num_hidden else ""
        other = f"{read.num_other} empty or no text, Markdown, HTML, PDF or DOCX"
        told = [hidden, other] if read.num_other else [hidden]
        note(f"passed over in folders: {', '.join(filter(None, told))}")
    if not read.files:
        fail("nothing there can be read: name text, Markdown, HTML, PDF or DOCX files", USAGE)
    for file in read.files:
        if guess := file.parsed.guessed:
            called = _ENCODINGS.get(guess, guess)
            note(f"{file.name} is not plain UTF-8: read as {called}; check its special letters")
    return {file.name: file.parsed for file in read.files}


def read_kept(client: httpx.Client, file: Mapping[str, Any]) -> ParsedText | None:
    """Return the text of a file that the server keeps; None if it cannot be had as it is there.

    Args:
        client: The connection.
        file: What ``GET /v1/files/{id}`` says of it.
    """
    import httpx

    from library.parsing import UnreadableFile, read_text

    with NamedTemporaryFile() as copy:
        try:
            with client.stream("GET", f"/v1/files/{file['id']}/content") as response:
                response.raise_for_status()
                for part in response.iter_bytes():
                    copy.write(part)
            copy.flush()
            parsed = read_text(copy.name, file["filename"])
        except (httpx.HTTPError, UnreadableFile):
            return None
    # A server of another version may read it otherwise, and then its passages are elsewhere.
    return parsed if len(parsed.text) == file["rapid"]["characters"] else None


def check_sizes(
    body: Mapping[str, Any], card: Mapping[str, Any], kept: Sequence[NamedSize] = ()
) -> bytes:
    """Return a request's body as bytes; one that the server would not take ends the command.

    The characters of a question are those that are sent and those of files that the server keeps;
    its bytes are those that are sent.

    Args:
        body: The body.
        card: The model's, as ``GET /v1/models`` has it; limits that it does not name are not
            looked at.
        kept: The files of the server that it names.
    """
    limits = card.get("rapid", {})
    documents = body.get("rapid", {}).get("documents", ())
    most = limits.get("max_documents")
    if most is not None and len(documents) > most:
        fail(
            f"there are {len(documents):,} documents, and this server takes {most:,} in a "
            "question: name fewer, or a smaller folder",
            USAGE,
        )
    sizes = [(each["name"], len(each["text"])) for each in documents] + [*kept]
    num_chars = sum(size for _, size in sizes)
    num_chars += sum(len(each["content"]) for each in body["messages"])
    content = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
    most_chars, most_bytes = limits.get("max_characters"), limits.get("max_body_bytes")
    exceeded: list[_Exceeded] = []
    if most_chars is not None and num_chars > most_chars:
        exceeded.append(("api.max_characters", "characters", num_chars, most_chars))
    if most_bytes is not None and len(content) > most_bytes:
        exceeded.append(("api.max_body_bytes", "bytes", len(content), most_bytes))
    if exceeded:
        _refuse_size(sizes, exceeded)
    return content


def _refuse_size(sizes: Sequence[NamedSize], exceeded: Sequence[_Exceeded]) -> NoReturn:
    largest = sorted(sizes, key=lambda each: -each[1])
    named = [f"{name} has {_mega(size)}" for name, size in largest[:_MOST_NAMED]]
    if len(sizes) > _MOST_NAMED:
        named.append(f"{len(sizes) - _MOST_NAMED} more")
    setting, unit, size, most = exceeded[0]
    together = f"; that is {_mega(size)} together" * (len(sizes) != 1)
    # Of one document there is no fewer; who raises one limit must not meet the next.
    less = "ask about a part of the file" if len(sizes) == 1 else "name fewer or smaller files"
    if setting == "api.max_body_bytes" and sizes:
        less = (
            "have the server keep the file (`rapid documents add FILE`) and ask about it there "
            "(`rapid ask --file ID`)"
        )
    fail(
        f"{', '.join(named) or 'the question is too long'}{together}, and this server takes "
        f"{_mega(most)} ({most:,} {unit}) in a question: {less}, or raise "
        f"{' and '.join(name for name, *_ in exceeded)} in its configuration",
        USAGE,
    )


def _mega(size: int) -> str:
    """Return a size in MB; a character of English has one byte."""
    return f"{size / 1e6:,.1f} MB" if size >= 1e5 else f"{size / 1e6:,.3f} MB"

"""Files and folders of this machine as documents, for the command line and for `rapid.open`."""

from __future__ import annotations

import glob
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import BinaryIO

from library.parsing.layout import ParsedText
from library.parsing.parsing_limits import ParsingLimits
from library.parsing.reading import is_readable, read_text
from library.parsing.unreadable_file import UnreadableFile

STANDARD_INPUT = Path("-")
_PART_BYTES = 1 << 20  # of what a pipe gives at once
_MOST_NAME_CHARS = 256  # of a document's name in a request
_PASSED_OVER = ("unsupported_file", "empty_file")  # in a folder; a file that was named is a problem

PageProgress = Callable[[Path, int, int], None]
"""Function that is told a file, its pages that are read, and all of them."""


@dataclass(frozen=True, slots=True)
class LocalFile:
    """A file with its text.

    Attributes:
        name: Its own name, or its path where another file has the same name.
        place: Which of the paths that were named it is of, from 0.
    """

    name: str
    parsed: ParsedText
    place: int


@dataclass(slots=True)
class LocalFiles:
    """What was read of the files and folders that somebody named.

    Attributes:
        files: In the order they were named, those of a folder by their paths; none comes twice.
        problems: A sentence for each file that was named, or is of a kind that is read, and could
            not be read.
        num_hidden: Hidden files and folders in folders, which are passed over.
        num_other: Files in folders that are of no kind that is read, or have no text.
    """

    files: list[LocalFile] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    num_hidden: int = 0
    num_other: int = 0


def read_files(
    named: Sequence[Path],
    standard_input: BinaryIO | None = None,
    on_progress: PageProgress | None = None,
) -> LocalFiles:
    """Read files, folders with all that is in them, and what patterns such as ``*.md`` name.

    The files are trusted and read in this process.

    Args:
        named: Their paths.
        standard_input: What the path ``-`` stands for; None takes it for a file.
        on_progress: Is told about each page of a PDF.
    """
    read = LocalFiles()
    parsed: list[tuple[Path, ParsedText, int]] = []
    for path, is_named, place in _find_each(named, standard_input, read):
        try:
            if not is_named and not is_readable(path):
                read.num_other += 1
                continue
            with _lend_path(path, standard_input) as lent:
                tell = None if on_progress is None else partial(on_progress, path)
                parsed.append((path, read_text(lent, path.name, on_progress=tell), place))
        except UnreadableFile as error:
            if is_named or error.code not in _PASSED_OVER:
                read.problems.append(f"{show_path(path)}: {error}")
            else:
                read.num_other += 1
        except OSError as error:
            read.problems.append(_tell_closed(path, error))
    names = name_apart([path for path, *_ in parsed])
    read.files = [
        LocalFile(name, each, place) for name, (_, each, place) in zip(names, parsed, strict=True)
    ]
    return read


def find_files(named: Sequence[Path]) -> tuple[list[Path], list[str]]:
    """Return the files that paths, folders and patterns stand for, and a sentence for each problem.

    Of folders and patterns those come that are of a kind that is read and not empty. None comes
    twice.
    """
    read, found = LocalFiles(), list[Path]()
    for path, is_named, _ in _find_each(named, None, read):
        try:
            if is_named or (path.stat().st_size and is_readable(path)):
                found.append(path)
        except OSError as error:
            read.problems.append(_tell_closed(path, error))
    return found, read.problems


def name_apart(paths: Sequence[Path]) -> list[str]:
    """Return a name for each of different files: its own, or its path where two share one."""
    own = Counter(path.name for path in paths)
    names: list[str] = []
    for path in paths:
        name = show_path(path if own[path.name] > 1 else Path(path.name))
        if path == STANDARD_INPUT:
            name = "standard input"
        name = "".join(each if each.isprintable() else "\ufffd" for each in name)
        name = base = name[-_MOST_NAME_CHARS:]
        number = 2
        while name in names:
            tail = f" ({number})"
            name, number = base[: _MOST_NAME_CHARS - len(tail)] + tail, number + 1
        names.append(name)
    return names


def show_path(path: Path) -> str:
    """Return a path as text that can be printed, whatever bytes it has."""
    return os.fsencode(path).decode("utf-8", "replace")


def _tell_closed(path: Path, error: OSError) -> str:
    return f"{show_path(path)} cannot be read: {error.strerror}"


def _find_each(
    named: Sequence[Path], standard_input: BinaryIO | None, read: LocalFiles
) -> list[tuple[Path, bool, int]]:
    """Return each file once, with whether it was named itself, and the place of its path."""
    found: dict[Path, tuple[Path, bool, int]] = {}
    for place, path in enumerate(named):
        is_input = standard_input is not None and path == STANDARD_INPUT
        for each, is_named in [(path, True)] if is_input else _find(path, read):
            found.setdefault(each if is_input else each.resolve(), (each, is_named, place))
    return [*found.values()]


def _find(path: Path, read: LocalFiles) -> Iterator[tuple[Path, bool]]:
    """Yield the files that a path stands for, each with whether it was named itself."""
    if path.is_dir():
        yield from ((each, False) for each in _walk(path, read))
    elif not path.exists() and any(sign in str(path) for sign in "*?["):
        matching = sorted(Path(each) for each in glob.glob(str(path), recursive=True))
        files = [each for each in matching if each.is_file()]
        if not files:
            read.problems.append(f"{show_path(path)}: no file matches this pattern")
        yield from ((each, False) for each in files)
    else:
        yield path, True


def _walk(folder: Path, read: LocalFiles) -> Iterator[Path]:
    for place, folders, files in os.walk(folder):
        read.num_hidden += sum(name.startswith(".") for name in (*folders, *files))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            path = Path(place, name)
            if not name.startswith(".") and path.is_file():  # no pipe, which would be waited for
                yield path


@contextmanager
def _lend_path(path: Path, standard_input: BinaryIO | None) -> Iterator[str | Path]:
    """Yield where a file's bytes are; those that come from a pipe are put into a file first."""
    if path.is_file():
        yield path
        return
    with ExitStack() as stack:
        source = standard_input if path == STANDARD_INPUT else None
        source = source or stack.enter_context(path.open("rb"))
        copy = stack.enter_context(tempfile.NamedTemporaryFile())
        room = ParsingLimits().file_bytes + 1  # one too many, for which it is refused
        while part := source.read(min(_PART_BYTES, room)):
            copy.write(part)
            room -= len(part)
        copy.flush()
        yield copy.name

"""Files and folders of this machine as documents."""

from __future__ import annotations

import errno
import io
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from library.parsing import local_files
from library.parsing.local_files import find_files, name_apart, read_files
from tests.library.parsing.small_pdf import write_pdf


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "notes" / "more").mkdir(parents=True)
    (tmp_path / "notes" / ".git").mkdir()
    (tmp_path / "notes" / ".git" / "config").write_text("hidden")
    (tmp_path / "notes" / ".env").write_text("SECRET=1")
    (tmp_path / "notes" / "b.md").write_text("# B")
    (tmp_path / "notes" / "empty.txt").write_text("")
    (tmp_path / "notes" / "image.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(range(32)) * 40)
    (tmp_path / "notes" / "more" / "a.pdf").write_bytes(write_pdf([[(72, 700, "One page.")]]))
    return tmp_path


def texts_of(*named: Path) -> list[tuple[str, str]]:
    read = read_files(named)
    assert not read.problems
    return [(each.name, each.parsed.text) for each in read.files]


def test_a_folder_is_read_without_what_is_hidden_and_what_is_no_text(folder: Path) -> None:
    read = read_files([folder / "notes"])
    assert [(each.name, each.parsed.text) for each in read.files] == [
        ("b.md", "# B"),
        ("a.pdf", "One page."),
    ]
    assert (read.num_hidden, read.num_other, read.problems) == (2, 2, [])


def test_each_file_tells_which_path_it_is_of(folder: Path) -> None:
    read = read_files([folder / "notes" / "more", folder / "none*", folder / "notes"])
    assert [(each.name, each.place) for each in read.files] == [("a.pdf", 0), ("b.md", 2)]


def test_a_pattern_names_files_and_no_folders(folder: Path) -> None:
    assert texts_of(folder / "notes" / "*") == [("b.md", "# B")]
    assert texts_of(folder / "**" / "*.pdf") == [("a.pdf", "One page.")]
    (problem,) = read_files([folder / "*.docx"]).problems
    assert problem.endswith("*.docx: no file matches this pattern")


def test_a_file_that_exists_is_no_pattern(tmp_path: Path) -> None:
    (tmp_path / "a[1].txt").write_text("one")
    assert texts_of(tmp_path / "a[1].txt") == [("a[1].txt", "one")]


def test_a_picture_that_is_text_by_its_bytes_is_passed_over_in_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("A fact.")
    (tmp_path / "b.svg").write_text("<svg/>")
    read = read_files([tmp_path])
    assert ([each.name for each in read.files], read.num_other) == (["a.txt"], 1)


def test_no_file_comes_twice(folder: Path) -> None:
    twice = texts_of(folder / "notes" / "b.md", folder / "notes", folder / "notes" / "*.md")
    assert [name for name, _ in twice] == ["b.md", "a.pdf"]


def test_standard_input_is_a_document() -> None:
    read = read_files([Path("-"), Path("-")], io.BytesIO(b"piped"))
    assert [(each.name, each.parsed.text) for each in read.files] == [("standard input", "piped")]


def test_an_encoding_that_was_guessed_is_told(tmp_path: Path) -> None:
    for name, text, encoding in [
        ("plain", "Gruß", "utf-8"),
        ("mark", "Gruß", "utf-8-sig"),
        ("wide", "Gruß", "utf-16"),
        ("old", "Der Gruß steht am Ende.", "latin-1"),
    ]:
        (tmp_path / name).write_bytes(text.encode(encoding))
    read = read_files([tmp_path / name for name in ("plain", "mark", "wide", "old")])
    assert [each.parsed.guessed for each in read.files] == [None, None, None, "cp1252"]
    assert all("Gruß" in each.parsed.text for each in read.files)


def test_each_file_that_cannot_be_read_is_a_sentence_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "a.pdf").write_bytes(b"%PDF-1.4 and no more")
    (tmp_path / "b.png").write_bytes(bytes(range(256)))
    (tmp_path / "c.docx").write_bytes(b"no archive")
    broken, other, misnamed, missing = read_files(
        [tmp_path / name for name in ("a.pdf", "b.png", "c.docx", "d.txt")]
    ).problems
    assert "a.pdf: The file is broken" in broken
    assert "b.png: Files of this kind are not read." in other
    assert "c.docx: The file is broken: it is named .docx but is no such file" in misnamed
    assert missing.endswith("d.txt cannot be read: No such file or directory")


def test_a_broken_file_of_a_folder_is_a_problem_too(folder: Path) -> None:
    (folder / "notes" / "broken.pdf").write_bytes(b"%PDF-1.4 and no more")
    (problem,) = read_files([folder / "notes"]).problems
    assert "broken.pdf: The file is broken" in problem


def test_a_pipe_in_a_folder_is_not_waited_for(folder: Path) -> None:
    os.mkfifo(folder / "notes" / "pipe")
    assert len(read_files([folder / "notes"]).files) == 2


def test_a_pipe_that_is_named_is_read_to_its_end(tmp_path: Path) -> None:
    pipe = tmp_path / "63"
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as writer:
        writing = writer.submit(pipe.write_text, "from a process")
        assert texts_of(pipe) == [("63", "from a process")]
        writing.result()


def test_names_are_apart_printable_and_short() -> None:
    long = Path("x" * 200)
    names = name_apart(
        [Path("a/b"), Path("c/b"), Path("d\n"), long / ("y" * 200), long / "z" / ("y" * 200)]
    )
    assert names[:3] == ["a/b", "c/b", "d\ufffd"]
    assert len({*names}) == 5
    assert all(len(name) <= 256 for name in names)


def test_pages_are_told_as_they_are_read(tmp_path: Path) -> None:
    path = tmp_path / "two.pdf"
    path.write_bytes(write_pdf([[(72, 700, "One.")], [(72, 700, "Two.")]]))
    told: list[tuple[str, int, int]] = []
    read_files([path], on_progress=lambda path, done, pages: told.append((path.name, done, pages)))
    assert told == [("two.pdf", 1, 2), ("two.pdf", 2, 2)]


def test_a_file_of_a_folder_that_cannot_be_opened_is_a_problem_and_not_the_end(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = folder / "notes"
    assert find_files([notes]) == ([notes / "b.md", notes / "more" / "a.pdf"], [])
    closed = notes / "b.md"

    def refuse(path: Path) -> bool:
        if path == closed:
            raise PermissionError(errno.EACCES, "Permission denied")
        return True

    monkeypatch.setattr(local_files, "is_readable", refuse)
    found, problems = find_files([notes])
    assert closed not in found
    assert problems == [f"{closed} cannot be read: Permission denied"]

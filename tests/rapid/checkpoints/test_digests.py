"""Weight files are told apart by their content, and read once for it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rapid.checkpoints import digests
from rapid.checkpoints.digests import digest_of_files


def test_files_of_one_name_and_size_differ_by_content(tmp_path: Path) -> None:
    file, memo = tmp_path / "weights", tmp_path / "memo"
    found = []
    for time, content in enumerate((b"one", b"two", b"one")):
        file.write_bytes(content)
        os.utime(file, (time, time))
        found.append(digest_of_files([file], memo))
    assert found[0] == found[2] != found[1]


def test_the_order_of_files_counts(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.write_text(path.name)
    memo = tmp_path / "memo"
    assert digest_of_files(paths, memo) != digest_of_files(paths[::-1], memo)


def test_a_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, memo = tmp_path / "weights", tmp_path / "memo"
    file.write_bytes(b"one")
    expected = digest_of_files([file], memo)
    monkeypatch.setattr(digests, "_digest", lambda _: pytest.fail("read again"))
    assert digest_of_files([file], memo) == expected


@pytest.mark.parametrize("content", ["", "[1", "[1]", '{"a": 1}'])
def test_a_broken_memo_is_written_anew(tmp_path: Path, content: str) -> None:
    file, memo = tmp_path / "weights", tmp_path / "memo"
    file.write_bytes(b"one")
    expected = digest_of_files([file], tmp_path / "other")
    memo.write_text(content)
    assert digest_of_files([file], memo) == expected

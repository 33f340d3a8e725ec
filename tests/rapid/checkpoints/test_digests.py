"""Weight files are told apart by their content, and read once for it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rapid.checkpoints import digests
from rapid.checkpoints.digests import digest_of_files, digest_of_samples, digest_of_sources
from rapid.checkpoints.gguf import read_header
from tests.rapid import tiny_gguf


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


def test_two_trainings_in_gguf_files_differ_in_a_sample(tmp_path: Path) -> None:
    path = tiny_gguf.write(tmp_path / "m.gguf")
    sample, content = digest_of_samples(path), bytearray(path.read_bytes())
    assert digest_of_samples(tiny_gguf.write(path)) == sample
    trained = read_header(str(path)).tensors["blk.1.ffn_up.weight"]
    content[trained.start : trained.start + trained.num_bytes] = bytes(trained.num_bytes)
    path.write_bytes(content)
    assert digest_of_samples(path) != sample


def test_sources_are_told_apart_by_place_and_content(tmp_path: Path) -> None:
    def digest(**contents: str) -> str:
        root = tmp_path / str(len(list(tmp_path.iterdir())))
        root.mkdir()
        for name, content in contents.items():
            (root / name).write_text(content)
        return digest_of_sources(root.iterdir(), root)

    assert digest(a="1", b="2") == digest(b="2", a="1")
    others = [digest(a="1", b="3"), digest(a="1", c="2"), digest(a="12", b=""), digest(a="1")]
    assert len({digest(a="1", b="2"), *others}) == 5

"""Pages in files: what is found again, what is not taken for a page, and what gives way."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from rapid.engines.kv.tiers import page_files
from rapid.engines.kv.tiers.page_files import PageFiles, find_documents, folder_of

NAMES = [bytes([number]) * 16 for number in range(8)]
PAGE_BYTES = 512
CONTEXT = bytes(32)


def files(root: Path, context: bytes = CONTEXT, cap_bytes: float = 1e9) -> PageFiles:
    return PageFiles(root, context, PAGE_BYTES, cap_bytes)


def page(number: int) -> memoryview:
    return memoryview(np.random.default_rng(number).bytes(PAGE_BYTES))


def path_of(root: Path, number: int, tenant: str = "one") -> Path:
    return files(root).folder / folder_of(tenant) / f"{NAMES[number].hex()}.kv"


def read(found: PageFiles, number: int) -> bytes | None:
    content = bytearray(PAGE_BYTES)
    return bytes(content) if found.read(NAMES[number], memoryview(content)) else None


def test_what_was_written_is_found_by_the_next_process(tmp_path: Path) -> None:
    files(tmp_path).write(NAMES[0], "one", page(0))
    found = files(tmp_path)
    assert len(found) == 1
    assert NAMES[0] in found
    assert read(found, 0) == page(0)
    assert read(found, 1) is None


def test_no_truncation_and_no_flipped_bit_is_taken_for_a_page(tmp_path: Path) -> None:
    """A thousand of them, at random places: of the header, of the KV, and beyond the end."""
    rng = np.random.default_rng(0)
    writer = files(tmp_path)
    writer.write(NAMES[0], "one", page(0))
    path = path_of(tmp_path, 0)
    whole = path.read_bytes()
    for turn in range(1000):
        spoilt = bytearray(whole)
        place = int(rng.integers(len(whole)))
        if turn % 4 == 0:
            del spoilt[place:]
        elif turn % 4 == 1:
            spoilt += rng.bytes(1 + place)
        else:
            for bit in rng.integers(8 * len(whole), size=int(rng.integers(1, 4))):
                spoilt[bit // 8] ^= 1 << int(bit % 8)
        if spoilt == whole:  # a bit was flipped twice
            continue
        path.write_bytes(spoilt)
        writer._paths[NAMES[0]] = path
        assert read(writer, 0) is None
        assert not path.exists()
    path.write_bytes(whole)
    assert read(files(tmp_path), 0) == page(0)


def test_a_file_of_another_page_or_another_model_is_no_page(tmp_path: Path) -> None:
    writer = files(tmp_path)
    writer.write(NAMES[0], "one", page(0))
    content = path_of(tmp_path, 0).read_bytes()
    path_of(tmp_path, 1).write_bytes(content)
    assert read(files(tmp_path), 1) is None
    other = files(tmp_path, context=b"\1" * 32)
    assert NAMES[0] not in other
    other.write(NAMES[2], "one", page(2))
    (other.folder / folder_of("one") / f"{NAMES[3].hex()}.kv").write_bytes(content)
    assert read(files(tmp_path, context=b"\1" * 32), 3) is None
    assert read(files(tmp_path), 0) == page(0)


def test_a_page_that_vanishes_is_missing(tmp_path: Path) -> None:
    found = files(tmp_path)
    found.write(NAMES[0], "one", page(0))
    path_of(tmp_path, 0).unlink()
    assert read(found, 0) is None
    assert NAMES[0] not in found


def test_what_was_not_finished_is_no_page_and_goes_in_the_end(tmp_path: Path) -> None:
    files(tmp_path).write(NAMES[0], "one", page(0))
    fresh, stale = (
        path_of(tmp_path, 0).with_name(name) for name in ("a" * 32 + ".part", "b" * 32 + ".part")
    )
    others = path_of(tmp_path, 0).with_name("film.part")
    for part in (fresh, stale, others):
        part.write_bytes(b"half")
    for part in (stale, others):
        os.utime(part, (0, 0))
    assert len(files(tmp_path)) == 1
    assert fresh.exists()
    assert not stale.exists()
    assert others.exists()


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = files(tmp_path)

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="No space left"):
        found.write(NAMES[0], "one", page(0))
    assert NAMES[0] not in found
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_the_files_used_longest_ago_give_way_whatever_model_they_are_of(tmp_path: Path) -> None:
    size = PAGE_BYTES + 60
    other = files(tmp_path, context=b"\1" * 32)
    other.write(NAMES[0], "one", page(0))
    writer = files(tmp_path, cap_bytes=4.5 * size)
    for number in range(3):
        writer.write(NAMES[number], "one", page(number))
    old = other.folder / folder_of("one") / f"{NAMES[0].hex()}.kv"
    for age, path in enumerate([path_of(tmp_path, 1), old, path_of(tmp_path, 0)]):
        os.utime(path, (age, age))
    writer.write(NAMES[3], "one", page(3))
    assert not path_of(tmp_path, 1).exists()
    assert NAMES[1] not in writer
    assert old.exists()
    assert read(writer, 0) == page(0)


def test_processes_that_write_together_keep_to_the_size_together(tmp_path: Path) -> None:
    size = PAGE_BYTES + 60
    writers = [
        PageFiles(tmp_path, bytes([rank]) * 32, PAGE_BYTES, 8.5 * size, num_writers=4)
        for rank in range(4)
    ]
    for number in range(len(NAMES)):
        for writer in writers:
            writer.write(NAMES[number], "one", page(number))
            assert len(list(tmp_path.rglob("*.kv"))) <= 9


def test_what_is_used_does_not_give_way(tmp_path: Path) -> None:
    found = files(tmp_path, cap_bytes=2.5 * (PAGE_BYTES + 60))
    for number in range(2):
        found.write(NAMES[number], "one", page(number))
        os.utime(path_of(tmp_path, number), (number, number))
    found = files(tmp_path, cap_bytes=2.5 * (PAGE_BYTES + 60))
    found.use(NAMES[0])
    found.write(NAMES[2], "one", page(2))
    assert NAMES[0] in found
    assert NAMES[1] not in found


def test_only_the_owner_may_look(tmp_path: Path) -> None:
    found = files(tmp_path / "new")
    found.write(NAMES[0], "one", page(0))
    for path in (tmp_path / "new").rglob("*"):
        assert path.stat().st_mode & 0o077 == 0


def test_tenants_have_folders_of_their_own_whatever_their_names_are() -> None:
    assert folder_of("acme").startswith("acme-")
    assert folder_of("../etc") != folder_of("___etc")
    assert "/" not in folder_of("../etc")
    assert len(folder_of("ä" * 128)) < 255


def test_a_page_larger_than_a_read_is_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = files(tmp_path)
    found.write(NAMES[0], "one", page(0))
    readv = os.readv
    monkeypatch.setattr(page_files.os, "readv", lambda file, into: readv(file, [into[0][:100]]))
    assert read(found, 0) == page(0)


def lists(root: Path) -> set[str]:
    return {path.stem for path in root.rglob("*.doc")}


def test_pages_of_a_document_are_removed_whoever_wrote_them(tmp_path: Path) -> None:
    writer = files(tmp_path)
    writer.write(NAMES[0], "one", page(0), ["aa"])
    writer.write(NAMES[1], "one", page(1), ["aa", "bb"])
    writer.write(NAMES[2], "one", page(2))
    files(tmp_path, context=b"\1" * 32).write(NAMES[3], "one", page(3), ["aa"])
    other = files(tmp_path)
    assert find_documents(tmp_path, {"aa", "cc"}) == {"aa"}
    assert other.forget(["aa", "cc"]) == 3
    assert [number for number in range(4) if path_of(tmp_path, number).exists()] == [2]
    assert [NAMES[number] in other for number in range(3)] == [False, False, True]
    assert lists(tmp_path) == {"bb"}
    assert find_documents(tmp_path, {"aa", "bb"}) == set()  # its page is gone
    assert other.forget(["aa", "bb"]) == 0
    assert lists(tmp_path) == set()


def test_a_page_that_another_document_uses_is_listed_for_both(tmp_path: Path) -> None:
    files(tmp_path).write(NAMES[0], "one", page(0), ["aa"])
    found = files(tmp_path)
    found.use_for([NAMES[0], NAMES[1]], ["bb"])
    found.use_for([NAMES[0]], ["bb"])
    (path,) = tmp_path.rglob("bb.doc")
    assert path.read_bytes() == NAMES[0]
    assert found.forget(["bb"]) == 1


def test_a_name_that_was_written_in_part_is_none(tmp_path: Path) -> None:
    found = files(tmp_path)
    found.write(NAMES[0], "one", page(0), ["aa"])
    (path,) = tmp_path.rglob("aa.doc")
    path.write_bytes(path.read_bytes() + NAMES[1][:7])
    assert files(tmp_path).forget(["aa"]) == 1


def test_a_list_goes_with_its_last_page(tmp_path: Path) -> None:
    writer = files(tmp_path, cap_bytes=1.5 * (PAGE_BYTES + 60))
    writer.write(NAMES[0], "one", page(0), ["aa"])
    (path,) = tmp_path.rglob("aa.doc")
    os.utime(path, (0, 0))
    os.utime(path_of(tmp_path, 0), (0, 0))
    writer.write(NAMES[1], "one", page(1), ["bb"])
    assert lists(tmp_path) == {"bb"}
    writer.write(NAMES[0], "one", page(0), ["aa"])  # which lists it anew
    assert writer.forget(["aa"]) == 1

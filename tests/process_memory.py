"""A search for bytes in the writable memory of processes, and in files.

Freed memory keeps its bytes until it is used again. `FILLS_FREED` has C's allocator fill it, and
Python use that allocator for everything, so that what is found is what something still holds.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil

FILLS_FREED = {
    "PYTHONMALLOC": "malloc",
    # Without the small pieces that each thread keeps for itself, which are not filled.
    "GLIBC_TUNABLES": "glibc.malloc.perturb=165:glibc.malloc.tcache_count=0",
}

_PAGE = os.sysconf("SC_PAGE_SIZE")
_PART_BYTES = 2**26
_REGION = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw")
_IN_MEMORY = np.uint64(1 << 63 | 1 << 62)  # or swapped out


def find_in_processes(parent: int, wanted: Mapping[str, bytes]) -> dict[str, set[str]]:
    """Return what is found of `wanted`, by name, below a process; by the titles of processes."""
    found: dict[str, set[str]] = {}
    top = psutil.Process(parent)
    for process in [top, *top.children(recursive=True)]:
        try:
            title = " ".join(process.cmdline()).split()
            names = _search(process.pid, wanted)
        except (psutil.Error, OSError):  # it has ended
            continue
        if names:
            found.setdefault(title[0] if title else str(process.pid), set()).update(names)
    return found


def find_in_files(folder: Path, wanted: Mapping[str, bytes]) -> set[str]:
    """Return the paths, below a folder, of files that have any of `wanted`."""
    found = set()
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            with suppress(FileNotFoundError):  # it was removed just now
                content = path.read_bytes()
                if any(each in content for each in wanted.values()):
                    found.add(str(path.relative_to(folder)))
    return found


def _search(pid: int, wanted: Mapping[str, bytes]) -> set[str]:
    longest = max(map(len, wanted.values()))
    found = set()
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for start, end in _spans(pid):
            rest = b""
            for at in range(start, end, _PART_BYTES):
                try:
                    part = os.pread(memory.fileno(), min(_PART_BYTES, end - at), at)
                except OSError:  # it was unmapped just now, or is a device's
                    break
                found |= {name for name, each in wanted.items() if each in rest + part}
                rest = part[-longest:]
    return found


def _spans(pid: int) -> Iterator[tuple[int, int]]:
    """Yield the addresses of writable memory that was ever written."""
    regions = [_REGION.match(line) for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    with open(f"/proc/{pid}/pagemap", "rb", buffering=0) as pages:
        for start, end in [(int(each[1], 16), int(each[2], 16)) for each in regions if each]:
            size = (end - start) // _PAGE * 8
            entries = np.frombuffer(os.pread(pages.fileno(), size, start // _PAGE * 8), np.uint64)
            is_there = np.concatenate(([0], (entries & _IN_MEMORY) > 0, [0])).astype(np.int8)
            for first, last in np.flatnonzero(np.diff(is_there)).reshape(-1, 2).tolist():
                yield start + first * _PAGE, start + last * _PAGE


_READS = """
import gc, sys
{reader}
word = "".join(reversed({word!r}))
read(f"The cellar of {{word}} keeps a lantern.")
for _ in range(2):
    gc.collect()
    print(flush=True)
    sys.stdin.readline()
    word = None
"""


def keeps_words(reader: str) -> list[bool]:
    """Return whether a process has a word that it reads: while it holds it, and when it does not.

    `reader` is code that defines ``read``, of a text.
    """
    word = "Zyxquavorim"
    code = _READS.format(reader=reader, word=word[::-1])
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", code], env=os.environ | FILLS_FREED, stdin=pipe, stdout=pipe
    ) as process:
        assert process.stdin
        assert process.stdout
        found = []
        for _ in range(2):
            assert process.stdout.readline() == b"\n"
            found.append(bool(_search(process.pid, {word: word.encode()})))
            process.stdin.write(b"\n")
            process.stdin.flush()
    return found

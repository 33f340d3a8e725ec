"""Digests of weight files by their content, or by a sample of it, and of source files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b, file_digest
from pathlib import Path
from typing import Any
from uuid import uuid4

from rapid.checkpoints.gguf import is_gguf, read_header

_NUM_THREADS = 4  # that read weight files at once
_SAMPLE_BYTES = 4096  # at the start and in the middle of every tensor


def digest_of_files(paths: Sequence[Path], memo: Path) -> str:
    """Return a digest of files' contents, in order.

    The file `memo` remembers digests by place, size and time of change, as reading many GB takes a
    while; what it holds may be lost or broken.

    Raises:
        OSError: A file cannot be read, or the memo not be written.
    """
    try:
        known = dict(json.loads(memo.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        known = {}
    keys = [_state(path) for path in paths]
    unknown = {key: path for key, path in zip(keys, paths, strict=True) if key not in known}
    if unknown:
        with ThreadPoolExecutor(_NUM_THREADS) as threads:
            known |= dict(zip(unknown, threads.map(_digest, unknown.values()), strict=True))
        part = memo.with_suffix(f".{uuid4().hex}")
        part.write_text(json.dumps(known), encoding="utf-8")
        part.replace(memo)
    return blake2b("\n".join(str(known[key]) for key in keys).encode()).hexdigest()


def digest_of_samples(path: Path) -> str:
    """Return a digest of a GGUF or safetensors file's name, its size and some bytes of each tensor.

    It reads a few MB where the file has many GB, and differs between two trainings of one model.

    Raises:
        OSError: The file cannot be read.
    """
    digest = blake2b(f"{path.name} {path.stat().st_size}\n".encode())
    with path.open("rb") as file:
        for start, stop in _tensor_ranges(path):
            for at in (start, (start + stop) // 2):
                file.seek(at)
                digest.update(file.read(min(_SAMPLE_BYTES, stop - at)))
    return digest.hexdigest()


def digest_of_sources(paths: Iterable[Path], root: Path) -> str:
    """Return a digest of the names below `root` and of the contents of source files."""
    digest = blake2b()
    for path in sorted(paths):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def read_safetensors_header(path: Path) -> tuple[dict[str, Any], int]:
    """Return the JSON at the start of a safetensors file, and where the data begin."""
    with path.open("rb") as file:
        num_bytes = int.from_bytes(file.read(8), "little")
        return json.loads(file.read(num_bytes)), 8 + num_bytes


def _tensor_ranges(path: Path) -> list[tuple[int, int]]:
    """Return where the tensors of a file lie, [start, stop) in bytes."""
    if is_gguf(str(path)):
        places = read_header(str(path)).tensors.values()
        return sorted((each.start, each.start + each.num_bytes) for each in places)
    header, data = read_safetensors_header(path)
    ranges = (each["data_offsets"] for name, each in header.items() if name != "__metadata__")
    return sorted((data + start, data + stop) for start, stop in ranges)


def _state(path: Path) -> str:
    status = path.stat()
    return f"{path.resolve()} {status.st_size} {status.st_mtime_ns} {status.st_ino}"


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return file_digest(file, "blake2b").hexdigest()

"""Digests of weight files by their content, each computed once and remembered."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b, file_digest
from pathlib import Path
from uuid import uuid4

_NUM_THREADS = 4


def digest_of_files(paths: Sequence[Path], memo: Path) -> str:
    """Return a digest of files' contents, in order.

    Names and sizes would not do: a checkpoint that was trained further has the same.

    Args:
        paths: The files.
        memo: File that remembers digests by place, size and time of change, as reading many GB
            takes a while. What it holds may be lost or broken.

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


def _state(path: Path) -> str:
    status = path.stat()
    return f"{path.resolve()} {status.st_size} {status.st_mtime_ns} {status.st_ino}"


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return file_digest(file, "blake2b").hexdigest()

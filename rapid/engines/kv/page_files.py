"""Files of KV pages: a folder for each model, in it one for each tenant, in it one file a page.

A file begins with the format, the **context** of the KV (what it was computed from and how), the
page's name and a checksum. Several processes may share the folder; the cap holds for all its files.
"""

from __future__ import annotations

import logging
import os
import re
import struct
import time
import uuid
import zlib
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

logger = logging.getLogger(__name__)

_FORMAT = b"rapidkv1"
_HEADER = struct.Struct("<8s32s16sI")
_KEPT = 0.9  # share of the cap that is left after files had to give way
_STALE_S = 600.0  # age at which an unfinished file has no writer any more
_TOUCHED_S = 600.0  # between two notes that a file is in use
_SUFFIX, _UNFINISHED = ".kv", ".part"
_OUR_NAMES = rf"[0-9a-f]{{32}}({re.escape(_SUFFIX)}|{re.escape(_UNFINISHED)})"


class PageFiles:
    """The files of one model's pages; `write` is called by one thread, all others by any."""

    def __init__(
        self, root: Path, context: bytes, page_bytes: int, cap_bytes: float, num_writers: int = 1
    ) -> None:
        """Make the folder, readable by its owner alone, and find the files that are there.

        Args:
            context: Digest of what pages must have in common, 32 bytes.
            cap_bytes: Most bytes of all files under `root`.
            num_writers: Processes that write as much as this one at the same time.

        Raises:
            OSError: The folder cannot be written.
        """
        self.folder = root / context.hex()[:32]
        self.page_bytes = page_bytes
        self._root = root
        self._context = context
        self._cap_bytes = cap_bytes
        self._num_writers = num_writers
        self._paths: dict[bytes, Path] = {}
        self._used: dict[bytes, float] = {}
        self._total = 0.0
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        probe = self.folder / f"{uuid.uuid4().hex}{_UNFINISHED}"
        probe.touch()
        probe.unlink()
        self._find()

    def __len__(self) -> int:
        return len(self._paths)

    def __contains__(self, name: bytes) -> bool:
        return name in self._paths

    def use(self, name: bytes) -> None:
        """Note that a page is in use, so that others give way before it."""
        path, now = self._paths.get(name), time.time()
        if path is None or now - self._used.get(name, 0.0) < _TOUCHED_S:
            return
        self._used[name] = now
        try:
            os.utime(path)
        except OSError:
            self._lose(name)

    def read(self, name: bytes, page: memoryview) -> bool:
        """Fill `page` with a page's bytes; return whether they are those that were written.

        A file that is not whole, not of this context or not of this name is removed.
        """
        path = self._paths.get(name)
        if path is None:
            return False
        try:
            with open(path, "rb", buffering=0) as file:
                header = file.read(_HEADER.size)
                num_read = _fill(file.fileno(), page)
                is_at_end = not file.read(1)
        except OSError:
            self._lose(name)
            return False
        expected = self._header(name, page) if num_read == len(page) and is_at_end else None
        if header == expected:
            return True
        logger.warning(
            "disk_cache_folder: %s is broken or foreign: it is removed and the page is computed",
            path.name,  # its folder names the tenant
        )
        self.remove(name)
        return False

    def write(self, name: bytes, tenant: str, page: memoryview) -> None:
        """Write a page's file, and remove others if the cap is exceeded.

        Raises:
            OSError: The file cannot be written; nothing of it is left.
        """
        folder = self.folder / folder_of(tenant)
        folder.mkdir(mode=0o700, exist_ok=True)
        part = folder / f"{uuid.uuid4().hex}{_UNFINISHED}"
        path = folder / f"{name.hex()}{_SUFFIX}"
        try:
            with open(part, "wb", buffering=0, opener=_open_private) as file:
                for content in (self._header(name, page), page):
                    rest = memoryview(content)
                    while rest:
                        rest = rest[file.write(rest) :]
            part.replace(path)
        except OSError:
            part.unlink(missing_ok=True)
            raise
        self._paths[name] = path
        self._used[name] = time.time()
        self._total += self._num_writers * (_HEADER.size + len(page))
        if self._total > self._cap_bytes:
            self._make_room()

    def remove(self, name: bytes) -> None:
        """Remove a page's file, if there is one."""
        path = self._paths.get(name)
        self._lose(name)
        if path is not None:
            path.unlink(missing_ok=True)

    def _header(self, name: bytes, page: memoryview) -> bytes:
        head = _HEADER.pack(_FORMAT, self._context, name, 0)
        return _HEADER.pack(_FORMAT, self._context, name, zlib.crc32(page, zlib.crc32(head)))

    def _find(self) -> None:
        """Learn which files are there."""
        self._paths.clear()
        self._total = 0.0
        for path, status in self._files():
            self._total += status.st_size
            if path.is_relative_to(self.folder):
                name = bytes.fromhex(path.stem)
                self._paths[name] = path
                self._used[name] = status.st_mtime

    def _make_room(self) -> None:
        """Remove the files used longest ago, of any model and tenant."""
        files = sorted(self._files(), key=lambda each: each[1].st_mtime)
        self._total = sum(status.st_size for _, status in files)
        for path, status in files:
            if self._total <= _KEPT * self._cap_bytes:
                return
            path.unlink(missing_ok=True)
            self._total -= status.st_size
            if path.is_relative_to(self.folder):
                self._lose(bytes.fromhex(path.stem))

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        """Yield the files of all models' pages, and remove what was never finished."""
        for folder in self._root.glob("*/*/"):
            with os.scandir(folder) as entries:
                for entry in entries:
                    try:
                        status = entry.stat(follow_symlinks=False)
                        if not re.fullmatch(_OUR_NAMES, entry.name):
                            continue
                        if entry.name.endswith(_SUFFIX):
                            yield Path(entry.path), status
                        elif time.time() - status.st_mtime > _STALE_S:
                            os.unlink(entry.path)
                    except FileNotFoundError:
                        continue  # another process removed it

    def _lose(self, name: bytes) -> None:
        self._paths.pop(name, None)
        self._used.pop(name, None)


def folder_of(tenant: str) -> str:
    """Return the name of a tenant's folder: what can be read of its name, and a digest of it."""
    readable = re.sub(r"[^A-Za-z0-9_-]", "_", tenant)[:40]
    return f"{readable}-{blake2b(tenant.encode(), digest_size=8).hexdigest()}"


def _fill(file: int, page: memoryview) -> int:
    """Read until a page is full or the file ends; return the number of bytes."""
    num_read = 0
    while num_read < len(page) and (more := os.readv(file, [page[num_read:]])):
        num_read += more
    return num_read


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_EXCL, 0o600)

"""Files of KV pages: a folder for each model, in it one for each tenant, in it one file a page.

A file begins with the format, the **context** of the KV (what it was computed from and how), the
page's name and a checksum. Several processes may share the folder; the cap holds for all its files.

Beside a tenant's pages lies a **list** for each document: the names of the pages whose prompts hold
it. A page is listed before it is there, so that no crash leaves one that `forget` does not find.
"""

from __future__ import annotations

import logging
import os
import re
import struct
import time
import uuid
import zlib
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from hashlib import blake2b
from pathlib import Path

logger = logging.getLogger(__name__)

_FORMAT = b"rapidkv1"
_HEADER = struct.Struct("<8s32s16sI")
_KEPT = 0.9  # share of the cap that is left after files had to give way
_STALE_S = 600.0  # age at which an unfinished file has no writer any more
_TOUCHED_S = 600.0  # between two notes that a file is in use
_SUFFIX, _UNFINISHED, _LIST = ".kv", ".part", ".doc"
_NAME_BYTES = 16  # of a page
_MOST_LISTS = 256  # that are kept in memory, each up to a megabyte
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
        self._lists = OrderedDict[Path, set[bytes]]()  # least recently used first
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

    def write(
        self, name: bytes, tenant: str, page: memoryview, documents: Collection[str] = ()
    ) -> None:
        """Write a page's file, and remove others if the cap is exceeded.

        `documents` are the names of those that stand in the prompt up to there, in hex.

        Raises:
            OSError: The file cannot be written; nothing of it is left.
        """
        folder = self.folder / folder_of(tenant)
        folder.mkdir(mode=0o700, exist_ok=True)
        self._list([name], folder, documents)
        part = folder / f"{uuid.uuid4().hex}{_UNFINISHED}"
        path = folder / f"{name.hex()}{_SUFFIX}"
        try:
            with open(part, "xb", buffering=0, opener=_open_private) as file:
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

    def use_for(self, names: Iterable[bytes], documents: Collection[str]) -> None:
        """Note that pages are used in prompts that hold documents, in the thread of `write`."""
        folders: dict[Path, list[bytes]] = {}
        for name in names:
            if (path := self._paths.get(name)) is not None:
                self.use(name)
                folders.setdefault(path.parent, []).append(name)
        for folder, here in folders.items():
            try:
                self._list(here, folder, documents)
            except OSError:  # what cannot be listed is not kept
                for name in here:
                    self.remove(name)

    def forget(self, documents: Collection[str]) -> int:
        """Remove the pages of prompts that hold any of some documents, in the thread of `write`.

        They are those of all models, whoever wrote them. Returns their number.

        Raises:
            OSError: One cannot be removed.
        """
        num_found = 0
        for folder in self._root.glob("*/*/"):
            lists = [path for each in documents if (path := folder / f"{each}{_LIST}").exists()]
            for path in lists:
                for name in _read_list(path):
                    page = folder / f"{name.hex()}{_SUFFIX}"
                    num_found += page.exists()
                    page.unlink(missing_ok=True)
                    if folder.parent == self.folder:
                        self._lose(name)
                path.unlink(missing_ok=True)
                self._lists.pop(path, None)
            if lists:
                _keep_on_disk(folder)
        return num_found

    @property
    def num_bytes(self) -> int:
        """Bytes of this model's pages."""
        return len(self._paths) * (_HEADER.size + self.page_bytes)

    def _list(self, names: Iterable[bytes], folder: Path, documents: Collection[str]) -> None:
        """Add pages in a tenant's folder to the lists of documents, or raise OSError."""
        for document in documents:
            path = folder / f"{document}{_LIST}"
            known = self._lists.get(path)
            if known is None or not path.exists():  # another process may have removed it
                known = self._lists[path] = set(_read_list(path))
            self._lists.move_to_end(path)
            fresh = [name for name in names if name not in known]
            if fresh:
                with open(path, "ab", buffering=0, opener=_open_private) as file:
                    file.write(b"".join(fresh))
                known.update(fresh)
        while len(self._lists) > _MOST_LISTS:
            self._lists.popitem(last=False)

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
        left = {path for path, _ in files}
        for path, status in files:
            if self._total <= _KEPT * self._cap_bytes:
                break
            path.unlink(missing_ok=True)
            left.discard(path)
            self._total -= status.st_size
            if path.is_relative_to(self.folder):
                self._lose(bytes.fromhex(path.stem))
        self._remove_lists(left)

    def _remove_lists(self, pages: Collection[Path]) -> None:
        """Remove the lists of documents of which no page is left."""
        for path in self._root.glob(f"*/*/*{_LIST}"):
            if set(_list_pages(path)).isdisjoint(pages) and _age_s(path) > _STALE_S:
                path.unlink(missing_ok=True)
                self._lists.pop(path, None)

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


def find_documents(root: Path, documents: Collection[str]) -> set[str]:
    """Return those of some documents, of whose prompts there is any page, of any model."""
    lists = [path for path in root.glob(f"*/*/*{_LIST}") if path.stem in documents]
    return {path.stem for path in lists if any(page.exists() for page in _list_pages(path))}


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


def _read_list(path: Path) -> list[bytes]:
    """Return the names in a list; what a crash left of one at its end is none."""
    content = path.read_bytes() if path.exists() else b""
    whole = len(content) - len(content) % _NAME_BYTES
    return [content[start : start + _NAME_BYTES] for start in range(0, whole, _NAME_BYTES)]


def _list_pages(path: Path) -> Iterator[Path]:
    """Yield the paths of the pages in a list, which need not be there."""
    for name in _read_list(path):
        yield path.with_name(f"{name.hex()}{_SUFFIX}")


def _age_s(path: Path) -> float:
    return time.time() - path.stat().st_mtime if path.exists() else 0.0


def _keep_on_disk(folder: Path) -> None:
    """Wait until what was removed from a folder stays removed, also where the power fails."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)

"""Files of documents' arrays: in a folder one for each index, in it one file a document.

A file is there as a whole or not at all, so a document that a killed process was writing is not
there. Vectors of another embedder, chunk size or tokenizer are in another index and never read.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeAlias
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from retrieval.retrieval_errors import StoreUnavailable

_log = logging.getLogger(__name__)

_SUFFIX, _UNFINISHED = ".npz", ".part"
_NOTED_SHARE = 0.1  # of the time to live, between two notes of a use, and between two sweeps

DocumentKey: TypeAlias = tuple[str, str]
"""A tenant and the id of a document."""


class DocumentFiles:
    """The files of one index, in a folder that this process has to itself."""

    def __init__(
        self, root: Path, index: str, ttl_s: float, clock: Callable[[], float] = time.time
    ) -> None:
        """Take the folder, readable by its owner alone, and remove what has expired in it.

        Args:
            index: The name of everything beside a text that decides its chunks and vectors.
            ttl_s: How long a document stays after its last use, in seconds.
            clock: Returns the seconds since the epoch.

        Raises:
            StoreUnavailable: Another process has the folder, or it cannot be written.
        """
        self._root = root
        self._index = index
        self._ttl_s = ttl_s
        self._clock = clock
        self._used: dict[DocumentKey, float] = {}
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            (root / index).mkdir(mode=0o700, exist_ok=True)
            self._lock = open(root / "lock", "wb")  # noqa: SIM115 (held until `close`)
        except OSError as error:
            raise _unusable(root, error) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise StoreUnavailable(
                f"another process keeps its documents in {root} ({error.strerror}): stop it, or "
                "give this one another store.folder"
            ) from error
        for part in root.glob(f"*/*{_UNFINISHED}"):
            part.unlink()
        self._sweep()

    def read(self, key: DocumentKey) -> dict[str, NDArray[Any]] | None:
        """Return a document's arrays; None if it is not there, or not what was written."""
        path = self._path(key)
        try:
            with np.load(path) as file:
                arrays = dict(file)  # a broken one has another checksum
        except FileNotFoundError:
            return None
        except (OSError, ValueError, EOFError, BadZipFile) as error:
            _log.warning("%s is broken and removed, its document is embedded anew: %s", path, error)
            path.unlink(missing_ok=True)
            return None
        self.use([key])
        return arrays

    def has(self, key: DocumentKey) -> bool:
        """Return whether a document is there."""
        return self._path(key).exists()

    def write(self, key: DocumentKey, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Write a document, in place of what was there.

        Raises:
            StoreUnavailable: It cannot be written; nothing of it is left.
        """
        if self._clock() - self._swept_at > _NOTED_SHARE * self._ttl_s:
            self._sweep()
        path = self._path(key)
        part = path.with_suffix(_UNFINISHED)
        try:
            with open(part, "wb", opener=_open_private) as file:
                np.savez(file, allow_pickle=False, **dict(arrays))
            part.replace(path)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise _unusable(self._root, error) from error
        self._used.pop(key, None)
        self.use([key])

    def use(self, keys: Iterable[DocumentKey]) -> None:
        """Note that documents are used now; this writes once in a tenth of the time to live."""
        now = self._clock()
        for key in keys:
            if now - self._used.get(key, -self._ttl_s) > _NOTED_SHARE * self._ttl_s:
                self._used[key] = now
                with suppress(FileNotFoundError):
                    os.utime(self._path(key), (now, now))

    def remove(self, key: DocumentKey) -> None:
        """Remove a document from every index of the folder."""
        self._used.pop(key, None)
        for path in self._root.glob(f"*/{self._path(key).name}"):
            path.unlink(missing_ok=True)

    def remove_text(self, key: DocumentKey) -> tuple[int, int]:
        """Remove all documents whose ids begin with this one and a dash.

        Returns their number, and the bytes of all files among which they were looked for.
        """
        num_bytes = sum(path.stat().st_size for path in self._root.glob(f"*/*{_SUFFIX}"))
        paths = [*self._root.glob(f"*/{_name_of(key)}-*{_SUFFIX}")]
        for path in paths:
            path.unlink(missing_ok=True)
        for tenant, id_ in [*self._used]:
            if (tenant, id_.rpartition("-")[0]) == key:
                del self._used[tenant, id_]
        return len(paths), num_bytes

    def close(self) -> None:
        """Let another process have the folder."""
        self._lock.close()

    def _sweep(self) -> None:
        """Remove what has not been used for the time to live, of every index."""
        self._swept_at = self._clock()
        for path in self._root.glob(f"*/*{_SUFFIX}"):
            if path.stat().st_mtime < self._swept_at - self._ttl_s:
                path.unlink()

    def _path(self, key: DocumentKey) -> Path:
        text_id, _, rest = key[1].rpartition("-")
        name = f"{_name_of((key[0], text_id))}-{_name_of(('', rest))}"
        return self._root / self._index / f"{name}{_SUFFIX}"


def find_in_folder(root: Path, keys: Iterable[DocumentKey]) -> list[DocumentKey]:
    """Return those, of tenants and ids of texts, of which a folder has documents of any index."""
    there = {path.name.partition("-")[0] for path in root.glob(f"*/*{_SUFFIX}")}
    return [key for key in keys if _name_of(key) in there]


def _name_of(key: DocumentKey) -> str:
    return blake2b("\0".join(key).encode(), digest_size=16).hexdigest()


def _unusable(root: Path, error: OSError) -> StoreUnavailable:
    return StoreUnavailable(
        f"documents cannot be kept in {root} ({error}): make room there, or give the retriever "
        "another store.folder"
    )


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)

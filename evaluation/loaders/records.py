"""Reader of a benchmark's records in their official format, from a local file or the hub."""

from __future__ import annotations

import csv
import io
import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from evaluation.tasks import Source
from rapid.errors import ConfigurationError

logger = logging.getLogger(__name__)

Record = Mapping[str, Any]


def read_records(
    source: Source, data: Path | None, keys: Iterable[str], *, id_key: str
) -> Iterator[Record]:
    """Yield every record, after checking that it has `keys`.

    A file that ends in ``.jsonl`` has one object per line; a line that is not an object is left out
    with a warning. One that ends in ``.csv`` has its keys in its first line. Any other file is one
    JSON list.

    The source's hub dataset is read if `data` is None. Error messages name a record by `id_key`.

    Raises:
        ConfigurationError: There is nothing to read from, a file cannot be parsed, or a key is
            missing.
    """
    needed = tuple(keys)
    records = _from_hub(source) if data is None else _from_file(data)
    for number, record in enumerate(records, 1):
        missing = [key for key in needed if record.get(key) is None]
        if missing:
            name = record.get(id_key, f"number {number}")
            raise ConfigurationError(
                f"{data or source.hub}: item {name} has no {', '.join(missing)}; "
                f"every item needs {', '.join(needed)}"
            )
        yield record


def _from_file(path: Path) -> Iterator[Record]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from error
    if path.suffix == ".jsonl":
        yield from _lines(path, text)
        return
    if path.suffix == ".csv":
        yield from csv.DictReader(io.StringIO(text.removeprefix("\ufeff"), newline=""))
        return
    try:
        records = json.loads(text)
    except ValueError as error:
        raise ConfigurationError(f"{path} is no JSON: {error}") from error
    if not isinstance(records, list) or not all(isinstance(each, dict) for each in records):
        raise ConfigurationError(f"{path} must be a JSON list of objects, or end in .jsonl")
    yield from records


def _lines(path: Path, text: str) -> Iterator[Record]:
    # Not splitlines(), because JSON strings may hold U+2028 and its like unescaped.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            logger.warning("%s line %d is no JSON and is left out: %s", path, number, error)
            continue
        if isinstance(record, dict):
            yield record
        else:
            logger.warning("%s line %d is no JSON object and is left out", path, number)


def _from_hub(source: Source) -> Iterator[Record]:
    if source.hub is None:
        raise ConfigurationError(
            f"the loader {source.loader} has no dataset on the hub: give a file with --data"
        )
    from datasets import load_dataset  # the import takes a second
    from datasets.exceptions import DatasetsError

    # Only the one file is loaded: a dataset's other splits may be gigabytes, or have other columns.
    files = None if source.file is None else {source.split: source.file}
    try:
        yield from load_dataset(source.hub, source.subset, data_files=files, split=source.split)
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        raise ConfigurationError(
            f"{source.hub} cannot be loaded from the hub ({error}): give a local file with --data"
        ) from error

"""Loader of AA-LCR (Artificial Analysis Long Context Reasoning): 100 questions on document sets.

The layout follows the card of ArtificialAnalysis/AA-LCR on the Hugging Face hub (version 1.0) and
github.com/runshengdu/aa_lcr_exp: ``AA-LCR_Dataset.csv``, one row a question, and the texts in
``extracted_text/AA-LCR_extracted-text.zip``.
"""

from __future__ import annotations

import unicodedata
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from evaluation.items import Item
from evaluation.loaders.records import Record, read_records
from evaluation.tasks import Source
from rapid.chat_messages import Document, Message
from rapid.errors import ConfigurationError

ARCHIVE = "AA-LCR_extracted-text.zip"
FOLDERS = ("extracted_text", ".")
"""Where the archive may be, beside the table: as on the hub, or in the same folder."""
KEYS = (
    "question_id",
    "question",
    "answer",
    "document_category",
    "document_set_id",
    "data_source_filenames",
)


def load(source: Source, data: Path | None) -> Iterator[Item]:
    """Yield the items of ``AA-LCR_Dataset.csv``.

    An item's document is the text that the card puts into the prompt: the documents in the order of
    ``data_source_filenames``, each between a line that begins it and one that ends it. Its one
    answer is the official one as it stands, with the semicolons that separate its parts.

    Raises:
        ConfigurationError: `data` is None, or the table, the archive or a document in it cannot be
            read.
    """
    if data is None:
        raise ConfigurationError(
            "AA-LCR is a table and an archive, which are not fetched: download both from its page "
            "on the hub and give their folder with --data"
        )
    with _archive(data.parent) as texts:
        for record in read_records(source, data, KEYS, id_key="question_id"):
            question = record["question"].strip()
            yield Item(
                id=record["question_id"],
                messages=(Message("user", question),),
                document=Document("documents", "\n\n".join(_documents(record, texts))),
                answers=(record["answer"],),
                fields={"question": question},
                groups={"category": record["document_category"]},
            )


def _documents(record: Record, texts: Mapping[str, zipfile.Path]) -> Iterator[str]:
    folder = f"lcr/{record['document_category']}/{record['document_set_id']}"
    for number, name in enumerate(record["data_source_filenames"].split(";"), 1):
        path = unicodedata.normalize("NFC", f"{folder}/{name.strip()}")
        if path not in texts:
            raise ConfigurationError(
                f"item {record['question_id']}: {ARCHIVE} has no {path}; download it again"
            )
        text = texts[path].read_text(encoding="utf-8")
        yield f"BEGIN DOCUMENT {number}:\n{text}\nEND DOCUMENT {number}"


@contextmanager
def _archive(folder: Path) -> Iterator[dict[str, zipfile.Path]]:
    """Open the archive in or under `folder`, and yield its texts by path."""
    places = [folder / each / ARCHIVE for each in FOLDERS]
    path = next((each for each in places if each.exists()), None)
    if path is None:
        raise ConfigurationError(f"AA-LCR: there is no {places[0]}, the archive with the texts")
    try:
        with zipfile.ZipFile(path) as archive:
            yield {_path(each): zipfile.Path(archive, each.filename) for each in archive.infolist()}
    except (OSError, zipfile.BadZipFile, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from error


def _path(entry: zipfile.ZipInfo) -> str:
    """Return an entry's path as the table writes it.

    The archive holds paths in UTF-8 without the flag that says so (bit 11), which `zipfile` then
    reads as CP437; and some have letters and accents apart.
    """
    path = entry.filename
    if not entry.flag_bits >> 11 & 1:
        with suppress(UnicodeError):
            path = path.encode("cp437").decode("utf-8")
    return unicodedata.normalize("NFC", path)

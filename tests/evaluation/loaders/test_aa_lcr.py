"""Two made-up questions on one set of three documents, in the official layout."""

from __future__ import annotations

import unicodedata
import zipfile
from pathlib import Path

import pytest

from evaluation.drivers.prompter import target_chat
from evaluation.loaders import load_items
from evaluation.tasks import load_task
from rapid.errors import ConfigurationError

HEADER = (
    ",document_category,document_set_id,question_id,question,answer,data_source_filenames,"
    "data_source_urls,input_tokens"
)
ROWS = (
    '0,Legal,le_bells,1,"Who rang, and when? ",Ada; at noon,b.txt;Café.txt,u;v,94',
    "1,Legal,le_bells,2,Who was last?,Bea,Café.txt;a.txt,w;u,95",
)
# The official archive has names in UTF-8 without saying so, some with letters and accents apart.
# `zipfile` writes no such name, so one of as many bytes is written and then changed.
STAND_IN = "Cafexx.txt"
NAME = unicodedata.normalize("NFD", "Café.txt")
TEXTS = {"a.txt": "Alarm.\n", "b.txt": "Bells.", STAND_IN: "Coffee, début."}

PROMPT = """\
BEGIN INPUT DOCUMENTS

BEGIN DOCUMENT 1:
Bells.
END DOCUMENT 1

BEGIN DOCUMENT 2:
Coffee, début.
END DOCUMENT 2

END INPUT DOCUMENTS

Answer the following question using the input documents provided above.

START QUESTION

Who rang, and when?

END QUESTION
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "AA-LCR_Dataset.csv").write_text("\n".join((HEADER, *ROWS)), encoding="utf-8")
    archive = tmp_path / "extracted_text" / "AA-LCR_extracted-text.zip"
    archive.parent.mkdir()
    with zipfile.ZipFile(archive, "w") as made:
        for name, text in TEXTS.items():
            made.writestr(f"lcr/Legal/le_bells/{name}", text)
    assert len(STAND_IN) == len(NAME.encode())
    archive.write_bytes(archive.read_bytes().replace(STAND_IN.encode(), NAME.encode()))
    return tmp_path


def test_items_in_the_official_format(folder):
    first, second = load_items(load_task("aa-lcr"), folder)
    assert (first.id, second.id) == ("1", "2")
    assert first.answers == ("Ada; at noon",)
    assert first.groups == {"category": "Legal"}
    assert second.document is not None
    assert second.document.text.startswith("BEGIN DOCUMENT 1:\nCoffee")


def test_the_target_is_asked_in_the_words_of_the_card_with_documents_in_the_order_of_the_table(
    folder,
):
    (item,) = load_items(load_task("aa-lcr"), folder, limit=1)
    (message,) = target_chat(load_task("aa-lcr"), item, item.document)
    assert (message.role, message.content) == ("user", PROMPT)


def test_the_archive_may_be_beside_the_table(folder):
    (folder / "extracted_text" / "AA-LCR_extracted-text.zip").rename(
        folder / "AA-LCR_extracted-text.zip"
    )
    assert len(load_items(load_task("aa-lcr"), folder / "AA-LCR_Dataset.csv")) == 2


def test_nothing_is_fetched():
    with pytest.raises(ConfigurationError, match="give their folder with --data"):
        load_items(load_task("aa-lcr"))


def test_a_table_without_its_archive_is_refused(folder):
    (folder / "extracted_text" / "AA-LCR_extracted-text.zip").unlink()
    with pytest.raises(ConfigurationError, match=r"there is no .*extracted_text.*\.zip"):
        load_items(load_task("aa-lcr"), folder)


def test_a_truncated_archive_is_refused(folder):
    archive = folder / "extracted_text" / "AA-LCR_extracted-text.zip"
    archive.write_bytes(archive.read_bytes()[:-40])
    with pytest.raises(ConfigurationError, match=r"extracted-text\.zip cannot be read"):
        load_items(load_task("aa-lcr"), folder)


def test_a_document_that_the_archive_lacks_is_named_with_its_item(folder):
    table = folder / "AA-LCR_Dataset.csv"
    table.write_text(table.read_text(encoding="utf-8").replace("a.txt", "z.txt"), encoding="utf-8")
    with pytest.raises(ConfigurationError, match=r"item 2: .* has no lcr/Legal/le_bells/z\.txt"):
        load_items(load_task("aa-lcr"), folder)


def test_a_column_that_is_missing_is_named(folder):
    table = folder / "AA-LCR_Dataset.csv"
    table.write_text(table.read_text(encoding="utf-8").replace("_filenames", ""), encoding="utf-8")
    with pytest.raises(ConfigurationError, match="item 1 has no data_source_filenames"):
        load_items(load_task("aa-lcr"), folder)

"""Questions about the documents of the task `real-text`."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import Field

from rapid.config import Frozen

FOLDER = Path(__file__).parent
Kind = Literal["one place", "several places", "paraphrase", "unanswerable"]


class TextQuestion(Frozen):
    """A question about one document.

    Attributes:
        id: Name of the document and a number: ``pathlib-3``.
        kind: `one place`: one passage has the answer, in words of the question. `several places`:
            the answer needs passages that are apart. `paraphrase`: question and evidence have no
            content word in common. `unanswerable`: the document does not say.
        answer: The parts that a right answer has, each as a tuple of spellings of which one is
            enough. Empty for an unanswerable question.
        evidence: Passages of the document, letter for letter but for white space, that together
            give the answer. Empty for an unanswerable question.
    """

    id: str = Field(pattern=r"^[a-z0-9-]+-\d+$")
    kind: Kind
    question: str = Field(min_length=8)
    answer: tuple[tuple[str, ...], ...]
    evidence: tuple[str, ...]

    @property
    def document(self) -> str:
        """The name of the document."""
        return self.id.rpartition("-")[0]


def document_names() -> list[str]:
    """Return the names of all documents, in order."""
    return sorted(path.stem for path in (FOLDER / "documents").glob("*.txt"))


@cache
def document_text(name: str) -> str:
    """Return the text of a document."""
    return (FOLDER / "documents" / f"{name}.txt").read_text(encoding="utf-8")


def questions_of(name: str) -> list[TextQuestion]:
    """Return the questions about a document.

    Raises:
        pydantic.ValidationError: A line is no question.
    """
    lines = (FOLDER / "questions" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [TextQuestion.model_validate_json(line) for line in lines if line.strip()]


def words(text: str) -> list[str]:
    """Return the words of `text`, letters and digits, in lower case."""
    return re.findall(r"[^\W_]+", text.lower())


def holds(text: str, part: str) -> bool:
    """Return whether `part` is in `text` as whole words, whatever stands between them."""
    sought = words(part)
    return bool(sought) and f" {' '.join(sought)} " in f" {' '.join(words(text))} "


def span_of(passage: str, text: str) -> tuple[int, int] | None:
    """Return where `passage` is in `text`, whatever the white space, or None."""
    found = re.search(r"\s+".join(map(re.escape, passage.split())), text)
    return found.span() if found else None

"""Questions about the documents of the task `real-text`, and the rules that each keeps.

    python -m evaluation.texts.text_questions [NAME ...]

prints what is wrong with the questions of these documents, or of all.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Literal, get_args

from pydantic import Field, ValidationError

from rapid.config import Frozen

FOLDER = Path(__file__).parent
Kind = Literal["one place", "several places", "paraphrase", "unanswerable"]
STEM = 5
"""Words that begin with the same letters, this many, count as one word."""
_NO_CONTENT = """
    a about after all also an and any are as at be been before but by can cannot could did do does
    each else for from get gets given gives had has have how i if in into is it its itself let may
    me might more most must my no not of off on one only or other our out over own same shall she
    should so some such than that the their them then there these they this those through to too two
    under until up upon us use used was way we were what when where whether which while who whom
    whose why will with within without would you your
"""
NO_CONTENT = frozenset(_NO_CONTENT.split())


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


def content_stems(text: str) -> set[str]:
    """Return the first letters of the words that carry meaning."""
    return {word[:STEM] for word in words(text) if len(word) > 2 and word not in NO_CONTENT}


def holds(text: str, part: str) -> bool:
    """Return whether `part` is in `text` as whole words, whatever stands between them."""
    sought = words(part)
    return bool(sought) and f" {' '.join(sought)} " in f" {' '.join(words(text))} "


def span_of(passage: str, text: str) -> tuple[int, int] | None:
    """Return where `passage` is in `text`, whatever the white space, or None."""
    found = re.search(r"\s+".join(map(re.escape, passage.split())), text)
    return found.span() if found else None


def faults(question: TextQuestion) -> Iterator[str]:
    """Yield what is wrong with a question, a sentence each."""
    text = document_text(question.document)
    for passage in question.evidence:
        if span_of(passage, text) is None:
            yield f"the evidence is not in the document: {passage!r}"
    evidence = "\n".join(question.evidence)
    if question.kind == "unanswerable":
        if question.answer or question.evidence:
            yield "an unanswerable question has neither answer nor evidence"
        return
    if not question.answer or not question.evidence:
        yield "an answer and its evidence are missing"
    for part in question.answer:
        if not any(holds(evidence, spelling) for spelling in part):
            yield f"no spelling of {part} is in the evidence"
        if any(holds(question.question, spelling) for spelling in part):
            yield f"the question gives {part} away"
        if any(len(words(spelling)) > 8 for spelling in part):
            yield f"{part} is longer than eight words"
    if question.kind == "several places" and len(question.evidence) < 2:
        yield "several places are two passages or more"
    if question.kind == "one place" and not content_stems(question.question) & content_stems(
        evidence
    ):
        yield "no content word of the question is in the evidence: it is a paraphrase"
    shared = content_stems(question.question) & content_stems(evidence)
    if question.kind == "paraphrase" and shared:
        yield f"question and evidence share {', '.join(sorted(shared))}"


def faults_of(name: str) -> Iterator[str]:
    """Yield what is wrong with the questions of a document."""
    try:
        questions = questions_of(name)
    except (OSError, ValidationError) as error:
        yield f"{name}: {error}"
        return
    seen: set[str] = set()
    for question in questions:
        if question.document != name or question.id in seen:
            yield f"{question.id}: the id is used twice, or names another document"
            continue
        seen.add(question.id)
        yield from (f"{question.id}: {fault}" for fault in faults(question))
    for kind in get_args(Kind):
        if not any(question.kind == kind for question in questions):
            yield f"{name}: there is no question of the kind {kind}"


def main(names: Sequence[str]) -> int:
    """Print the faults of the named documents' questions; return 1 if there are any."""
    found = [fault for name in names or document_names() for fault in faults_of(name)]
    sys.stdout.write("".join(f"{fault}\n" for fault in found) or "no faults\n")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

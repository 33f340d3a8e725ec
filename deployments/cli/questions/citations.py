"""Where an answer is from, as a person can look it up: passages by the lines of their files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from library.parsing import ParsedText
    from rapid.citing.copies import Claim

Json = dict[str, Any]
Documents = Mapping[str, "ParsedText | None"]
"""The documents of a question by their names; None for one whose text is not at hand."""

_SAYS_NO_FACT = frozenset({"yes"})  # "no" is a function word
_OWN_LINES = ("text/plain", "text/markdown")  # whose lines are those of the file


def origin(question: str, answer: str, receipt: Json, documents: Documents) -> str | None:
    """Return one line that says where an answer is from, or None if it has no documents.

    Passages in which its words do not stand were looked at, and do not support it. Where nothing
    was looked up, its words are looked for in the documents.
    """
    if not documents:
        return None
    if (warning := warn_of_nothing(receipt["reason"], [*documents])) is not None:
        return warning
    if chunks := receipt["chunks"]:
        stand = _find_standing(question, answer, receipt, documents)
        if stand is None:
            return f"looked in {'; '.join(_places(chunks, documents))}"
    else:
        chunks, stand = _find_copied(question, answer, documents)
        if not stand:
            is_asked_for = receipt["reason"] == "asked for"
            why = f"mode {receipt['mode']} looks nothing up" if is_asked_for else receipt["reason"]
            return f"no passages are named: {why}"
    places = "; ".join(_places(chunks, documents))
    if all(stand):
        return f"from {places}"
    if any(stand):
        return f"from {places}; not all of the answer's words stand there: check the answer"
    if receipt["chunks"]:
        return f"looked in {places}; the answer's words do not stand there: check the answer"
    return f"the answer does not stand word for word in {_join([*documents])}: check the answer"


def warn_of_nothing(reason: str, names: Sequence[str]) -> str | None:
    """Return the warning that documents of these names say nothing of the question, if they do.

    Args:
        reason: Why the answer has its mode, as its stream and its receipt say it.
        names: Of the documents; there may be none.
    """
    from rapid.answering.mode.decisions import SAYS_NOTHING

    if not names or not any(each in reason for each in SAYS_NOTHING):
        return None
    return f"nothing in {_join(names)} is about this question: check the answer"


def _join(names: Sequence[str]) -> str:
    return " or ".join(names) if len(names) < 3 else f"these {len(names)} documents"


def _find_standing(
    question: str, answer: str, receipt: Json, documents: Documents
) -> list[bool] | None:
    """Return of each statement whether most of its words stand in the passages.

    It is empty where the answer says nothing of its own, and None where a text is not at hand.
    """
    from rapid.citing.copies import CitingRule

    if not all(documents.get(chunk["document"]) for chunk in receipt["chunks"]):
        return None
    read = "\n".join(text for _, text in passages(receipt, documents))
    told = _find_told(question, answer)
    return [claim.share(read) >= CitingRule().least_overlap for claim in told]


def _find_copied(question: str, answer: str, documents: Documents) -> tuple[list[Json], list[bool]]:
    """Return where statements stand word for word, and of each whether most of its words do.

    That is what the API cites of such an answer, and here no server has to compute it. Both are
    empty where the answer says nothing of its own, or a text is not at hand.
    """
    from rapid.chat_messages import Document
    from rapid.citing.copies import CitingRule, find_copies

    texts = [Document(name, each.text) for name, each in documents.items() if each]
    if len(texts) < len(documents):
        return [], []
    rule, told = CitingRule(), _find_told(question, answer)
    find_copies(told, texts, (), rule)
    stand = [
        claim.share(" ".join(each.quote for each in claim.citations)) >= rule.least_overlap
        for claim in told
    ]
    found = [
        {"document": each.document, "start": each.document_start, "end": each.document_end}
        for claim in told
        for each in claim.citations
    ]
    return found, stand


def _find_told(question: str, answer: str) -> list[Claim]:
    """Return the statements of an answer that say something of their own."""
    from rapid.citing.copies import find_claims

    claims = find_claims(0, answer, question)
    return [each for each in claims if {word.text.casefold() for word in each.new} - _SAYS_NO_FACT]


def passages(receipt: Json, documents: Documents) -> Iterator[tuple[str, str]]:
    """Yield the place and the text of each passage that was read."""
    for chunk in receipt["chunks"]:
        (place,) = _places([chunk], documents)
        parsed = documents.get(chunk["document"])
        yield place, parsed.text[chunk["start"] : chunk["end"]].strip() if parsed else ""


def source_objects(receipt: Json, documents: Documents) -> list[Json]:
    """Return the passages as objects for programs: document, place, offsets, score and text."""
    return [
        {"place": place, "text": text} | chunk
        for chunk, (place, text) in zip(
            receipt["chunks"], passages(receipt, documents), strict=True
        )
    ]


def _places(chunks: Sequence[Json], documents: Documents) -> Iterator[str]:
    """Yield the name of each document that the chunks are of, with the lines of all of them."""
    for name in dict.fromkeys(chunk["document"] for chunk in chunks):
        own = [each for each in chunks if each["document"] == name]
        if place := _place(own, documents.get(name)):
            yield f"{name}, {place}"
        else:  # a part of the question
            yield name


def _place(chunks: Sequence[Json], parsed: ParsedText | None) -> str:
    unit = "page" if any("pages" in each for each in chunks) else "line"
    if kept := [each[f"{unit}s"] for each in chunks if f"{unit}s" in each]:  # the server knows it
        return _spans(unit, sorted((first, last) for first, last, *_ in kept))
    if parsed is None:
        return ""
    of = sorted(_trim(parsed.text, each["start"], each["end"]) for each in chunks)
    if parsed.layout.pages:
        return ", ".join(dict.fromkeys(_on_pages(parsed, *each) for each in of))
    if "\n" not in parsed.text.strip():
        return _spans("character", [(start + 1, end) for start, end in of])
    lines = [parsed.layout.locate(*each).lines for each in of]
    own = "" if parsed.media_type in _OWN_LINES else " of its text"
    return _spans("line", [(each[0], each[-1]) for each in lines]) + own


def _on_pages(parsed: ParsedText, start: int, end: int) -> str:
    """Return the pages of a slice, with the lines on its page where it is one."""
    found = parsed.layout.locate(start, end)
    pages, lines = found.pages, found.lines
    if len(pages) > 1:
        return f"pages {pages[0]}-{pages[-1]}"
    top = parsed.layout.pages[pages[0] - 1].start
    above = parsed.layout.locate(top, top).lines[0] - 1
    return f"page {pages[0]} {_spans('line', [(lines[0] - above, lines[-1] - above)])}"


def _trim(text: str, start: int, end: int) -> tuple[int, int]:
    """Return a slice without the space around it."""
    part = text[start:end]
    inner = part.strip()
    start += len(part) - len(part.lstrip())
    return (start, start + len(inner)) if inner else (start, start)


def _spans(unit: str, spans: Sequence[tuple[int, int]]) -> str:
    joined: list[tuple[int, int]] = []
    for first, last in spans:
        if joined and first <= joined[-1][1] + 1:
            joined[-1] = joined[-1][0], max(last, joined[-1][1])
        else:
            joined.append((first, last))
    numbers = [str(first) if first == last else f"{first}-{last}" for first, last in joined]
    is_one = len(joined) == 1 and joined[0][0] == joined[0][1]
    return f"{unit}{'' if is_one else 's'} {', '.join(numbers)}"

"""Where an answer is from, as a person can look it up: passages by the lines of their files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Json = dict[str, Any]


def origin(receipt: Json, documents: Sequence[Mapping[str, str]]) -> str | None:
    """Return one line that says where an answer is from, or None if it has no documents."""
    from rapid.answering.decisions import SAYS_NOTHING

    if not documents:
        return None
    names = [document["name"] for document in documents]
    if any(each in receipt["reason"] for each in SAYS_NOTHING):
        whose = " or ".join(names) if len(names) < 3 else f"these {len(names)} documents"
        return f"nothing in {whose} is about this question: check the answer"
    if receipt["chunks"]:
        return f"from {'; '.join(_places(receipt['chunks'], documents))}"
    is_asked_for = receipt["reason"] == "asked for"
    why = f"mode {receipt['mode']} looks nothing up" if is_asked_for else receipt["reason"]
    return f"no passages are named: {why}"


def passages(receipt: Json, documents: Sequence[Mapping[str, str]]) -> Iterator[tuple[str, str]]:
    """Yield the place and the text of each passage that was read."""
    texts = {document["name"]: document["text"] for document in documents}
    for chunk in receipt["chunks"]:
        (place,) = _places([chunk], documents)
        yield place, texts.get(chunk["document"], "")[chunk["start"] : chunk["end"]].strip()


def _places(chunks: Sequence[Json], documents: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """Yield the name of each document that the chunks are of, with the lines of all of them."""
    texts = {document["name"]: document["text"] for document in documents}
    for name in dict.fromkeys(chunk["document"] for chunk in chunks):
        of = sorted((each["start"], each["end"]) for each in chunks if each["document"] == name)
        text = texts.get(name, "")
        unit = "page" if any("pages" in each for each in chunks) else "line"
        kept = [each for each in chunks if each["document"] == name and f"{unit}s" in each]
        if kept:  # a file that the server keeps
            spans = sorted((each[f"{unit}s"][0], each[f"{unit}s"][1]) for each in kept)
            yield f"{name}, {_spans(unit, spans)}"
        elif not text:  # a part of the question
            yield name
        elif "\n" in text.strip():
            yield f"{name}, {_spans('line', [_lines(text, *each) for each in of])}"
        else:
            yield f"{name}, {_spans('character', [(start + 1, end) for start, end in of])}"


def _lines(text: str, start: int, end: int) -> tuple[int, int]:
    """Return the first and the last line, from 1, of a slice without the space around it."""
    part = text[start:end]
    start += len(part) - len(part.lstrip())
    end -= len(part) - len(part.rstrip())
    return 1 + text.count("\n", 0, start), 1 + text.count("\n", 0, max(start, end - 1))


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

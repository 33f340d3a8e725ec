"""The parts of documents that a target reads whose context is too short for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rapid.chat_messages import Document
from rapid.ports import Passage
from rapid.receipt import ReadPart


def join_passages(
    documents: Sequence[Document], passages: Sequence[Passage]
) -> tuple[tuple[Document, ...], tuple[ReadPart, ...]]:
    """Return the documents as far as their passages go, and which parts these are.

    Neighbours are one section, also where they share words. A blank line stands between sections,
    as in what a drafter reads. A document without a passage is left out.

    Args:
        documents: The whole documents, whose names are distinct.
        passages: Passages of them.
    """
    kept: list[Document] = []
    sections: list[ReadPart] = []
    for document in documents:
        own: list[ReadPart] = []
        for start, end in sorted((p.start, p.end) for p in passages if p.document == document.name):
            if own and start <= own[-1].end:
                start, end = own[-1].start, max(own.pop().end, end)
            own.append(ReadPart(document.name, start, end))
        if own:
            texts = [document.text[each.start : each.end].strip() for each in own]
            kept.append(Document(document.name, "\n\n".join(texts)))
            sections += own
    return tuple(kept), tuple(sections)


def drop_worst(
    passages: Sequence[Passage], num_tokens: int, count_tokens: Callable[[str], int]
) -> tuple[Passage, ...]:
    """Return the passages without the worst ones, which alone have `num_tokens` tokens or more."""
    dropped: set[str] = set()
    for each in sorted(passages, key=lambda each: each.score):
        if num_tokens <= 0:
            break
        dropped.add(each.id)
        left = [p for p in passages if p.document == each.document and p.id not in dropped]
        start = max([each.start, *(p.end for p in left if p.end < each.end)])
        end = min([each.end, *(p.start for p in left if p.end > each.end)])
        num_tokens -= count_tokens(each.text[start - each.start : max(0, end - each.start)])
    return tuple(each for each in passages if each.id not in dropped)

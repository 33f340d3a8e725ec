"""From a ranking to a context: each text once, within the budget, in the order of the documents."""

from __future__ import annotations

from collections.abc import Sequence

from retrieval.chunking import RetrievedChunk


def select(
    ranked: Sequence[RetrievedChunk], budget_tokens: int, document_ids: Sequence[str] = ()
) -> list[RetrievedChunk]:
    """Choose the chunks to show.

    Best first, each chunk that still fits is taken and one that does not is passed over, so that a
    long chunk does not keep shorter ones out. A text that was taken is not taken again.

    Args:
        ranked: Chunks above the floor; equal scores keep their order.
        budget_tokens: The most tokens in all, separators not counted.
        document_ids: The order in which the result should have the documents; others follow.

    Returns:
        The chosen chunks in document order.
    """
    chosen: list[RetrievedChunk] = []
    seen: set[str] = set()
    left = budget_tokens
    for chunk in sorted(ranked, key=lambda chunk: -chunk.score):
        text = " ".join(chunk.text.split())
        if chunk.num_tokens <= left and text not in seen:
            chosen.append(chunk)
            seen.add(text)
            left -= chunk.num_tokens
    place = {document_id: index for index, document_id in enumerate(document_ids)}
    return sorted(chosen, key=lambda c: (place.get(c.document_id, len(place)), c.start))

"""What was retrieved for a question on real text, retrieved again, with its cosines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from evaluation.drivers.prompter import Prompter, ShortContext
from evaluation.items import Item
from evaluation.tasks import Condition
from retrieval import Embedder, RetrievedChunk

# Whether all evidence of a question is among what was retrieved; None where the text has none.
EVIDENCE = {True: "found", False: "in part or not", None: "there is none"}


async def retrieved(
    item: Item, condition: Condition, prompter: Prompter, embedder: Embedder
) -> ShortContext:
    """Return what is retrieved for an item, with cosines of the texts that are shown."""
    found = await prompter.retrieve(item, condition)
    if condition.corruption != "unrelated":
        return found
    chunks = with_cosines(item.messages[-1].content, found.chunks, embedder)
    return replace(found, chunks=chunks)


def best_cosine(chunks: Sequence[RetrievedChunk]) -> float:
    return max(chunk.cosine or 0.0 for chunk in chunks)


def with_cosines(
    question: str, chunks: Sequence[RetrievedChunk], embedder: Embedder
) -> tuple[RetrievedChunk, ...]:
    """Return the chunks with the cosines of their own texts."""
    asked = embedder.embed_query(question).dense
    vectors = [each.dense for each in embedder.embed_passages([chunk.text for chunk in chunks])]
    return tuple(
        replace(chunk, cosine=float(vector @ asked))
        for chunk, vector in zip(chunks, vectors, strict=True)
    )

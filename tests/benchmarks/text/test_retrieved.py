"""`benchmarks/text/retrieved.py`: what is shown for another document has its own cosines."""

from __future__ import annotations

import numpy as np

from benchmarks.text import retrieved
from retrieval import Embedding, RetrievedChunk


def test_chunks_of_another_document_get_the_cosines_of_their_own_texts() -> None:
    chunk = RetrievedChunk("id", "book", 0, 4, "text", 1, score=0.9, cosine=0.9)

    class Told:
        def embed_query(self, text: str) -> Embedding:
            return Embedding(np.array([1.0, 0.0], dtype=np.float32), None)

        def embed_passages(self, texts: list[str]) -> list[Embedding]:
            return [Embedding(np.array([0.25, 0.5], dtype=np.float32), None) for _ in texts]

    (again,) = retrieved.with_cosines("a question", [chunk], Told())
    assert (again.cosine, again.text) == (0.25, "text")

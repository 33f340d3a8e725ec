"""What a retriever returns: the context of a question, and how long it took."""

from __future__ import annotations

from dataclasses import dataclass

from retrieval.chunking import RetrievedChunk, drop_shared


@dataclass(frozen=True, slots=True)
class RetrievalTimings:
    """Durations of the steps of a retrieval in milliseconds; `index_ms` is for new documents."""

    index_ms: float
    embed_ms: float
    search_ms: float


@dataclass(frozen=True, slots=True)
class RetrievedContext:
    """The context that retrieval found for a question.

    Attributes:
        chunks: The selected chunks, in document order; neighbours may share words.
        cleared_floor: Whether any chunk scored above the floor, even if it did not fit the budget.
        is_evidence: Whether the chunks have enough to do with the query to rely on them: by a
            configured floor if there is one, else by the embedder's own rule.
        document_ids: Ids of the searched documents.
    """

    chunks: tuple[RetrievedChunk, ...]
    cleared_floor: bool
    is_evidence: bool
    budget_tokens: int
    document_ids: tuple[str, ...]
    timings: RetrievalTimings

    @property
    def passages(self) -> tuple[RetrievedChunk, ...]:
        """The chunks without what stands in the ones before, so that nothing is read twice."""
        return tuple(drop_shared(self.chunks))

    @property
    def text(self) -> str:
        """The passages joined by blank lines."""
        return "\n\n".join(each.text.strip() for each in self.passages)

    @property
    def num_tokens(self) -> int:
        """The number of tokens of the passages, at most `budget_tokens`."""
        return sum(each.num_tokens for each in self.passages)

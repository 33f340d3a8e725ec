"""A `ChunkStore` in plain lines: what the real ones are held to."""

import math
from contextlib import asynccontextmanager
from dataclasses import asdict

from rapid.engine_status import Erasure
from retrieval.chunking import Chunk, RetrievedChunk
from retrieval.embeddings.embedding import Embedding, VectorSpace
from retrieval.stores.store import StoredDocument


class PlainChunkStore:
    def __init__(self, space: VectorSpace) -> None:
        self.space = space
        self.documents: dict[tuple[str, str], list[tuple[Chunk, Embedding]]] = {}
        self.stored: dict[tuple[str, str], StoredDocument] = {}

    outage = None

    @asynccontextmanager
    async def claim(self, tenant, document_id):
        yield self.stored.get((tenant, document_id))

    async def find_stored(self, tenant, document_ids):
        return {each for each in document_ids if (tenant, each) in self.stored}

    async def add(self, tenant, document_id, chunks, embeddings, num_tokens):
        self.documents[tenant, document_id] = list(zip(chunks, embeddings, strict=True))
        self.stored[tenant, document_id] = StoredDocument(len(chunks), num_tokens)
        return self.stored[tenant, document_id]

    async def list_chunks(self, tenant, document_id, first, count):
        return [chunk for chunk, _ in self.documents[tenant, document_id][first : first + count]]

    async def evict(self, tenant, document_id):
        await self.delete(tenant, document_id)

    async def delete(self, tenant, document_id):
        self.documents.pop((tenant, document_id), None)
        self.stored.pop((tenant, document_id), None)

    async def delete_text(self, tenant, text_id):
        num_bytes = sum(len(c.text) for chunks in self.documents.values() for c, _ in chunks)
        keys = [key for key in self.stored if key[0] == tenant and key[1].startswith(f"{text_id}-")]
        for key in keys:
            await self.delete(*key)
        return Erasure("passages", num_bytes, len(keys))

    async def close(self):
        self.documents.clear()
        self.stored.clear()

    async def search(self, tenant, document_ids, query, *, limit, floor):
        scope = [item for name in document_ids for item in self.documents.get((tenant, name), [])]
        by_words = self._by_words(scope, query)
        if query.dense is None:
            scores = {chunk: score for chunk, score in by_words.items() if score > floor}
        else:
            by_meaning = {chunk: float(e.dense @ query.dense) for chunk, e in scope}
            scores = {chunk: score for chunk, score in by_meaning.items() if score > floor}
            if query.sparse is not None and query.sparse.terms:
                words = {chunk: score for chunk, score in by_words.items() if chunk in scores}
                weight = self.space.sparse_weight
                if weight is None:
                    scores = reciprocal_ranks(scores, words)
                else:
                    scores = {c: score + weight * words.get(c, 0) for c, score in scores.items()}
        cosines = {} if query.dense is None else by_meaning
        order = {chunk: place for place, (chunk, _) in enumerate(scope)}
        best = sorted(scores, key=lambda chunk: (-round(scores[chunk], 9), order[chunk]))[:limit]
        return [RetrievedChunk(**asdict(c), score=scores[c], cosine=cosines.get(c)) for c in best]

    def _by_words(self, scope, query):
        """Dot products over shared terms; a chunk without one has no score."""
        if query.sparse is None:
            return {}
        weights = dict(zip(query.sparse.terms, query.sparse.weights, strict=True))
        bags = {c: dict(zip(e.sparse.terms, e.sparse.weights, strict=True)) for c, e in scope}
        if self.space.idf:
            n = sum(bool(bag) for bag in bags.values())
            for term in weights:
                df = sum(term in bag for bag in bags.values())
                weights[term] *= math.log((n - df + 0.5) / (df + 0.5) + 1)
        return {
            chunk: sum(weights[term] * bag[term] for term in weights.keys() & bag.keys())
            for chunk, bag in bags.items()
            if weights.keys() & bag.keys()
        }


def reciprocal_ranks(*rankings):
    fused: dict[Chunk, float] = {}
    for scores in rankings:
        for rank, chunk in enumerate(sorted(scores, key=lambda chunk: -round(scores[chunk], 6))):
            fused[chunk] = fused.get(chunk, 0.0) + 1 / (60 + rank)
    return fused

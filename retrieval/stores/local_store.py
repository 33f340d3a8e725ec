"""The chunk store inside the process: exact products over the vectors of the documents searched."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from rapid.engine_status import Erasure
from rapid.threads import Threads
from retrieval.chunking import Chunk, RetrievedChunk
from retrieval.embeddings.embedding import Embedding, SparseVector, VectorSpace, check_space
from retrieval.ranking import NOT_FOUND, fuse, rank
from retrieval.settings import LocalStoreConfig
from retrieval.stores.document_files import DocumentFiles, DocumentKey
from retrieval.stores.store import StoredDocument, is_of_text

_SEARCHES_AT_ONCE = 2  # in the tenants' turns: each has a core for as long as it runs
_CHUNK_FIELDS = tuple(field.name for field in fields(Chunk))

Result = TypeVar("Result")


class LocalChunkStore:
    """A `ChunkStore` of one retriever, in memory; with files, its documents outlive the process.

    A document's vectors are arrays of their own, so a search reads no document but those it is
    about. Arrays are built, searched, written and read in threads.
    """

    outage = None

    def __init__(self, space: VectorSpace, files: DocumentFiles | None = None) -> None:
        self._space = space
        self._files = files
        self._documents: dict[DocumentKey, _Vectors] = {}
        self._searches = Threads(_SEARCHES_AT_ONCE, "searches")
        # One thread, so that a file is removed after it is written, though nobody waits for that.
        self._filing = ThreadPoolExecutor(1, thread_name_prefix="chunks")

    @classmethod
    def open(cls, config: LocalStoreConfig, space: VectorSpace, index: str) -> Self:
        """Open the store, and its folder if it has one.

        Args:
            index: The name of everything beside a text that decides its chunks and vectors.

        Raises:
            StoreUnavailable: See `DocumentFiles`.
        """
        if config.folder is None:
            return cls(space)
        of = f"{index}-{space.dense_size or 0}"  # a model may change where its name does not
        return cls(space, DocumentFiles(Path(config.folder), of, config.ttl_s))

    @property
    def num_chunks(self) -> int:
        """The number of chunks that take memory."""
        return sum(len(each.chunks) for each in self._documents.values())

    @asynccontextmanager
    async def claim(self, tenant: str, document_id: str) -> AsyncIterator[StoredDocument | None]:
        """Enter with the document if it is stored; see `ChunkStore.claim`."""
        key = tenant, document_id
        if key not in self._documents:
            arrays = await self._file(lambda files: files.read(key))
            if arrays is not None:
                self._documents[key] = await asyncio.to_thread(_Vectors.from_arrays, arrays)
        held = self._documents.get(key)
        try:
            yield held.stored if held else None
        except BaseException:
            await self.delete(tenant, document_id)
            raise

    async def find_stored(self, tenant: str, document_ids: Collection[str]) -> set[str]:
        """Return the documents that are in memory or have files."""
        found = {each for each in document_ids if (tenant, each) in self._documents}
        rest = set(document_ids) - found
        filed = await self._file(lambda files: {each for each in rest if files.has((tenant, each))})
        return found | (filed or set())

    async def add(
        self,
        tenant: str,
        document_id: str,
        chunks: Sequence[Chunk],
        embeddings: Sequence[Embedding],
        num_tokens: int,
    ) -> StoredDocument:
        """Add a document, in place of what was stored under its id; see `ChunkStore.add`."""
        held = await asyncio.to_thread(
            _Vectors.of, chunks, embeddings, num_tokens, space=self._space
        )
        key = tenant, document_id
        await self._file(lambda files: files.write(key, held.to_arrays()))
        self._documents[key] = held
        return held.stored

    async def search(
        self,
        tenant: str,
        document_ids: Sequence[str],
        query: Embedding,
        *,
        limit: int,
        floor: float,
    ) -> list[RetrievedChunk]:
        """Search as `ChunkStore.search` specifies; nothing is ever missing."""
        documents = {
            (tenant, each): self._documents[tenant, each]
            for each in document_ids
            if (tenant, each) in self._documents
        }

        def find() -> list[RetrievedChunk]:
            if self._files:
                self._files.use(documents)
            return self._search([*documents.values()], query, limit, floor)

        return await self._searches.run(tenant, find)

    async def list_chunks(
        self, tenant: str, document_id: str, first: int, count: int
    ) -> list[Chunk]:
        """Return chunks of a document; nothing is ever missing. See `ChunkStore.list_chunks`."""
        return [*self._documents[tenant, document_id].chunks[first : first + count]]

    def _search(
        self, documents: Sequence[_Vectors], query: Embedding, limit: int, floor: float
    ) -> list[RetrievedChunk]:
        ends = np.cumsum([len(each.chunks) for each in documents], dtype=np.intp)
        cosines: NDArray[np.float64] | None = None
        if not documents or not ends[-1]:
            return []
        if query.dense is not None:
            dense = [each.dense @ query.dense for each in documents if each.dense is not None]
            cosines = np.concatenate(dense).astype(np.float64)
            best = rank(np.where(cosines >= floor, cosines, NOT_FOUND))
            if query.sparse is not None and query.sparse.terms:
                by_words = rank(self._by_words(documents, query.sparse, ends))
                best = fuse(best, by_words, int(ends[-1]), self._space.sparse_weight, limit)
        else:
            assert query.sparse is not None
            scores = self._by_words(documents, query.sparse, ends)
            best = rank(np.where(scores >= floor, scores, NOT_FOUND), limit)
        found = []
        for place, score in zip(best.places[:limit], best.scores[:limit], strict=True):
            at = ends.searchsorted(place, "right")
            chunk = documents[at].chunks[place - ends[at]]  # counted from its document's end
            cosine = None if cosines is None else float(cosines[place])
            found.append(RetrievedChunk(**asdict(chunk), score=float(score), cosine=cosine))
        return found

    def _by_words(
        self, documents: Sequence[_Vectors], query: SparseVector, ends: NDArray[np.intp]
    ) -> NDArray[np.float64]:
        """Return the products of term weights, of chunks that share a term with the query.

        Args:
            documents: The documents.
            query: The weights of the query's terms.
            ends: The number of chunks of all documents to each one's end.
        """
        numbers = np.array(query.terms, np.uint32)
        indexes = [each.terms for each in documents]
        firsts = np.array([each.terms.searchsorted(numbers, "left") for each in indexes])
        lasts = np.array([each.terms.searchsorted(numbers, "right") for each in indexes])
        lengths = lasts - firsts  # [documents, terms]
        idf = np.ones(len(numbers))
        if self._space.idf:  # counted over these documents, by Qdrant's formula
            total, counts = sum(each.num_rows for each in indexes), lengths.sum(axis=0)
            idf = np.log((total - counts + 0.5) / (counts + 0.5) + 1)
        which, term = np.nonzero(lengths)
        num_chunks = int(ends[-1])
        if not len(which):
            return np.full(num_chunks, NOT_FOUND)
        # All weights of a document are taken at once, by their places in its arrays: a slice for
        # each term would be most of the time.
        own = lengths.sum(axis=1)
        lengths = lengths[which, term]
        starts = firsts[which, term] - np.cumsum(lengths) + lengths
        places = np.split(
            np.arange(lengths.sum()) + np.repeat(starts, lengths), np.cumsum(own)[:-1]
        )
        taken = [*zip(indexes, places, strict=True)]
        rows = np.concatenate([each.rows[at] for each, at in taken])
        rows = rows + np.repeat(np.concatenate([[0], ends[:-1]]), own)
        weights = np.concatenate([each.weights[at] for each, at in taken])
        parts = weights * np.repeat((idf * query.weights)[term], lengths)
        sums = np.bincount(rows, weights=parts, minlength=num_chunks)
        return np.where(np.bincount(rows, minlength=num_chunks) > 0, sums, NOT_FOUND)

    async def evict(self, tenant: str, document_id: str) -> None:
        """Free a document's memory; its file stays."""
        self._documents.pop((tenant, document_id), None)

    async def delete(self, tenant: str, document_id: str) -> None:
        """Delete a document; see `ChunkStore.delete`."""
        key = tenant, document_id
        self._documents.pop(key, None)
        await self._file(lambda files: files.remove(key))

    async def delete_text(self, tenant: str, text_id: str) -> Erasure:
        """Delete all documents of a text, in memory and in files; see `ChunkStore.delete_text`."""
        in_memory = sum(each.num_bytes for each in self._documents.values())
        keys = [key for key in self._documents if is_of_text(key, tenant, text_id)]
        for key in keys:
            del self._documents[key]
        removed = await self._file(lambda files: files.remove_text((tenant, text_id)))
        num_removed, in_files = removed or (0, 0)
        return Erasure("passages", in_memory + in_files, max(num_removed, len(keys)))

    async def close(self) -> None:
        """Free the memory of all documents, and let another process have their files."""
        self._documents.clear()
        await asyncio.to_thread(self._searches.close)
        await asyncio.to_thread(self._filing.shutdown)
        if self._files:
            self._files.close()

    async def _file(self, call: Callable[[DocumentFiles], Result]) -> Result | None:
        """Call something with the files, in their thread; return None where there are none."""
        if self._files is None:
            return None
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._filing, call, self._files)


@dataclass(frozen=True, slots=True)
class _TermIndex:
    """The term weights of a document's chunks, sorted by term; each with its chunk in `rows`."""

    terms: NDArray[np.uint32]
    rows: NDArray[np.int32]
    weights: NDArray[np.float32]
    num_rows: int

    @classmethod
    def of(cls, vectors: Sequence[SparseVector]) -> Self:
        """Make an index by term of the vectors of chunks, which are numbered in this order."""
        lengths = [len(each.terms) for each in vectors]
        terms = np.fromiter((t for each in vectors for t in each.terms), np.uint32, sum(lengths))
        weights = np.fromiter((w for v in vectors for w in v.weights), np.float32, sum(lengths))
        rows = np.repeat(np.arange(len(vectors), dtype=np.int32), lengths)
        order = np.argsort(terms, kind="stable")
        return cls(terms[order], rows[order], weights[order], sum(map(bool, lengths)))


@dataclass(frozen=True, slots=True)
class _Vectors:
    """A document in memory.

    Attributes:
        dense: Vectors of unit length [chunks, dense_size]; None where the space has none.
    """

    chunks: tuple[Chunk, ...]
    dense: NDArray[np.float32] | None
    terms: _TermIndex
    stored: StoredDocument

    @classmethod
    def of(
        cls,
        chunks: Sequence[Chunk],
        embeddings: Sequence[Embedding],
        num_tokens: int,
        *,
        space: VectorSpace,
    ) -> Self:
        """Build the arrays of a document.

        Raises:
            CollectionMismatch: A vector is not of the space.
        """
        for each in embeddings:
            check_space(each, space, "the local store")
        dense = None
        if space.dense_size is not None:
            rows = [each.dense for each in embeddings if each.dense is not None]
            dense = np.array(rows, dtype=np.float32).reshape(len(rows), space.dense_size)
        nothing = SparseVector((), ())
        return cls(
            tuple(chunks),
            dense,
            _TermIndex.of([each.sparse or nothing for each in embeddings]),
            StoredDocument(len(chunks), num_tokens),
        )

    @property
    def num_bytes(self) -> int:
        """The bytes that its texts and vectors take."""
        arrays = self.terms.terms, self.terms.rows, self.terms.weights
        num_bytes = sum(map(sys.getsizeof, (each.text for each in self.chunks)))
        num_bytes += sum(each.nbytes for each in arrays)
        return num_bytes + (0 if self.dense is None else self.dense.nbytes)

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Return the content of the document's file."""
        about = {
            "chunks": {
                name: [getattr(each, name) for each in self.chunks] for name in _CHUNK_FIELDS
            },
            "num_tokens": self.stored.num_tokens,
            "num_rows": self.terms.num_rows,
        }
        terms = {name: getattr(self.terms, name) for name in ("terms", "rows", "weights")}
        dense = {} if self.dense is None else {"dense": self.dense}
        return {"about": np.frombuffer(json.dumps(about).encode(), np.uint8)} | terms | dense

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> Self:
        """Return the document of a file with this content."""
        about = json.loads(arrays["about"].tobytes())
        columns = about["chunks"]  # files from before there were overlaps lack `first_token`
        rows = zip(*columns.values(), strict=True)
        chunks = tuple(Chunk(**dict(zip(columns, row, strict=True))) for row in rows)
        terms = {name: arrays[name] for name in ("terms", "rows", "weights")}
        return cls(
            chunks,
            arrays.get("dense"),
            _TermIndex(**terms, num_rows=about["num_rows"]),
            StoredDocument(len(chunks), about["num_tokens"]),
        )

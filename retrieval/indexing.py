"""Documents on their way into the store: cut and embedded a few passages at a time."""

from __future__ import annotations

import asyncio
import hashlib
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from rapid.chat_messages import Document, DocumentRef
from rapid.documents import name_text
from rapid.errors import RetrievalPending
from rapid.events import Reading, Tell
from retrieval.chunking import Chunk, TokenOffsets, chunk_text, drop_shared
from retrieval.embeddings.embedding import Embedder, Embedding
from retrieval.retrieval_errors import EmbedderFailed
from retrieval.settings import RetrievalConfig
from retrieval.stores.store import StoredDocument

_PASSAGES_AT_ONCE = 16  # between two turns of tenants: one forward pass of either model
_TELL_S = 1.0  # between two reports of how many passages are embedded


class Passages:
    """The passages of one document, of which every step embeds some more; what is embedded stays.

    Attributes:
        num_tokens: The length of the document in tokens, once it is cut.
        chunks: The passages, once it is cut.
        embeddings: The vectors of the first of them.
    """

    def __init__(self, document_id: str, document: Document) -> None:
        self.num_tokens = 0
        self.chunks: list[Chunk] = []
        self.embeddings: list[Embedding] = []
        self._document_id = document_id
        self._document: Document | None = document  # until it is cut
        self._rest: Iterator[Embedding] = iter(())
        self._lock = threading.Lock()  # a step that was given up may run still

    @property
    def is_advancing(self) -> bool:
        """Whether a step runs in a thread, perhaps one whose caller has left."""
        return self._lock.locked()

    @property
    def num_bytes(self) -> int:
        """The bytes that its text takes."""
        whole = self._document
        texts = [whole.text] if whole else [each.text for each in self.chunks]
        return sum(map(sys.getsizeof, texts))

    def advance(
        self, config: RetrievalConfig, embedder: Embedder, token_offsets: TokenOffsets
    ) -> bool:
        """Cut the document if it is whole, and embed some passages; return whether any are left.

        This blocks, so it runs in a thread.

        Raises:
            EmbedderFailed: The embedding model raised.
        """
        with self._lock:
            if self._document is not None:
                self._cut(self._document, config, embedder, token_offsets)
            if taken := list(islice(self._rest, _PASSAGES_AT_ONCE)):
                self.embeddings.extend(taken)
            elif len(self.embeddings) < len(self.chunks):
                raise EmbedderFailed(
                    f"the embedder gave {len(self.embeddings)} vectors of {len(self.chunks)} "
                    "passages"
                )
            return len(self.embeddings) < len(self.chunks)

    def findable(self) -> tuple[list[Chunk], list[Embedding]]:
        """Return the passages that a search can find, numbered without gaps, and their vectors.

        A text without words may have none.
        """
        pairs = [
            (chunk, each)
            for chunk, each in zip(self.chunks, self.embeddings, strict=True)
            if each.dense is not None or (each.sparse is not None and each.sparse.terms)
        ]
        numbered = (replace(c, id=f"{self._document_id}:{n}") for n, (c, _) in enumerate(pairs))
        return list(numbered), [each for _, each in pairs]

    def _cut(
        self,
        document: Document,
        config: RetrievalConfig,
        embedder: Embedder,
        token_offsets: TokenOffsets,
    ) -> None:
        chunks = cut_document(document, config, token_offsets, self._document_id)
        new = drop_shared(chunks)
        self.num_tokens = sum(chunk.num_tokens for chunk in new)
        self.chunks = [c for c, own in zip(chunks, new, strict=True) if own.text.strip()]
        self._rest = iter(embedder.embed_passages([chunk.text for chunk in self.chunks]))
        self._document = None


def cut_document(
    document: Document,
    config: RetrievalConfig,
    token_offsets: TokenOffsets,
    document_id: str = "document",
) -> list[Chunk]:
    """Return all passages of a document, cut as it says or else as the settings do."""
    own = document.chunk_sizes
    return chunk_text(
        document.text,
        token_offsets,
        max_tokens=own.tokens if own else config.chunk_tokens,
        max_chars=None if own else config.max_chunk_chars,
        overlap=own.overlap if own else 0,
        document_id=document_id,
        name=document.name,
    )


@dataclass(slots=True)
class Entry:
    """A document that is stored, or being indexed, or was when those who asked for it left.

    Attributes:
        passages: What is embedded so far; None once it is stored.
        indexing: The task that finds it in the store, or cuts, embeds and stores it.
        stored: What the store holds, once it is indexed.
        users: Requests that use it now; it is not evicted before they are done.
    """

    passages: Passages | None
    indexing: asyncio.Task[None]
    stored: StoredDocument | None = None
    users: int = 0

    @property
    def is_given_up(self) -> bool:
        """Whether it is not stored and nothing is being done about that."""
        ended = self.indexing.done() or self.indexing.cancelling() > 0
        return self.stored is None and ended

    @property
    def num_embedded(self) -> int:
        """The number of its chunks that have vectors."""
        if self.stored is not None:
            return self.stored.num_chunks
        return len(self.passages.embeddings) if self.passages else 0

    @property
    def has_begun(self) -> bool:
        """Whether any of its chunks has a vector, or is being given one."""
        return bool(self.num_embedded or (self.passages and self.passages.is_advancing))

    @property
    def num_chunks(self) -> int:
        """The number of its chunks, as far as they are known."""
        if self.stored is not None:
            return self.stored.num_chunks
        return len(self.passages.chunks) if self.passages else 0


async def wait_for(entries: Sequence[Entry], wait_s: float | None, tell: Tell | None) -> None:
    """Wait until documents are indexed, and say every second how far that is.

    Raises:
        RetrievalPending: It takes longer than `wait_s` seconds.
    """
    waiting = {entry.indexing for entry in entries if entry.stored is None}
    try:
        async with asyncio.timeout(wait_s):
            while waiting:
                # It leaves the tasks alone when it is cancelled: others may wait for them.
                done, waiting = await asyncio.wait(waiting, timeout=_TELL_S)
                for task in done:
                    task.result()
                if waiting and tell is not None:
                    num_done = sum(entry.num_embedded for entry in entries)
                    tell(Reading(num_done, sum(e.num_chunks for e in entries), "passages"))
    except TimeoutError:
        raise RetrievalPending("The documents are still being indexed; ask again.") from None


def key_of(tenant: str, document: DocumentRef) -> tuple[str, str]:
    """Return the tenant and the id of a document, which begins with that of its text."""
    cut: tuple[int, ...] = ()
    if (own := document.chunk_sizes) is not None:
        cut = (own.tokens, own.overlap) if own.overlap else (own.tokens,)
    text_id = text_id_of(name_text(tenant, document.digest))
    return tenant, f"{text_id}-{_hash(document.name, *map(str, cut))}"


def text_id_of(name: str) -> str:
    """Return what the ids of all documents with a text of this name begin with, before a dash."""
    return f"doc-{name}"


def _hash(*parts: str) -> str:
    digest = hashlib.blake2b(digest_size=12)
    for part in parts:
        encoded = part.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "big") + encoded)
    return digest.hexdigest()

"""The texts of stored files, for requests that name them instead of carrying them."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from sqlalchemy import Row, select

from library.files.attribute_filters import AttributeFilter, Combination
from library.files.stored_files import StoredFiles, layout_of, text_of
from library.files.vector_stores import VectorStores
from library.parsing import Layout
from library.storage.blobs import Blobs
from library.storage.database import Database
from library.storage.schema import FileRow, StoreFileRow
from rapid.chat_messages import ChunkSizes, Document, DocumentRef
from rapid.documents import name_text
from rapid.engine_status import Erasure
from rapid.errors import BadRequest, DocumentNotReady, UnknownDocument

_KEPT_CHARS = 64 * 2**20  # of texts that were asked for last, in one process


@dataclass(frozen=True, slots=True)
class StoredText:
    """A file that has been read.

    Attributes:
        ref: The reference to its text, cut as its vector store says where it is of one.
        attributes: Those of the file in the store.
    """

    file_id: str
    ref: DocumentRef
    attributes: Mapping[str, Any] = field(default_factory=dict)


class StoredDocuments:
    """A `rapid.ports.DocumentResolver` of stored files, and of texts that requests carry."""

    def __init__(
        self, database: Database, blobs: Blobs, files: StoredFiles, stores: VectorStores
    ) -> None:
        self._database, self._blobs = database, blobs
        self._files, self._stores = files, stores
        self._texts = OrderedDict[tuple[str, str], str]()  # by tenant and digest
        self._users = Counter[tuple[str, str]]()  # requests that have a text
        self._lock = threading.Lock()  # of both: `forget` comes on another thread

    async def find(
        self,
        tenant: str,
        file_ids: Sequence[str] = (),
        store_ids: Sequence[str] = (),
        filters: AttributeFilter | None = None,
        taken: Collection[str] = (),
    ) -> tuple[StoredText, ...]:
        """Return the texts that a request names: of files, and of those in stores.

        Their names are distinct: of those that share one, the later ones get numbers.

        Args:
            tenant: The owner.
            file_ids: Ids of files.
            store_ids: Ids of vector stores, whose files are meant.
            filters: What the attributes of a store's file must be; None takes all.
            taken: Names that other documents of the request have.

        Raises:
            UnknownDocument: A file or store is not the tenant's.
            DocumentNotReady: A file is not read, or not indexed, or cannot be.
        """
        rows = [await self._files.get(tenant, each) for each in file_ids]
        found = {row.id: StoredText(row.id, ref_of(row)) for row in rows}
        for store_id in store_ids:
            for each in await self.find_in_store(tenant, store_id, filters):
                found.setdefault(each.file_id, each)
        return _with_distinct_names(found.values(), taken)

    async def find_in_store(
        self, tenant: str, store_id: str, filters: AttributeFilter | None = None
    ) -> list[StoredText]:
        """Return the texts of a vector store that are indexed, in the order in which they came.

        Args:
            tenant: The owner.
            store_id: The store.
            filters: What a file's attributes must be; None takes all.

        Raises:
            UnknownDocument: The store is not the tenant's.
            BadRequest: The filter looks at an attribute that no file has.
            DocumentNotReady: A file is not indexed yet.
        """
        await self._stores.note_use(await self._stores.get(tenant, store_id))
        entries = await self._entries(store_id)
        if filters is not None:
            known = {key for each in entries for key in each.attributes}
            if entries and (unknown := keys_of(filters) - known):
                raise BadRequest(
                    f"filters: no file of {store_id!r} has an attribute {min(unknown)!r}; they "
                    f"have {sorted(known)}.",
                    "filters",
                )
            entries = [each for each in entries if filters.holds(each.attributes)]
        for each in entries:
            if each.status == "in_progress":
                raise DocumentNotReady(
                    f"{each.filename!r} ({each.id}) of {store_id!r} is still being indexed: ask "
                    "again when its status is 'completed'.",
                    "vector_store_ids",
                )
        return [
            StoredText(
                each.id,
                DocumentRef(
                    each.filename,
                    each.digest,
                    each.num_chars,
                    chunk_sizes=sizes_of(each.chunking),
                ),
                each.attributes,
            )
            for each in entries
            if each.status == "completed"
        ]

    async def get_in_store(self, tenant: str, store_id: str, file_id: str) -> StoredText:
        """Return one text of a vector store.

        Raises:
            UnknownDocument: The store is not the tenant's, or has no such file.
            DocumentNotReady: The file is not indexed, or cannot be.
        """
        entry = await self._stores.get_file(tenant, store_id, file_id)
        row = await self._files.get(tenant, file_id)
        if entry.status == "completed":
            ref = replace(ref_of(row), chunk_sizes=sizes_of(entry.chunking))
            return StoredText(row.id, ref, entry.attributes)
        ref_of(row)  # which raises if the file cannot be read
        raise DocumentNotReady(f"{row.filename!r} ({row.id}) is {entry.status}.", "file_id")

    async def _entries(self, store_id: str) -> Sequence[Row[Any]]:
        """Return what is needed of a store's files; whole rows would take ten times as long."""
        file, entry = FileRow, StoreFileRow
        both = (
            select(file.id, file.filename, file.digest, file.num_chars)
            .add_columns(entry.status, entry.attributes, entry.chunking)
            .join(StoreFileRow, StoreFileRow.file_id == FileRow.id)
            .where(StoreFileRow.store_id == store_id, FileRow.status != "deleting")
            .order_by(StoreFileRow.created, FileRow.id)
        )
        async with self._database.read() as session:
            return (await session.execute(both)).all()

    async def layout(self, file_id: str) -> Layout:
        """Return the pages and lines of a file's text.

        Raises:
            UnknownDocument: It was deleted meanwhile.
        """
        try:
            return Layout.from_bytes(await self._blobs.read(layout_of(file_id)))
        except FileNotFoundError:
            raise UnknownDocument(f"There is no file {file_id!r} any more.", "file_id") from None

    async def resolve(self, tenant: str, documents: Sequence[DocumentRef]) -> tuple[Document, ...]:
        """Return documents with their texts; see `rapid.ports.DocumentResolver`."""
        return tuple([await self._resolve(tenant, each) for each in documents])

    async def _resolve(self, tenant: str, document: DocumentRef) -> Document:
        if isinstance(document, Document):
            return document
        key = tenant, document.digest
        with self.hold(tenant, [document]):
            if (text := self._texts.get(key)) is None:
                text = await self._read(tenant, document)
            with self._lock:
                self._texts[key] = text
                self._texts.move_to_end(key)
                while len(self._texts) > 1 and sum(map(len, self._texts.values())) > _KEPT_CHARS:
                    self._texts.popitem(last=False)
        return Document(document.name, text, chunk_sizes=document.chunk_sizes)

    async def _read(self, tenant: str, document: DocumentRef) -> str:
        same = select(FileRow.id).where(
            FileRow.tenant == tenant,
            FileRow.digest == document.digest,
            FileRow.status == "processed",
        )
        async with self._database.read() as session:
            file_ids = (await session.scalars(same)).all()
        for file_id in file_ids:
            try:
                return (await self._blobs.read(text_of(file_id))).decode()
            except FileNotFoundError:  # it was deleted just now
                continue
        raise UnknownDocument(f"There is no document {document.name!r} any more.", "documents")

    @contextmanager
    def hold(self, tenant: str, documents: Iterable[DocumentRef]) -> Iterator[None]:
        """Keep texts of documents while the context lasts, also if they are deleted meanwhile."""
        keys = [(tenant, each.digest) for each in documents]
        with self._lock:
            self._users.update(keys)
        try:
            yield
        finally:
            with self._lock:
                self._users.subtract(keys)
                self._users += Counter()  # drops those that nobody has

    def forget(self, name: str) -> Erasure:
        """Drop a text that is kept in this process, unless a request has it; on any thread.

        `name` is that of the text (`rapid.documents.name_text`).
        """
        with self._lock:
            num_bytes = sum(map(len, self._texts.values()))
            if any(name_text(*key) == name for key in self._users):
                return Erasure("texts", num_bytes, 0, "in use")
            keys = [key for key in self._texts if name_text(*key) == name]
            for key in keys:
                del self._texts[key]
            return Erasure("texts", num_bytes, len(keys))


def ref_of(row: FileRow) -> DocumentRef:
    """Return the reference to a file's text.

    Raises:
        DocumentNotReady: The file has not been read yet, or cannot be.
    """
    if row.status == "error":
        raise DocumentNotReady(
            f"{row.filename!r} ({row.id}) could not be read: {row.error_message}",
            "file_id",
            row.error_code,
        )
    if row.digest is None or row.num_chars is None:
        raise DocumentNotReady(
            f"{row.filename!r} ({row.id}) is still being read: ask again when its status is "
            "'processed'.",
            "file_id",
        )
    return DocumentRef(row.filename, row.digest, row.num_chars)


def _with_distinct_names(
    texts: Iterable[StoredText], taken: Collection[str]
) -> tuple[StoredText, ...]:
    names, found = set(taken), []
    for each in texts:
        name, number = each.ref.name, 1
        while name in names:
            number += 1
            name = f"{each.ref.name} ({number})"
        names.add(name)
        found.append(replace(each, ref=replace(each.ref, name=name)))
    return tuple(found)


def sizes_of(chunking: Mapping[str, Any]) -> ChunkSizes | None:
    """Return the lengths of passages by a chunking strategy; None for the retriever's own."""
    static = chunking.get("static")
    if static is None:
        return None
    return _sizes(static["max_chunk_size_tokens"], static["chunk_overlap_tokens"])


@lru_cache(16)  # one object for all files of a store halves the time to send their references
def _sizes(tokens: int, overlap: int) -> ChunkSizes:
    return ChunkSizes(tokens, overlap)


def keys_of(filters: AttributeFilter) -> set[str]:
    """Return the attributes that a filter looks at."""
    if isinstance(filters, Combination):
        return {key for each in filters.filters for key in keys_of(each)}
    return {filters.key}

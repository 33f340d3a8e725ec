"""Vector stores: named sets of a tenant's files that are searched together."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from sqlalchemy import delete, func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from library.jobs import Jobs
from library.storage.database import Database
from library.storage.listing import Cut, Page, list_page
from library.storage.schema import FileBatchRow, FileRow, StoreFileRow, VectorStoreRow
from rapid.errors import BadRequest, LibraryUnavailable, UnknownDocument

_DAY_S = 86400  # seconds in a day
_NOTED_S = 3600  # between two notes that a store is asked, each of which costs milliseconds
AUTO: dict[str, Any] = {"type": "auto"}


class VectorStores:
    """The vector stores in a database."""

    def __init__(
        self, database: Database, jobs: Jobs, clock_ns: Callable[[], int] = time.time_ns
    ) -> None:
        self._database, self._jobs = database, jobs
        self._clock_ns = clock_ns

    async def create(
        self,
        tenant: str,
        name: str = "",
        facts: dict[str, Any] | None = None,
        expires_after_days: int | None = None,
        file_ids: Sequence[str] = (),
        chunking: dict[str, Any] | None = None,
    ) -> VectorStoreRow:
        """Make a store, perhaps with files in it.

        Raises:
            UnknownDocument: A file is not the tenant's.
        """
        now = self._clock_ns()
        row = VectorStoreRow(
            id=f"vs_{secrets.token_hex(12)}",
            tenant=tenant,
            name=name,
            facts=facts or {},
            created=now,
            last_active_at=now // 10**9,
            expires_after_days=expires_after_days,
        )
        async with self._database.write() as session:
            session.add(row)
            await session.flush()
            await self._put(session, row, file_ids, {}, chunking or AUTO, None)
        return row

    async def get(self, tenant: str, store_id: str) -> VectorStoreRow:
        """Return a store.

        Raises:
            UnknownDocument: The tenant has none of this id, or it has expired.
        """
        async with self._database.read() as session:
            return await self._get(session, tenant, store_id)

    async def note_use(self, row: VectorStoreRow) -> None:
        """Note that a store is asked, from which on it expires, unless that was noted just now."""
        now = self._clock_ns() // 10**9
        if now - row.last_active_at < _NOTED_S:
            return
        used = update(VectorStoreRow).where(VectorStoreRow.id == row.id)
        with suppress(LibraryUnavailable):  # on a full disk it can still be searched
            async with self._database.write() as session:
                await session.execute(used.values(last_active_at=now))

    async def list_stores(self, tenant: str, cut: Cut) -> Page[VectorStoreRow]:
        """Return a page of the tenant's stores, those that have expired left out."""
        found = select(VectorStoreRow).where(VectorStoreRow.tenant == tenant, ~self._has_expired())
        async with self._database.read() as session:
            return await list_page(session, found, VectorStoreRow, VectorStoreRow.id, cut)

    async def change(self, tenant: str, store_id: str, **values: Any) -> VectorStoreRow:
        """Change ``name``, ``facts`` or ``expires_after_days``; errors are those of `get`."""
        async with self._database.write() as session:
            row = await self._get(session, tenant, store_id, locks=True)
            for name, value in values.items():
                setattr(row, name, value)
            return row

    async def delete(self, tenant: str, store_id: str) -> None:
        """Delete a store; its files stay. Errors are those of `get`."""
        async with self._database.write() as session:
            await session.delete(await self._get(session, tenant, store_id, locks=True))

    async def count(self, stores: Sequence[VectorStoreRow]) -> dict[str, tuple[Counter[str], int]]:
        """Return the number of files by status, and the bytes of their texts, of each store."""
        ids = [each.id for each in stores]
        found: dict[str, tuple[Counter[str], int]] = {each: (Counter(), 0) for each in ids}
        by_status = (
            select(
                StoreFileRow.store_id,
                StoreFileRow.status,
                func.count(),
                func.sum(StoreFileRow.usage_bytes),
            )
            .where(StoreFileRow.store_id.in_(ids))
            .group_by(StoreFileRow.store_id, StoreFileRow.status)
        )
        async with self._database.read() as session:
            for store_id, status, number, num_bytes in await session.execute(by_status):
                counts, so_far = found[store_id]
                counts[status] = number
                found[store_id] = counts, so_far + int(num_bytes)
        return found

    async def put(
        self,
        tenant: str,
        store_id: str,
        file_ids: Sequence[str],
        attributes: dict[str, Any] | None = None,
        chunking: dict[str, Any] | None = None,
    ) -> list[StoreFileRow]:
        """Put files into a store, which indexes them in the background.

        A file that is there already gets the new attributes, and is indexed again where it failed.

        Raises:
            UnknownDocument: The store or a file is not the tenant's.
        """
        async with self._database.write() as session:
            store = await self._get(session, tenant, store_id, locks=True)
            return await self._put(
                session, store, file_ids, attributes or {}, chunking or AUTO, None
            )

    async def put_batch(
        self,
        tenant: str,
        store_id: str,
        file_ids: Sequence[str],
        attributes: dict[str, Any] | None = None,
        chunking: dict[str, Any] | None = None,
    ) -> FileBatchRow:
        """Put files into a store as `put` does, and return the batch that they are."""
        async with self._database.write() as session:
            store = await self._get(session, tenant, store_id, locks=True)
            batch = FileBatchRow(
                id=f"vsfb_{secrets.token_hex(12)}",
                store_id=store_id,
                tenant=tenant,
                created=self._clock_ns(),
                is_cancelled=False,
            )
            session.add(batch)
            await session.flush()
            await self._put(session, store, file_ids, attributes or {}, chunking or AUTO, batch.id)
            return batch

    async def _put(
        self,
        session: AsyncSession,
        store: VectorStoreRow,
        file_ids: Sequence[str],
        attributes: dict[str, Any],
        chunking: dict[str, Any],
        batch_id: str | None,
    ) -> list[StoreFileRow]:
        put = []
        for file_id in dict.fromkeys(file_ids):
            file = await session.get(FileRow, file_id, with_for_update={"read": True})
            if file is None or file.tenant != store.tenant or file.status == "deleting":
                raise UnknownDocument(f"There is no file {file_id!r}.", "file_id", "file_not_found")
            row = await session.get(StoreFileRow, (store.id, file_id))
            if row is None:
                row = StoreFileRow(
                    store_id=store.id,
                    file_id=file_id,
                    tenant=store.tenant,
                    created=self._clock_ns(),
                    status="in_progress",
                    usage_bytes=0,
                )
                session.add(row)
            is_done = row.status == "completed" and row.chunking == chunking
            row.attributes, row.chunking, row.batch_id = attributes, chunking, batch_id
            if not is_done:
                row.status, row.error_code, row.error_message = "in_progress", None, None
                await self._jobs.add(session, "index", store.tenant, file_id, store.id)
            put.append(row)
        store.last_active_at = self._clock_ns() // 10**9
        await session.flush()
        return put

    async def get_file(self, tenant: str, store_id: str, file_id: str) -> StoreFileRow:
        """Return a file of a store.

        Raises:
            UnknownDocument: The store is not the tenant's, or has no such file.
        """
        async with self._database.read() as session:
            return await self._get_file(session, tenant, store_id, file_id)

    async def list_files(
        self,
        tenant: str,
        store_id: str,
        cut: Cut,
        status: str | None = None,
        batch_id: str | None = None,
    ) -> Page[StoreFileRow]:
        """Return a page of a store's files, perhaps of one status or batch."""
        async with self._database.read() as session:
            await self._get(session, tenant, store_id)
            found = select(StoreFileRow).where(StoreFileRow.store_id == store_id)
            if status is not None:
                found = found.where(StoreFileRow.status == status)
            if batch_id is not None:
                found = found.where(StoreFileRow.batch_id == batch_id)
            return await list_page(session, found, StoreFileRow, StoreFileRow.file_id, cut)

    async def change_file(
        self, tenant: str, store_id: str, file_id: str, attributes: dict[str, Any]
    ) -> StoreFileRow:
        """Give a file of a store other attributes; errors are those of `get_file`."""
        async with self._database.write() as session:
            row = await self._get_file(session, tenant, store_id, file_id, locks=True)
            row.attributes = attributes
            return row

    async def remove_file(self, tenant: str, store_id: str, file_id: str) -> None:
        """Take a file out of a store; the file stays. Errors are those of `get_file`."""
        async with self._database.write() as session:
            await session.delete(
                await self._get_file(session, tenant, store_id, file_id, locks=True)
            )

    async def get_batch(
        self, tenant: str, store_id: str, batch_id: str
    ) -> tuple[FileBatchRow, Counter[str]]:
        """Return a batch and the number of its files by status.

        Raises:
            UnknownDocument: The store is not the tenant's, or has no such batch.
        """
        async with self._database.read() as session:
            batch = await self._get_batch(session, tenant, store_id, batch_id)
            by_status = (
                select(StoreFileRow.status, func.count())
                .where(StoreFileRow.batch_id == batch_id)
                .group_by(StoreFileRow.status)
            )
            counts = Counter(dict((await session.execute(by_status)).all()))
            return batch, counts

    async def cancel_batch(self, tenant: str, store_id: str, batch_id: str) -> None:
        """Give up those files of a batch that are not indexed yet; errors as of `get_batch`."""
        async with self._database.write() as session:
            batch = await self._get_batch(session, tenant, store_id, batch_id, locks=True)
            batch.is_cancelled = True
            await session.execute(
                update(StoreFileRow)
                .where(StoreFileRow.batch_id == batch_id, StoreFileRow.status == "in_progress")
                .values(status="cancelled")
            )

    async def delete_expired(self) -> None:
        """Delete the stores of all tenants that have expired."""
        async with self._database.write() as session:
            await session.execute(delete(VectorStoreRow).where(self._has_expired()))

    def _has_expired(self) -> Any:
        unused_s = self._clock_ns() // 10**9 - VectorStoreRow.last_active_at
        return func.coalesce(unused_s > _DAY_S * VectorStoreRow.expires_after_days, False)

    async def _get(
        self, session: AsyncSession, tenant: str, store_id: str, *, locks: bool = False
    ) -> VectorStoreRow:
        """Return a store; one that is locked stays until the transaction ends."""
        found = select(VectorStoreRow).where(
            VectorStoreRow.id == store_id, VectorStoreRow.tenant == tenant, ~self._has_expired()
        )
        found = found.with_for_update() if locks else found
        row = (await session.scalars(found)).first()
        if row is None:
            raise UnknownDocument(
                f"There is no vector store {store_id!r}.", "vector_store_id", "store_not_found"
            )
        return row

    async def _get_file(
        self,
        session: AsyncSession,
        tenant: str,
        store_id: str,
        file_id: str,
        *,
        locks: bool = False,
    ) -> StoreFileRow:
        await self._get(session, tenant, store_id, locks=locks)
        row = await session.get(StoreFileRow, (store_id, file_id))
        if row is None:
            raise UnknownDocument(
                f"The vector store {store_id!r} has no file {file_id!r}.",
                "file_id",
                "file_not_found",
            )
        return row

    async def _get_batch(
        self,
        session: AsyncSession,
        tenant: str,
        store_id: str,
        batch_id: str,
        *,
        locks: bool = False,
    ) -> FileBatchRow:
        await self._get(session, tenant, store_id, locks=locks)
        batch = await session.get(FileBatchRow, batch_id)
        if batch is None or batch.store_id != store_id:
            raise UnknownDocument(
                f"The vector store {store_id!r} has no batch {batch_id!r}.",
                "batch_id",
                "batch_not_found",
            )
        return batch


def check_attributes(attributes: dict[str, Any]) -> None:
    """Check attributes by OpenAI's rules: 16 of them, of short names and short values.

    Raises:
        BadRequest: They break one.
    """
    if len(attributes) > 16 or any(not 0 < len(each) <= 64 for each in attributes):
        raise BadRequest(
            "attributes: at most 16 are kept, with names of at most 64 characters.", "attributes"
        )
    for name, value in attributes.items():
        if not isinstance(value, bool | int | float | str) or len(str(value)) > 512:
            raise BadRequest(
                f"attributes.{name} must be a number, a boolean or a string of at most 512 "
                "characters.",
                "attributes",
            )

"""Conversations: items that responses read, and to which they add theirs."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from sqlalchemy import delete, func, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import defer

from library.room import check_room, measure
from library.storage.database import Database
from library.storage.listing import Cut, Page, list_page
from library.storage.schema import ConversationItemRow, ConversationRow
from rapid.errors import BadRequest, UnknownDocument

_MOST_ITEM_BYTES = 4 * 2**20  # of one item that is put in by itself
_MOST_BYTES = 64 * 2**20  # of the items of one conversation, over which it takes no more
_PAGE_BYTES = 8 * 2**20  # of the items of one page, unless it has but one

Item = dict[str, Any]


class Conversations:
    """The conversations in a database."""

    def __init__(
        self, database: Database, clock_ns: Callable[[], int] = time.time_ns, *, max_bytes: int
    ) -> None:
        """Keep nothing yet.

        Args:
            database: Where they are.
            clock_ns: Nanoseconds since the epoch.
            max_bytes: The most that a tenant has in the library, unless it has a limit of its own.
        """
        self._database = database
        self._clock_ns = clock_ns
        self.max_bytes = max_bytes

    async def create(
        self, tenant: str, facts: dict[str, Any], items: Sequence[Item]
    ) -> ConversationRow:
        """Begin a conversation, perhaps with items, which have ids."""
        row = ConversationRow(
            id=f"conv_{secrets.token_hex(16)}",
            tenant=tenant,
            created=self._clock_ns(),
            facts=facts,
        )
        async with self._database.write() as session:
            session.add(row)
            await session.flush()
            await self._check_items(session, tenant, row.id, items)
            await self._add(session, row.id, items)
        return row

    async def get(self, tenant: str, conversation_id: str) -> ConversationRow:
        """Return a conversation.

        Raises:
            UnknownDocument: The tenant has none of this id.
        """
        async with self._database.read() as session:
            return await _find(session, tenant, conversation_id)

    async def change(
        self, tenant: str, conversation_id: str, facts: dict[str, Any]
    ) -> ConversationRow:
        """Give a conversation other metadata; errors are those of `get`."""
        async with self._database.write() as session:
            row = await _find(session, tenant, conversation_id, locks=True)
            row.facts = facts
        return row

    async def delete(self, tenant: str, conversation_id: str) -> None:
        """Delete a conversation with its items; errors are those of `get`."""
        async with self._database.write() as session:
            await session.delete(await _find(session, tenant, conversation_id, locks=True))

    async def add(
        self, tenant: str, conversation_id: str, items: Sequence[Item]
    ) -> Sequence[ConversationItemRow]:
        """Put items, which have ids, at the end; errors are those of `get`.

        Raises:
            BadRequest: They are too long, or the conversation or its tenant has too much.
        """
        async with self._database.write() as session:
            await _find(session, tenant, conversation_id, locks=True)
            await self._check_items(session, tenant, conversation_id, items)
            return await self._add(session, conversation_id, items)

    async def check_room(self, tenant: str, conversation_id: str) -> None:
        """Refuse to go on with a conversation that is full.

        Raises:
            BadRequest: It is, or its tenant has too much.
        """
        async with self._database.read() as session:
            await self._check_room(session, tenant, conversation_id, 0, "conversation")

    async def _check_items(
        self, session: AsyncSession, tenant: str, conversation_id: str, items: Sequence[Item]
    ) -> None:
        sizes = [measure(each) for each in items]
        for place, size in enumerate(sizes):
            if size > _MOST_ITEM_BYTES:
                param = f"items[{place}]"
                message = f"{param} has {size} bytes, and an item may have {_MOST_ITEM_BYTES}"
                raise BadRequest(f"{message}: make several of it.", param, "quota")
        await self._check_room(session, tenant, conversation_id, sum(sizes), "items")

    async def _check_room(
        self, session: AsyncSession, tenant: str, conversation_id: str, num_more: int, param: str
    ) -> None:
        total = select(func.coalesce(func.sum(ConversationItemRow.num_bytes), 0))
        total = total.where(ConversationItemRow.conversation_id == conversation_id)
        held = int((await session.execute(total)).scalar_one())
        if held + num_more > _MOST_BYTES:
            message = f"{param}: the conversation has {held} bytes, and {num_more} more are over"
            message += f" the limit of {_MOST_BYTES}: begin another."
            raise BadRequest(message, param, "quota")
        await check_room(session, tenant, num_more, self.max_bytes, param)

    async def append(
        self, session: AsyncSession, tenant: str, conversation_id: str, items: Sequence[Item]
    ) -> None:
        """Put items at the end within a transaction, unless the conversation was deleted."""
        row = await session.get(ConversationRow, conversation_id, with_for_update=True)
        if row is not None and row.tenant == tenant:
            await self._add(session, conversation_id, items)

    async def _add(
        self, session: AsyncSession, conversation_id: str, items: Sequence[Item]
    ) -> Sequence[ConversationItemRow]:
        now, rows = self._clock_ns(), []
        for place, item in enumerate(items):
            row = await session.get(ConversationItemRow, (conversation_id, item["id"]))
            if row is None:  # one that is in it already stays where it is
                row = ConversationItemRow(
                    conversation_id=conversation_id,
                    id=item["id"],
                    created=now + place,
                    item=item,
                    num_bytes=measure(item),
                )
                session.add(row)
            rows.append(row)
        return rows

    async def list_items(
        self, tenant: str, conversation_id: str, cut: Cut
    ) -> Page[ConversationItemRow]:
        """Return a page of a conversation's items, fewer of long ones; errors are as of `get`."""
        async with self._database.read() as session:
            await _find(session, tenant, conversation_id)
            key, of_it = ConversationItemRow.id, ConversationItemRow.conversation_id
            every = select(ConversationItemRow).where(of_it == conversation_id)
            light = every.options(defer(ConversationItemRow.item))
            page = await list_page(session, light, ConversationItemRow, key, cut)
            sizes = accumulate(row.num_bytes for row in page.rows)
            num_rows = max(1, sum(size <= _PAGE_BYTES for size in sizes))
            rows = page.rows[:num_rows]
            whole = every.where(key.in_([row.id for row in rows]))
            await session.scalars(whole.execution_options(populate_existing=True))
        return Page(rows, page.has_more or len(page.rows) > num_rows)

    async def get_item(self, tenant: str, conversation_id: str, item_id: str) -> Item:
        """Return an item.

        Raises:
            UnknownDocument: The tenant has no such conversation, or that no such item.
        """
        async with self._database.read() as session:
            await _find(session, tenant, conversation_id)
            row = await session.get(ConversationItemRow, (conversation_id, item_id))
        if row is None:
            raise UnknownDocument(f"There is no item {item_id!r}.", "item_id", "item_not_found")
        return row.item

    async def delete_item(self, tenant: str, conversation_id: str, item_id: str) -> None:
        """Delete an item; errors are those of `get_item`."""
        await self.get_item(tenant, conversation_id, item_id)
        which = ConversationItemRow.conversation_id == conversation_id
        async with self._database.write() as session:
            found = delete(ConversationItemRow).where(which, ConversationItemRow.id == item_id)
            await session.execute(found)


async def _find(
    session: AsyncSession, tenant: str, conversation_id: str, *, locks: bool = False
) -> ConversationRow:
    """Return a conversation; one that is locked stays until the transaction ends."""
    row = await session.get(ConversationRow, conversation_id, with_for_update=locks)
    if row is None or row.tenant != tenant:
        message = f"There is no conversation {conversation_id!r}."
        raise UnknownDocument(message, "conversation", "conversation_not_found")
    return row

"""What responses and conversations have of a file, and how it is taken out of them.

A response names the files that it read, and has words of theirs: results of searches, citations,
passages in its receipt. When a file is deleted, all of these go; the answer's own words stay.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from sqlalchemy import ColumnElement, Text, cast, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from library.storage.schema import ConversationItemRow, ConversationRow, FileRow, ResponseRow

_FILE_ID = re.compile("file-[0-9a-f]{24}")


async def erase_traces(session: AsyncSession, tenant: str, file_id: str) -> int:
    """Take a file out of a tenant's responses and conversations; return how many had it."""
    columns = (ResponseRow.response, ResponseRow.input_items, ResponseRow.attached)
    owned = select(ResponseRow).where(ResponseRow.tenant == tenant)
    has_it = or_(*(_names(each, file_id) for each in columns))
    responses = (await session.scalars(owned.where(has_it))).all()
    for row in responses:
        row.response = erase_files(row.response, {file_id})
        row.input_items = erase_files(row.input_items, {file_id})
        row.attached = erase_files(row.attached, {file_id})
    of_tenant = select(ConversationRow.id).where(ConversationRow.tenant == tenant)
    found = select(ConversationItemRow).where(
        ConversationItemRow.conversation_id.in_(of_tenant),
        _names(ConversationItemRow.item, file_id),
    )
    items = (await session.scalars(found)).all()
    for item in items:
        item.item = erase_files(item.item, {file_id})
    return len(responses) + len(items)


async def erase_lost_files(session: AsyncSession, tenant: str, value: Any) -> Any:
    """Return a value without the files that are not there, as one may be deleted meanwhile."""
    named = {*_FILE_ID.findall(repr(value))}
    if not named:
        return value
    owned = select(FileRow.id).where(FileRow.tenant == tenant, FileRow.id.in_(named))
    there = await session.scalars(owned.where(FileRow.status != "deleting"))
    return erase_files(value, named - {*there.all()})


def erase_files(value: Any, file_ids: Collection[str]) -> Any:
    """Return a JSON value without what names files: entries of lists, and names in texts."""
    if not file_ids:
        return value
    if isinstance(value, dict):
        return {name: erase_files(each, file_ids) for name, each in value.items()}
    if isinstance(value, list):
        kept = (each for each in value if not _is_of(each, file_ids))
        return [erase_files(each, file_ids) for each in kept]
    if isinstance(value, str):
        for file_id in file_ids:
            value = value.replace(file_id, "deleted")
    return value


def _is_of(entry: Any, file_ids: Collection[str]) -> bool:
    named = entry.get("file_id") if isinstance(entry, dict) else entry
    return isinstance(named, str) and named in file_ids


def _names(column: Any, file_id: str) -> ColumnElement[bool]:
    return cast(column, Text).contains(file_id, autoescape=True)

"""How much of the library a tenant has: files, responses and conversations together."""

from __future__ import annotations

import json
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from library.storage.schema import (
    ConversationItemRow,
    ConversationRow,
    FileRow,
    LimitsRow,
    ResponseRow,
)
from rapid.errors import BadRequest

_FACTS_BYTES = 2**14  # of a conversation: what its metadata may have at most, nearly


def measure(*values: Any) -> int:
    """Return the bytes of values as a database keeps them."""
    return sum(len(json.dumps(each)) for each in values)


async def check_room(
    session: AsyncSession, tenant: str, num_more: int, usual_bytes: int, param: str
) -> None:
    """Refuse more bytes than a tenant may keep.

    Args:
        session: Where it is looked up.
        tenant: The owner.
        num_more: What is to be kept beside what is there.
        usual_bytes: The most of a tenant that has no limit of its own.
        param: The field that brings them.

    Raises:
        BadRequest: It would be too much.
    """
    of_tenant = ConversationRow.tenant == tenant
    sums = [
        select(func.sum(FileRow.num_bytes)).where(FileRow.tenant == tenant),
        select(func.sum(ResponseRow.num_bytes)).where(ResponseRow.tenant == tenant),
        select(func.count() * _FACTS_BYTES).select_from(ConversationRow).where(of_tenant),
        select(func.sum(ConversationItemRow.num_bytes))
        .join(ConversationRow, ConversationRow.id == ConversationItemRow.conversation_id)
        .where(of_tenant),
    ]
    columns = [each.scalar_subquery() for each in sums]
    held = sum(int(each or 0) for each in (await session.execute(select(*columns))).one())
    own = await session.get(LimitsRow, tenant)
    most = (own and own.bytes) or usual_bytes
    if held + num_more > most:
        raise BadRequest(
            f"{param}: your files, responses and conversations have {held} bytes, and {num_more} "
            f"more are over the limit of {most}: delete some.",
            param,
            "quota",
        )

"""The log of administrative acts: who did what to what, and no text of anybody."""

from __future__ import annotations

import time

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from library.storage.database import Database
from library.storage.schema import AuditRow


def record_act(session: AsyncSession, actor: str, action: str, subject: str) -> None:
    """Add an act to the transaction that carries it out, so that neither is without the other."""
    session.add(AuditRow(at=time.time(), actor=actor, action=action, subject=subject))


async def list_acts(database: Database, before: int | None, limit: int) -> list[AuditRow]:
    """Return acts, the latest first: those before the one with an id, if it is given."""
    query = select(AuditRow).order_by(AuditRow.id.desc()).limit(limit)
    if before is not None:
        query = query.where(AuditRow.id < before)
    async with database.read() as session:
        return list(await session.scalars(query))

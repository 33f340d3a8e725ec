"""What tenants may have, where that differs from the configuration."""

from __future__ import annotations

import time
from collections.abc import Mapping

from sqlalchemy import select

from library.accounts.audit_trail import record_act
from library.storage.database import Database
from library.storage.schema import LimitsRow

LIMITS = tuple(each.name for each in LimitsRow.__table__.columns if each.nullable)
_OVERLAP_NS = 30 * 10**9  # a clock may be behind, and a transaction is seen after its `changed`


async def read_limits(database: Database, since: int = 0) -> list[LimitsRow]:
    """Return the limits of all tenants that have own ones, which changed since about then."""
    query = select(LimitsRow).where(LimitsRow.changed >= since - _OVERLAP_NS)
    async with database.read() as session:
        return list(await session.scalars(query.order_by(LimitsRow.tenant)))


async def write_limits(
    database: Database, tenant: str, limits: Mapping[str, int | None], *, actor: str
) -> LimitsRow:
    """Set limits of a tenant, by the names of `LIMITS`; others stay as they are."""
    async with database.write() as session:
        new = database.insert(LimitsRow).values(tenant=tenant, changed=0)
        await session.execute(new.on_conflict_do_nothing())
        row = await session.get_one(LimitsRow, tenant, with_for_update=True)
        for name, value in limits.items():
            setattr(row, name, value)
        row.changed = time.time_ns()
        record_act(session, actor, "limits.set", tenant)
    return row

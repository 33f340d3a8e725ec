"""The ledger: what each answer used, once, and sums over it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from sqlalchemy import case, func, or_, select

from library.storage.database import Database
from library.storage.schema import UsageRow

Grouping = Literal["tenant", "day", "key_id", "model"]
GROUPINGS: tuple[Grouping, ...] = get_args(Grouping)
_COUNTS = ("prompt_tokens", "cached_tokens", "completion_tokens")
_SECONDS = ("target_s", "drafter_s", "kv_byte_s")
AGAIN = "again"  # status of what resuming an answer took: seconds, and no request or tokens


@dataclass(frozen=True, slots=True)
class UsageEntry:
    """What one answer used; `UsageRow` says what the fields are."""

    request_id: str
    tenant: str
    key_id: str
    model: str
    day: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    target_s: float
    drafter_s: float
    kv_byte_s: float
    status: str


async def record_usage(database: Database, entries: Sequence[UsageEntry]) -> None:
    """Write entries; of one answer one stays, so that writing twice adds nothing.

    An answer has several entries when its stream broke and was resumed. That of its end stays, or
    the larger numbers of those that have none. The seconds of resuming are in entries of their own.
    """
    insert = database.insert(UsageRow)
    new, old = insert.excluded, UsageRow

    def one_of(name: str) -> Any:
        own, other = getattr(old, name), new[name]
        if name in _SECONDS:
            return case((other > own, other), else_=own)
        is_other = or_(new.status == "ok", other > own)
        return case((old.status == "ok", own), (is_other, other), else_=own)

    kept = {name: one_of(name) for name in ("status", *_COUNTS, *_SECONDS)}
    # In one order everywhere, so that two ingresses cannot wait for one another.
    rows = sorted((asdict(each) for each in entries), key=lambda each: each["request_id"])
    async with database.write() as session:
        for row in rows:
            await session.execute(
                insert.values(row).on_conflict_do_update(index_elements=["request_id"], set_=kept)
            )


async def sum_usage(
    database: Database, tenant: str | None, first: str, last: str, by: Sequence[Grouping]
) -> list[dict[str, Any]]:
    """Return the sums of the days from `first` to `last`, of one tenant or all, by some columns.

    Each has the columns of `by`, ``num_requests`` and the tokens and seconds of `UsageRow`.
    """
    columns = [getattr(UsageRow, name) for name in by]
    sums = [func.sum(getattr(UsageRow, name)).label(name) for name in (*_COUNTS, *_SECONDS)]
    num_requests = func.sum(case((UsageRow.status == AGAIN, 0), else_=1))
    query = select(*columns, num_requests.label("num_requests"), *sums)
    query = query.where(UsageRow.day.between(first, last))
    if tenant is not None:
        query = query.where(UsageRow.tenant == tenant)
    async with database.read() as session:
        found = await session.execute(query.group_by(*columns).order_by(*columns))
        rows = [dict(each) for each in found.mappings()]
    whole = ("num_requests", *_COUNTS)  # PostgreSQL sums them as decimal numbers
    return [row | {name: int(row[name] or 0) for name in whole} for row in rows]

"""Pages of lists, in the order of creation and behind a cursor, as OpenAI's API has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeVar

from sqlalchemy import Select, tuple_
from sqlalchemy.ext.asyncio import AsyncSession

from rapid.errors import BadRequest


class ListedRow(Protocol):
    """A row of a list."""

    @property
    def created(self) -> Any: ...


Row = TypeVar("Row", bound=ListedRow)


@dataclass(frozen=True, slots=True)
class Cut:
    """Which part of a list is asked for.

    Attributes:
        limit: The most rows.
        order: By creation, ``asc`` or ``desc``.
        after: Id of the row before the first one; None begins with the first.
        before: Id of the row behind the last one; None for no such end.
    """

    limit: int = 20
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None
    before: str | None = None


@dataclass(frozen=True, slots=True)
class Page(Generic[Row]):
    """A part of a list, and whether more follows."""

    rows: Sequence[Row]
    has_more: bool


async def list_page(
    session: AsyncSession, found: Select[Row], table: Any, key: Any, cut: Cut
) -> Page[Row]:
    """Return a page of what a statement finds.

    Args:
        session: Where it is looked up.
        found: The whole list.
        table: The mapped class, whose ``created`` gives the order.
        key: The column that cursors name.
        cut: The part.

    Raises:
        BadRequest: The list has no row that `cut` names.
    """
    place = tuple_(table.created, key)
    for param, cursor, is_after in (("after", cut.after, True), ("before", cut.before, False)):
        if cursor is None:
            continue
        anchor = (await session.scalars(found.where(key == cursor))).first()
        if anchor is None:
            raise BadRequest(f"{param}: there is no {cursor!r} in this list.", param)
        known = (anchor.created, cursor)
        comes_later = (cut.order == "asc") == is_after
        found = found.where(place > known if comes_later else place < known)
    order = [table.created, key] if cut.order == "asc" else [table.created.desc(), key.desc()]
    rows = (await session.scalars(found.order_by(*order).limit(cut.limit + 1))).all()
    return Page(rows[: cut.limit], len(rows) > cut.limit)

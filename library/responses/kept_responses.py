"""The responses that tenants may come back to: kept, continued, and deleted."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from sqlalchemy import CTE, Integer, delete, func, literal, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from library.responses.conversations import Conversations
from library.responses.traces_of_files import erase_lost_files
from library.room import check_room, measure
from library.storage.database import Database
from library.storage.schema import ResponseRow
from rapid.errors import BadRequest, UnknownDocument

_KEPT_S = 30 * 86_400  # as OpenAI's: thirty days
_DAY_S = 86_400  # that a chain is prolonged by more, so that it is written once a day
_LONGEST_CHAIN = 10_000  # responses that one prolongs
_PART_BYTES = 8 * 2**20  # of responses that are read at once
_NS = 10**9  # nanoseconds of a second
_ENDED = ("completed", "incomplete")  # responses from which others may go on
_LOST = {
    "code": "server_error",
    "message": "The server process that answered was lost: ask again.",
    "retryable": True,
}


class Link(NamedTuple):
    """One response of a chain, and its bytes."""

    id: str
    previous_id: str | None
    num_bytes: int


class Progress(NamedTuple):
    """How far a response is: its status, the steps in which it grew, and whether it is answered."""

    status: str
    num_steps: int
    is_answered: bool


class Said(NamedTuple):
    """What requests take from a response: its items, old to new, and its stored documents."""

    id: str
    items: Sequence[dict[str, Any]]
    attached: dict[str, Any]


class KeptResponses:
    """The responses in a database."""

    def __init__(
        self,
        database: Database,
        conversations: Conversations,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._database, self._conversations = database, conversations
        self._clock_ns = clock_ns

    async def keep(
        self,
        tenant: str,
        response: dict[str, Any],
        input_items: Sequence[dict[str, Any]],
        steps: Sequence[Any],
        attached: dict[str, Any],
        *,
        owner: str = "",
        leased_until: float = 0.0,
    ) -> None:
        """Keep a response; once it has ended, its items belong to its conversation, too.

        Args:
            tenant: Its tenant.
            response: The object; with ``store`` false only the conversation gets its items.
            input_items: What was new in its request.
            steps: How its output grew.
            attached: The stored documents that its request named.
            owner: Who answers a response that has not ended; see `running_responses`.
            leased_until: When the owner's lease ends.

        Raises:
            BadRequest: The tenant has too much; what a conversation gets was asked for before.
        """
        now = self._clock_ns()
        named = response.get("conversation")
        async with self._database.write() as session:
            whole = [response, list(input_items), attached]
            response, input_items, attached = await erase_lost_files(session, tenant, whole)
            if named is not None and not owner:
                items = [*input_items, *response["output"]]
                await self._conversations.append(session, tenant, named["id"], items)
            if response["store"]:
                previous_id = response["previous_response_id"]
                size = measure(response, list(input_items), list(steps), attached)
                if named is None:
                    most = self._conversations.max_bytes
                    await check_room(session, tenant, size, most, "store")
                if previous_id is not None:
                    await self._prolong(session, tenant, previous_id, now // _NS + _KEPT_S)
                session.add(
                    ResponseRow(
                        id=response["id"],
                        tenant=tenant,
                        created=now,
                        expires_at=now // _NS + _KEPT_S,
                        previous_id=previous_id,
                        response=response,
                        input_items=list(input_items),
                        steps=list(steps),
                        attached=attached,
                        num_bytes=size,
                        owner=owner,
                        leased_until=leased_until,
                    )
                )

    async def _prolong(
        self, session: AsyncSession, tenant: str, response_id: str, expires_at: int
    ) -> None:
        """Keep a chain for as long as a response that goes on from it."""
        await self._database.take_turn(session, tenant)  # or two could wait for each other's rows
        ids = select(self._chain(tenant, response_id, _LONGEST_CHAIN).c.id)
        due = update(ResponseRow).where(ResponseRow.id.in_(ids))
        due = due.where(ResponseRow.expires_at < expires_at)
        await session.execute(
            due.values(expires_at=expires_at + _DAY_S),
            execution_options={"synchronize_session": False},
        )

    async def get(self, tenant: str, response_id: str) -> ResponseRow:
        """Return a response; one that still has an owner is being answered.

        One whose owner was lost has failed.

        Raises:
            UnknownDocument: The tenant has none of this id.
        """
        now = self._clock_ns() / _NS
        async with self._database.read() as session:
            row = await session.get(ResponseRow, response_id)
        if row is None or row.tenant != tenant or row.expires_at <= int(now):
            raise _unknown(response_id, "response_id")
        if row.owner and row.leased_until <= now:  # nothing changes the row itself any more
            row.response = row.response | {"status": "failed", "error": _LOST}
            row.owner = ""
        return row

    async def find_progress(self, tenant: str, response_id: str) -> Progress | None:
        """Return how far a response is, without what it says; None where it is not there."""
        num_steps = func.json_array_length(ResponseRow.steps, type_=Integer)
        is_answered = (ResponseRow.owner != "") & (
            ResponseRow.leased_until > self._clock_ns() / _NS
        )
        found = select(ResponseRow.response["status"], num_steps, is_answered)
        found = found.where(ResponseRow.id == response_id, ResponseRow.tenant == tenant)
        async with self._database.read() as session:
            row = (await session.execute(found)).one_or_none()
        return None if row is None else Progress(*row)

    async def list_chain(self, tenant: str, response_id: str, most: int) -> Sequence[Link]:
        """Return a response and all that it goes on from, oldest first.

        Args:
            tenant: The owner.
            response_id: The last one.
            most: The most responses; of a longer chain the first ones are left out.

        Raises:
            UnknownDocument: One of them is not there, or not the tenant's.
        """
        chain = self._chain(tenant, response_id, most)
        found = select(ResponseRow.id, ResponseRow.previous_id, ResponseRow.num_bytes)
        found = found.join(chain, chain.c.id == ResponseRow.id).order_by(chain.c.place.desc())
        async with self._database.read() as session:
            rows = [Link(*row) for row in (await session.execute(found)).all()]
        missing = rows[0].previous_id if rows else response_id
        if missing is not None and len(rows) < most:
            raise _unknown(missing, "previous_response_id")
        return rows

    def _chain(self, tenant: str, response_id: str, most: int) -> CTE:
        """Return a query for a response and those before it, each with its place from the end."""
        there = (ResponseRow.tenant == tenant, ResponseRow.expires_at > self._clock_ns() // _NS)
        link = select(ResponseRow.id, ResponseRow.previous_id, literal(1).label("place"))
        chain = link.where(ResponseRow.id == response_id, *there).cte("chain", recursive=True)
        before = select(ResponseRow.id, ResponseRow.previous_id, chain.c.place + 1)
        is_before = ResponseRow.id == chain.c.previous_id
        return chain.union_all(before.where(is_before, *there, chain.c.place < most))

    async def read(self, tenant: str, links: Sequence[Link]) -> Sequence[Said]:
        """Return what the first of some responses said, as many as are read at once.

        Raises:
            UnknownDocument: One of them is not there, or not the tenant's.
            BadRequest: One of them has not ended, or has no whole answer.
        """
        sizes = accumulate(each.num_bytes for each in links)
        links = links[: max(1, sum(size <= _PART_BYTES for size in sizes))]
        output, status = ResponseRow.response["output"], ResponseRow.response["status"]
        said = (ResponseRow.input_items, output, ResponseRow.attached, status)
        found = select(ResponseRow.id, *said)
        found = found.where(ResponseRow.id.in_([each.id for each in links]))
        found = found.where(ResponseRow.tenant == tenant)
        found = found.where(ResponseRow.expires_at > self._clock_ns() // _NS)
        async with self._database.read() as session:
            rows = {row[0]: row for row in (await session.execute(found)).all()}
        for link in links:
            if link.id not in rows:
                raise _unknown(link.id, "previous_response_id")
            if (state := rows[link.id][4]) not in _ENDED:
                message = f"The response {link.id!r} is {state}: go on from one that is completed."
                raise BadRequest(message, "previous_response_id", "response_not_completed")
        found_rows = (rows[link.id] for link in links)
        return [Said(each[0], [*each[1], *each[2]], each[3]) for each in found_rows]

    async def delete(self, tenant: str, response_id: str) -> None:
        """Delete a response with all of its texts.

        Raises:
            UnknownDocument: The tenant has none of this id.
        """
        await self.get(tenant, response_id)
        async with self._database.write() as session:
            await session.execute(delete(ResponseRow).where(ResponseRow.id == response_id))

    async def delete_expired(self, now: float) -> None:
        """Delete the responses of all tenants whose time has passed, in seconds."""
        async with self._database.write() as session:
            await session.execute(delete(ResponseRow).where(ResponseRow.expires_at <= int(now)))


def _unknown(response_id: str, param: str) -> UnknownDocument:
    message = f"There is no response {response_id!r}: it was not kept, or is deleted."
    return UnknownDocument(message, param, "response_not_found")

"""Responses in the background while they are answered: rows that one process holds by leases.

The process that took a request answers it, and renews the leases of all of its rows together. When
it dies they end, and from then on whoever reads such a response sees that it has failed. Nobody
begins it again: its request is not kept, and what it has used already would be used twice.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from sqlalchemy import update

from library.responses.conversations import Conversations
from library.responses.kept_responses import KeptResponses
from library.responses.traces_of_files import erase_lost_files
from library.room import measure
from library.storage.database import Database
from library.storage.schema import ResponseRow

LEASE_S = 15.0  # as that of a job on a file: many renewals may be late
"""How long a lease holds that is not renewed."""
_NS = 10**9  # nanoseconds of a second


class Growth(NamedTuple):
    """How far a response is: its tenant, the object, and the steps in which its output grew."""

    tenant: str
    response: dict[str, Any]
    steps: Sequence[Any]


class RunningResponses:
    """The responses that this process answers in the background."""

    def __init__(
        self,
        database: Database,
        conversations: Conversations,
        kept: KeptResponses,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._database, self._conversations, self._kept = database, conversations, kept
        self._clock_ns = clock_ns
        self._owner = secrets.token_hex(16)

    async def begin(
        self,
        tenant: str,
        response: dict[str, Any],
        input_items: Sequence[dict[str, Any]],
        attached: dict[str, Any],
    ) -> None:
        """Keep a response that is about to be answered; arguments and errors are as of `keep`."""
        await self._kept.keep(
            tenant,
            response,
            input_items,
            (),
            attached,
            owner=self._owner,
            leased_until=self._clock_ns() / _NS + LEASE_S,
        )

    async def renew(self, ids: Sequence[str], grown: Sequence[Growth]) -> set[str]:
        """Hold the leases of responses for longer and note how far some are.

        Returns:
            The ids of those that are still this process's; others were cancelled or deleted, or
            their leases have ended.
        """
        now = self._clock_ns() / _NS
        held = update(ResponseRow).where(
            ResponseRow.id.in_(ids),
            ResponseRow.owner == self._owner,
            ResponseRow.leased_until > now,
        )
        held = held.execution_options(synchronize_session=False)
        async with self._database.write() as session:
            renewed = held.values(leased_until=now + LEASE_S).returning(ResponseRow.id)
            still = {*(await session.scalars(renewed)).all()}
            for each in grown:
                response = await erase_lost_files(session, each.tenant, each.response)
                of_it = held.where(ResponseRow.id == response["id"])
                await session.execute(of_it.values(response=response, steps=[*each.steps]))
        return still

    async def end(self, ended: Growth) -> bool:
        """Keep a response as it ended; return whether it was still this process's.

        The items of one with a whole answer now belong to its conversation. More bytes than a
        tenant may have are kept here: it could not have its answer otherwise.
        """
        async with self._database.write() as session:
            row = await session.get(ResponseRow, ended.response["id"], with_for_update=True)
            is_held = row is not None and row.owner == self._owner
            if row is None or not is_held or row.leased_until <= self._clock_ns() / _NS:
                return False
            response = await erase_lost_files(session, row.tenant, ended.response)
            named = response["conversation"]
            if named is not None and response["status"] != "failed":
                items = [*row.input_items, *response["output"]]
                await self._conversations.append(session, row.tenant, named["id"], items)
            row.response, row.steps, row.owner = response, [*ended.steps], ""
            row.num_bytes = measure(response, row.input_items, row.steps, row.attached)
        return True

    async def cancel(self, tenant: str, response_id: str) -> ResponseRow:
        """Cancel a response, whoever answers it; one that has ended stays as it is.

        Raises:
            UnknownDocument: The tenant has none of this id.
        """
        await self._kept.get(tenant, response_id)
        async with self._database.write() as session:
            row = await session.get(ResponseRow, response_id, with_for_update=True)
            if row is not None and row.owner and row.leased_until > self._clock_ns() / _NS:
                row.response = row.response | {"status": "cancelled"}
                row.owner = ""
        return await self._kept.get(tenant, response_id)

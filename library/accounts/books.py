"""The accounts of tenants as one process of the server uses them."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

from library.accounts import api_keys
from library.accounts.callers import Caller
from library.accounts.tenant_limits import read_limits
from library.accounts.usage_ledger import UsageEntry, record_usage
from library.storage.database import Database
from library.storage.schema import LimitsRow
from rapid.errors import RapidError

_log = logging.getLogger(__name__)

_TURN_S = 1.0  # between two writings of usage, and two looks for new limits
_MOST_WAITING = 100_000  # entries that are kept while the database is away: about 50 MB
_MOST_AT_ONCE = 500  # entries of one transaction, which others wait for


class Accounts:
    """Keys that are looked up at each request, limits that are read and usage that is written.

    A key is asked for every time, so that one that is revoked is taken nowhere from then on.
    Limits and usage take a second: nobody's request waits for them.

    Attributes:
        database: Returns where all this is, or raises `LibraryUnavailable`.
        limits: The limits of the tenants that have own ones, as of a second ago.
        knows_keys: Whether a key was ever made, as of a second ago.
        num_lost: Entries that were dropped because the database was away for too long.
    """

    def __init__(self, database: Callable[[], Awaitable[Database]]) -> None:
        """Read nothing yet; `keep` does."""
        self.database = database
        self.limits: dict[str, LimitsRow] = {}
        self.num_lost = 0
        self._waiting: deque[UsageEntry] = deque()
        self._changed = 0
        self.knows_keys = False
        self._is_away = False

    async def find(self, key: str) -> Caller | None:
        """Return who holds a key; None if it is not taken.

        Raises:
            LibraryUnavailable: The database does not answer.
        """
        return await api_keys.find_key(await self.database(), key)

    async def has_keys(self) -> bool:
        """Return whether a key was ever made, without which no request needs one."""
        self.knows_keys = self.knows_keys or await api_keys.has_keys(await self.database())
        return self.knows_keys

    def note(self, entry: UsageEntry) -> None:
        """Have the usage of an answer written soon."""
        if len(self._waiting) >= _MOST_WAITING:
            self._waiting.popleft()
            self._lose(1)
        self._waiting.append(entry)

    async def read_limits(self) -> bool:
        """Read the limits that are new; return whether there are any."""
        rows = await read_limits(await self.database(), self._changed)
        new = {row.tenant: row for row in rows}
        is_new = any(
            each.changed != getattr(self.limits.get(name), "changed", None)
            for name, each in new.items()
        )
        self.limits |= new
        self._changed = max((self._changed, *(row.changed for row in rows)))
        return is_new

    async def write_usage(self) -> None:
        """Write all entries that wait; those that cannot be written wait on."""
        while self._waiting:
            entries = [self._waiting[i] for i in range(min(_MOST_AT_ONCE, len(self._waiting)))]
            await record_usage(await self.database(), entries)
            for entry in entries:
                if self._waiting and self._waiting[0] is entry:  # it may have been dropped
                    self._waiting.popleft()

    @asynccontextmanager
    async def keep(self, on_limits: Callable[[], None]) -> AsyncIterator[None]:
        """Read limits and write usage again and again within the context, and once at its end.

        Args:
            on_limits: Called when limits have changed, and when the first key was made.
        """
        task = asyncio.create_task(self._keep(on_limits))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            with suppress(RapidError):
                await self.write_usage()
            if self._waiting:
                self._lose(len(self._waiting))
            self._waiting.clear()

    def _lose(self, number: int) -> None:
        self.num_lost += number
        _log.error("the usage of %d answers was not written so far", self.num_lost)

    async def _keep(self, on_limits: Callable[[], None]) -> None:
        while True:
            try:
                knew_keys = self.knows_keys
                is_new = await self.read_limits()
                if is_new or await self.has_keys() != knew_keys:
                    on_limits()
                await self.write_usage()
                self._is_away = False
            except Exception as error:  # the database is away, and may come back
                if not self._is_away:
                    _log.warning("accounts cannot be read or written: %s", type(error).__name__)
                self._is_away = True
            await asyncio.sleep(_TURN_S)

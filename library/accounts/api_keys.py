"""API keys in the database, which keeps their hashes alone.

A key is looked up by its hash in an index. How long that takes tells nothing of other keys: nobody
can choose the first letters of a SHA-256. What was found is compared in constant time as well.
"""

from __future__ import annotations

import hmac
import re
import secrets
import time
from collections.abc import Collection

from sqlalchemy import bindparam, select
from sqlalchemy.ext.asyncio import AsyncSession

from library.accounts.audit_trail import record_act
from library.accounts.callers import SCOPES, Caller, hash_key, make_key
from library.storage.database import Database
from library.storage.schema import KeyRow
from rapid.errors import UnknownKey

_BY_HASH = select(KeyRow.__table__).where(KeyRow.sha256 == bindparam("presented"))
_ANY = select(KeyRow.id).limit(1)
_ID_BYTES = 12  # of randomness: no two keys have one id
_ID = re.compile(f"key_[0-9a-f]{{{2 * _ID_BYTES}}}")


async def create_key(
    database: Database,
    tenant: str,
    name: str,
    scopes: Collection[str],
    expires_at: int | None,
    *,
    actor: str,
) -> tuple[KeyRow, str]:
    """Make a key; return its row, and the key itself, which is kept nowhere."""
    async with database.write() as session:
        row, key = _add_key(session, tenant, name, scopes, expires_at)
        record_act(session, actor, "keys.create", row.id)
    return row, key


def _add_key(
    session: AsyncSession, tenant: str, name: str, scopes: Collection[str], expires_at: int | None
) -> tuple[KeyRow, str]:
    key = make_key()
    row = KeyRow(
        id=f"key_{secrets.token_hex(_ID_BYTES)}",
        tenant=tenant,
        sha256=hash_key(key),
        name=name,
        scopes=" ".join(each for each in SCOPES if each in scopes),
        created=time.time_ns(),
        expires_at=expires_at,
        revoked_at=None,
    )
    session.add(row)
    return row, key


async def find_key(database: Database, key: str) -> Caller | None:
    """Return who holds a key that is taken now; None for any other text."""
    presented = hash_key(key)
    row = await database.glance(_BY_HASH, presented=presented)
    if row is None or not hmac.compare_digest(row.sha256, presented) or row.revoked_at is not None:
        return None
    if row.expires_at is not None and row.expires_at <= time.time():
        return None
    return Caller(row.tenant, row.id, frozenset(row.scopes.split()))


async def has_keys(database: Database) -> bool:
    """Return whether a key was ever made."""
    return await database.glance(_ANY) is not None


async def list_keys(
    database: Database, tenant: str | None, after: str | None, limit: int
) -> list[KeyRow]:
    """Return keys, the latest first: of one tenant or of all, and those after the key of an id.

    Raises:
        UnknownKey: There is no key with the id `after`.
    """
    query = select(KeyRow).order_by(KeyRow.created.desc(), KeyRow.id).limit(limit)
    if tenant is not None:
        query = query.where(KeyRow.tenant == tenant)
    async with database.read() as session:
        if after is not None:
            query = query.where(KeyRow.created < (await _key_of(session, after)).created)
        return list(await session.scalars(query))


async def revoke_key(database: Database, key_id: str, *, actor: str) -> KeyRow:
    """Take a key no more, from the next request on; return its row. It may be revoked already.

    Raises:
        UnknownKey: There is no key with this id.
    """
    async with database.write() as session:
        row = await _key_of(session, key_id)
        if row.revoked_at is None:
            row.revoked_at = int(time.time())
            record_act(session, actor, "keys.revoke", key_id)
    return row


async def rotate_key(
    database: Database, key_id: str, grace_s: int, *, actor: str
) -> tuple[KeyRow, str]:
    """Make a key like another one, which is taken for so many seconds more; return the new one.

    Raises:
        UnknownKey: There is no key with this id that is taken now.
    """
    now = time.time()
    async with database.write() as session:
        old = await _key_of(session, key_id)
        expires_at = old.expires_at
        if old.revoked_at is not None or (expires_at is not None and expires_at <= now):
            raise UnknownKey(f"The key {key_id!r} is not taken any more: make a new one.")
        row, key = _add_key(session, old.tenant, old.name, old.scopes.split(), expires_at)
        ends_at = int(now) + grace_s
        if grace_s == 0:
            old.revoked_at = ends_at
        elif expires_at is None or ends_at < expires_at:
            old.expires_at = ends_at
        record_act(session, actor, "keys.rotate", key_id)
    return row, key


async def _key_of(session: AsyncSession, key_id: str) -> KeyRow:
    row = None
    if _ID.fullmatch(key_id):
        row = await session.get(KeyRow, key_id, with_for_update=True)
    if row is None:
        raise UnknownKey(f"There is no key {key_id!r}.")
    return row

"""Keys in the database: what is taken, from when and until when."""

from __future__ import annotations

import time

import pytest
from sqlalchemy import select

from library.accounts import api_keys
from library.accounts.audit_trail import list_acts
from library.accounts.callers import hash_key
from library.storage.database import Database
from library.storage.schema import KeyRow
from rapid.errors import UnknownKey


async def create(database: Database, tenant: str = "acme", **options: object) -> tuple[KeyRow, str]:
    given = {"name": "", "scopes": ["ask"], "expires_at": None} | options
    return await api_keys.create_key(database, tenant, actor="ops", **given)  # type: ignore[arg-type]


async def test_a_key_is_found_and_kept_nowhere(database: Database):
    assert not await api_keys.has_keys(database)
    row, key = await create(database, scopes=["admin", "ask"])
    found = await api_keys.find_key(database, key)
    assert found is not None
    assert (found.key_id, found.tenant, found.scopes) == (row.id, "acme", {"ask", "admin"})
    assert (row.sha256, await api_keys.has_keys(database)) == (hash_key(key), True)
    for other in (key + "x", key[:-1], "", "\udcff", row.sha256):
        assert await api_keys.find_key(database, other) is None
    async with database.read() as session:
        (kept,) = (await session.execute(select(KeyRow.__table__))).all()
    assert key not in map(str, kept)


async def test_a_key_that_is_revoked_or_has_expired_is_not_taken(database: Database):
    row, key = await create(database)
    _, old = await create(database, expires_at=int(time.time()) - 1)
    _, young = await create(database, expires_at=int(time.time()) + 1000)
    for _ in range(2):
        assert (await api_keys.revoke_key(database, row.id, actor="ops")).revoked_at
    assert [await api_keys.find_key(database, each) is not None for each in (key, old, young)] == [
        False,
        False,
        True,
    ]
    with pytest.raises(UnknownKey, match="no key 'key_x'"):
        await api_keys.revoke_key(database, "key_x", actor="ops")


async def test_a_rotated_key_is_taken_for_as_long_as_was_said(database: Database):
    row, key = await create(database, name="laptop", scopes=["documents"])
    new, other = await api_keys.rotate_key(database, row.id, 600, actor="ops")
    assert (new.tenant, new.name, new.scopes) == ("acme", "laptop", "documents")
    assert all([await api_keys.find_key(database, each) for each in (key, other)])
    (_, old) = await api_keys.list_keys(database, None, None, 9)
    assert 0 < old.expires_at - time.time() <= 600  # type: ignore[operator]
    _, last = await api_keys.rotate_key(database, new.id, 0, actor="ops")
    assert await api_keys.find_key(database, other) is None
    assert await api_keys.find_key(database, last) is not None
    with pytest.raises(UnknownKey, match="not taken any more"):
        await api_keys.rotate_key(database, new.id, 0, actor="ops")


async def test_keys_are_listed_by_pages_and_tenants(database: Database):
    ids = [(await create(database, tenant))[0].id for tenant in "abab"]
    first = await api_keys.list_keys(database, None, None, 3)
    rest = await api_keys.list_keys(database, None, first[-1].id, 3)
    assert [each.id for each in (*first, *rest)] == ids[::-1]
    of_one = await api_keys.list_keys(database, "b", None, 9)
    assert [each.id for each in of_one] == [ids[3], ids[1]]
    with pytest.raises(UnknownKey):
        await api_keys.list_keys(database, None, "nobody's\x00", 3)


async def test_acts_are_written_down_once(database: Database):
    row, _ = await create(database)
    await api_keys.rotate_key(database, row.id, 60, actor="ops")
    for _ in range(2):
        await api_keys.revoke_key(database, row.id, actor="eve")
    acts = await list_acts(database, None, 9)
    assert [(each.actor, each.action, each.subject) for each in acts] == [
        ("eve", "keys.revoke", row.id),
        ("ops", "keys.rotate", row.id),
        ("ops", "keys.create", row.id),
    ]
    assert [each.id for each in await list_acts(database, acts[0].id, 1)] == [acts[1].id]
    assert abs(acts[0].at - time.time()) < 3600

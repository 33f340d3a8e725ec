"""Manifests: which documents a shared collection holds, who adds them, and how long they stay.

A manifest is a point without vectors, which no search finds. It is written before the first chunk
of its document and deleted after the last one: what a killed retriever leaves expires with it.

::

    claimed by A until t ──A adds all chunks──> complete ──unused for the time to live──> expired
         │  ^                                      │                                          │
         │  └── A renews                           └── chunks are found missing: claimable    │
         └── A dies, t passes: claimable by any retriever  <──────────────────────────────────┘

A claim is taken by one conditional write, which Qdrant applies to a point as a whole, and read
back. Should two retrievers hold one all the same (their clocks differ, or a replica of Qdrant
lags), both write the same points. Times are seconds since the epoch by the retrievers' clocks.

Why not as jobs of the library's database: most documents come with a request and are in no library,
and a set-up may have none. A claim beside its points is lost, restored and away only together with
them. Files have their jobs, so that of those one worker claims a document here anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import NAMESPACE_URL, uuid4, uuid5

from qdrant_client import models as qm

from retrieval.stores.qdrant import QdrantCollection
from retrieval.stores.store import StoredDocument

CLAIM_S = 15.0  # longest wait for a document whose retriever died while it was embedding it
"""How long a claim holds that its owner does not renew."""

_CLAIMED, _COMPLETE = "claimed", "complete"  # states
_REFRESHED_SHARE = 0.1  # of the time to live, between two writes of a document's use
_LISTED_AT_ONCE = 1000  # documents of one answer of the server
_EXPIRED_AT_ONCE = 100  # documents that one look-up of a sweep returns


@dataclass(frozen=True, slots=True)
class Claimed:
    """A document that is not complete yet; `is_ours` says whether this retriever is to add it."""

    is_ours: bool


class Manifests:
    """The manifests in one collection, seen by one retriever.

    Documents are named as in the payload of their chunks, that is with their index.
    """

    def __init__(
        self, collection: QdrantCollection, ttl_s: float, clock: Callable[[], float]
    ) -> None:
        """Store where the manifests are; a document stays `ttl_s` seconds after its last use."""
        self._collection = collection
        self._ttl_s = ttl_s
        self._clock = clock
        self._owner = uuid4().hex
        self._expires_at: dict[tuple[str, str], float] = {}

    async def claim(self, tenant: str, document_id: str) -> StoredDocument | Claimed:
        """Return what is stored of a complete document, or else try to claim it."""
        manifest = await self._read(tenant, document_id)
        if manifest is None or self._is_claimable(manifest):
            await self._write(tenant, document_id, only_if=self._claimable())
            manifest = await self._read(tenant, document_id)
        if manifest is None or manifest["state"] == _CLAIMED:
            return Claimed(manifest is not None and manifest["owner"] == self._owner)
        self._expires_at[tenant, document_id] = manifest["expires_at"]
        return StoredDocument(manifest["num_chunks"], manifest["num_tokens"])

    async def find_complete(self, tenant: str, document_ids: Collection[str]) -> list[str]:
        """Return which of some documents are complete and have not expired."""
        ids = {_point_id(tenant, each): each for each in document_ids}
        with self._collection.errors_named():
            points = await self._collection.client.retrieve(
                self._collection.name, [*ids], with_payload=["state", "expires_at"]
            )
        now = self._clock()
        return [
            ids[str(each.id)]
            for each in points
            if (manifest := each.payload or {})["state"] == _COMPLETE
            and manifest["expires_at"] >= now
        ]

    async def renew(self, tenant: str, document_id: str) -> None:
        """Hold this retriever's claim for another `CLAIM_S` seconds."""
        until = {"claimed_until": self._clock() + CLAIM_S}
        await self._set(until | self._lifetime(), self._ours(tenant, document_id))

    async def release(self, tenant: str, document_id: str) -> None:
        """Give up this retriever's claim, so that the next who asks gets it."""
        await self._set({"claimed_until": 0.0}, self._ours(tenant, document_id))

    async def complete(self, tenant: str, document_id: str, stored: StoredDocument) -> None:
        """Declare that all chunks of a document are stored."""
        await self._write(tenant, document_id, stored)
        self._expires_at[tenant, document_id] = self._clock() + self._ttl_s

    async def refresh(self, tenant: str, document_ids: Sequence[str]) -> None:
        """Note that documents are used now; this writes once in a tenth of the time to live."""
        soon = self._clock() + self._ttl_s * (1 - _REFRESHED_SHARE)
        stale = [each for each in document_ids if self._expires_at.get((tenant, each), 0.0) <= soon]
        if stale:
            ids = qm.HasIdCondition(has_id=[_point_id(tenant, each) for each in stale])
            await self._set(self._lifetime(), qm.Filter(must=[ids]))
            now = self._clock()
            self._expires_at |= {(tenant, each): now + self._ttl_s for each in stale}

    async def revoke(self, tenant: str, document_id: str) -> None:
        """Declare that a document is not complete after all; the next who asks may claim it.

        A document that is being added again stays claimed.
        """
        lost = qm.Filter(must=[self._has_id(tenant, document_id), _equals("state", _COMPLETE)])
        await self._set({"state": _CLAIMED, "claimed_until": 0.0}, lost)

    async def find_expired(self) -> list[tuple[str, str]]:
        """Return tenant and id of some documents whose time has passed, of any tenant and index."""
        with self._collection.errors_named():
            points, _ = await self._collection.client.scroll(
                self._collection.name,
                scroll_filter=qm.Filter(must=[self._has_expired()]),
                limit=_EXPIRED_AT_ONCE,
                with_payload=["tenant", "manifest_of"],
            )
        payloads = [point.payload or {} for point in points]
        return [(each["tenant"], each["manifest_of"]) for each in payloads]

    async def list_documents(self, tenant: str) -> list[str]:
        """Return the ids of all documents of a tenant, of every index, complete or not."""
        found: list[str] = []
        is_manifest = qm.Filter(
            must=[_equals("tenant", tenant)],
            must_not=[qm.IsEmptyCondition(is_empty=qm.PayloadField(key="manifest_of"))],
        )
        offset: Any = None
        with self._collection.errors_named():
            while True:
                points, offset = await self._collection.client.scroll(
                    self._collection.name,
                    scroll_filter=is_manifest,
                    limit=_LISTED_AT_ONCE,
                    offset=offset,
                    with_payload=["manifest_of"],
                )
                found += [(point.payload or {})["manifest_of"] for point in points]
                if offset is None:
                    return found

    async def delete(self, tenant: str, document_id: str, *, if_expired: bool = False) -> None:
        """Delete a manifest; with `if_expired`, only if nobody has claimed or used it since."""
        self.forget(tenant, document_id)
        condition = [self._has_expired()] if if_expired else []
        chosen = qm.Filter(must=[self._has_id(tenant, document_id), *condition])
        with self._collection.errors_named():
            await self._collection.client.delete(
                self._collection.name, qm.FilterSelector(filter=chosen)
            )

    def forget(self, tenant: str, document_id: str) -> None:
        """Forget when a document expires."""
        self._expires_at.pop((tenant, document_id), None)

    async def _read(self, tenant: str, document_id: str) -> dict[str, Any] | None:
        with self._collection.errors_named():
            points = await self._collection.client.retrieve(
                self._collection.name, [_point_id(tenant, document_id)], with_payload=True
            )
        return points[0].payload if points else None

    async def _write(
        self,
        tenant: str,
        document_id: str,
        stored: StoredDocument | None = None,
        only_if: qm.Filter | None = None,
    ) -> None:
        """Write a manifest: a complete one if `stored` is given, else this retriever's claim."""
        payload = {
            "tenant": tenant,
            "manifest_of": document_id,
            "owner": self._owner,
            "state": _CLAIMED if stored is None else _COMPLETE,
            "claimed_until": self._clock() + CLAIM_S,
            "num_chunks": stored.num_chunks if stored else None,
            "num_tokens": stored.num_tokens if stored else None,
        }
        point = qm.PointStruct(
            id=_point_id(tenant, document_id), vector={}, payload=payload | self._lifetime()
        )
        with self._collection.errors_named():
            await self._collection.client.upsert(
                self._collection.name, [point], wait=True, update_filter=only_if
            )

    async def _set(self, payload: dict[str, Any], chosen: qm.Filter) -> None:
        with self._collection.errors_named():
            await self._collection.client.set_payload(
                self._collection.name, payload, points=qm.FilterSelector(filter=chosen), wait=True
            )

    def _lifetime(self) -> dict[str, float]:
        return {"expires_at": self._clock() + self._ttl_s}

    def _is_claimable(self, manifest: dict[str, Any]) -> bool:
        now = self._clock()
        is_free = manifest["state"] == _CLAIMED and manifest["claimed_until"] < now
        return bool(is_free or manifest["expires_at"] < now)

    def _claimable(self) -> qm.Filter:
        free = [_equals("state", _CLAIMED), _below("claimed_until", self._clock())]
        return qm.Filter(should=[qm.Filter(must=free), self._has_expired()])

    def _has_expired(self) -> qm.FieldCondition:
        return _below("expires_at", self._clock())

    def _ours(self, tenant: str, document_id: str) -> qm.Filter:
        mine = [_equals("owner", self._owner), _equals("state", _CLAIMED)]
        return qm.Filter(must=[self._has_id(tenant, document_id), *mine])

    def _has_id(self, tenant: str, document_id: str) -> qm.HasIdCondition:
        return qm.HasIdCondition(has_id=[_point_id(tenant, document_id)])


def chunk_point_ids(tenant: str, document_id: str, num_chunks: int) -> list[str]:
    """Return the ids of a document's points, the same in every process."""
    return [_uuid(tenant, document_id, str(index)) for index in range(num_chunks)]


def _point_id(tenant: str, document_id: str) -> str:
    return _uuid(tenant, document_id, "manifest")


def _uuid(*parts: str) -> str:
    return str(uuid5(NAMESPACE_URL, "\n".join(["rapid-chunks", *parts])))


def _equals(field: str, value: str) -> qm.FieldCondition:
    return qm.FieldCondition(key=field, match=qm.MatchValue(value=value))


def _below(field: str, limit: float) -> qm.FieldCondition:
    return qm.FieldCondition(key=field, range=qm.Range(lt=limit))

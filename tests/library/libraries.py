"""An index that remembers what it was given."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection

from rapid.chat_messages import Document, DocumentRef
from rapid.documents import name_text
from rapid.engine_status import Erasure
from rapid.errors import RapidError
from rapid.events import Reading, Tell


class FakeIndex:
    """Remembers documents; raises `failure` where there is one."""

    def __init__(self) -> None:
        self.documents: dict[tuple[str, str], Document] = {}
        self.failure: Exception | None = None

    async def index(self, tenant: str, document: Document, tell: Tell) -> None:
        if self.failure is not None:
            raise self.failure
        tell(Reading(1, 1, unit="passages"))
        self.documents[tenant, document.digest] = document

    async def forget(self, tenant: str, document: DocumentRef) -> list[Erasure]:
        return await self.forget_text(tenant, name_text(tenant, document.digest))

    async def forget_text(self, tenant: str, name: str) -> list[Erasure]:
        if self.failure is not None:
            raise self.failure
        keys = [key for key in self.documents if name_text(*key) == name]
        for key in keys:
            del self.documents[key]
        return [Erasure("index", 100, len(keys))]


class FakeTraces:
    """Engines with texts, by their names, which say of those `in_use` that they still need them."""

    def __init__(self) -> None:
        self.texts: set[str] = set()
        self.in_use: set[str] = set()
        self.reminded: frozenset[str] = frozenset()

    async def forget(self, name: str) -> list[Erasure]:
        if name in self.in_use:
            return [Erasure("engine: memory", 1000, 0, "in use")]
        num_found = int(name in self.texts)
        self.texts.discard(name)
        return [Erasure("engine: memory", 1000, num_found)]

    async def remind(self, find: Callable[[], Awaitable[Collection[str]]]) -> None:
        self.reminded = frozenset(await find())


class FakeReader:
    """Notes what it is to read, or raises `failure`."""

    def __init__(self, failure: RapidError | None = None) -> None:
        self.failure = failure
        self.read: list[tuple[str, DocumentRef]] = []

    async def prefill(self, tenant: str, document: DocumentRef) -> None:
        if self.failure is not None:
            raise self.failure
        self.read.append((tenant, document))

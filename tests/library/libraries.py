"""An index that remembers what it was given."""

from __future__ import annotations

from rapid.messages import Document, DocumentRef, Reading, Tell


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

    async def forget(self, tenant: str, document: DocumentRef) -> None:
        self.documents.pop((tenant, document.digest), None)

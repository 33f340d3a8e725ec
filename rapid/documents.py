"""The documents of a request that carry their texts."""

from __future__ import annotations

from collections.abc import Sequence

from rapid.errors import UnknownDocument
from rapid.messages import Document, DocumentRef


class InlineDocuments:
    """A `rapid.ports.DocumentResolver` that keeps nothing: a request brings its texts."""

    async def resolve(self, tenant: str, documents: Sequence[DocumentRef]) -> tuple[Document, ...]:
        """Return the documents, each of which carries its text.

        Raises:
            UnknownDocument: One does not.
        """
        inline = tuple(each for each in documents if isinstance(each, Document))
        if len(inline) < len(documents):
            names = [each.name for each in documents if not isinstance(each, Document)]
            raise UnknownDocument(f"no text is known of the documents {names}: send it")
        return inline

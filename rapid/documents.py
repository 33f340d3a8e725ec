"""The documents of a request that carry their texts."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from rapid.chat_messages import Document, DocumentRef
from rapid.errors import UnknownDocument


def name_text(tenant: str, digest: str) -> str:
    """Return the name, in hex, under which all that is made of a tenant's text is forgotten."""
    return blake2b(f"{tenant}\0{digest}".encode(), digest_size=16).hexdigest()


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

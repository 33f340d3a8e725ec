"""The texts of documents: those that a request carries, and how a process forgets one."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, Protocol
from weakref import WeakSet

from rapid.chat_messages import Document, DocumentRef
from rapid.engine_status import Erasure
from rapid.errors import UnknownDocument


class TextKeeper(Protocol):
    """An object that holds texts in memory, and drops one when its file is deleted."""

    def drop_text(self, name: str) -> Erasure:
        """Drop the text of a name (`name_text`), unless it is in use; on any thread."""
        ...


_KEEPERS: WeakSet[TextKeeper] = WeakSet()  # those of this process


def add_keeper(keeper: TextKeeper) -> None:
    """Have `forget_text` ask a keeper of texts for as long as that exists."""
    _KEEPERS.add(keeper)


def name_text(tenant: str, digest: str) -> str:
    """Return the name, in hex, under which all that is made of a tenant's text is forgotten."""
    return blake2b(f"{tenant}\0{digest}".encode(), digest_size=16).hexdigest()


def forget_text(_: object, name: str) -> Erasure:
    """Drop the text of a name that this process keeps, whatever the object is that runs here."""
    found = [each.drop_text(name) for each in [*_KEEPERS]]
    if any(each.num_found for each in found):
        gc.collect()  # calls that have ended hold what they were given until it comes by
    return Erasure(
        "texts",
        sum(each.num_bytes for each in found),
        sum(each.num_found for each in found),
        next((each.pending for each in found if each.pending), None),
    )


def keep_no_words(tokenizer: Any) -> None:
    """Have a tokenizer of transformers keep no words of the texts that it reads."""
    # Else each thread keeps ten thousand for as long as it lives, also of deleted texts: BPE has no
    # way to drop them. A million characters of English take 0.1 s longer.
    model: Any = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    if hasattr(model, "_resize_cache"):
        model._resize_cache(0)


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

"""The stored documents that a question names, put into its request."""

from __future__ import annotations

from dataclasses import replace

from deployments.api.dialect import StoredNames
from library.library_access import LibraryAccess
from rapid.errors import PromptTooLong, UnknownDocument
from rapid.messages import GenerateRequest


async def attach_stored(
    access: LibraryAccess | None,
    named: StoredNames | None,
    sent: GenerateRequest,
    max_characters: int | None,
) -> GenerateRequest:
    """Return a request with references to the stored documents that its caller names.

    Args:
        access: Where files are kept; None for a server that keeps none.
        named: The names; None for none.
        sent: The request.
        max_characters: The most characters of its documents; None for no bound.

    Raises:
        UnknownDocument: One is not the caller's, or this server keeps no files.
        DocumentNotReady: One has not been read or indexed yet.
        PromptTooLong: The documents are too long together.
    """
    if named is None:
        return sent
    if access is None:
        raise UnknownDocument("This server keeps no files: send texts.", "rapid.documents")
    documents = (await access.get()).documents
    found = await documents.find(sent.tenant, named.file_ids, named.store_ids, named.filters)
    sent = replace(sent, documents=sent.documents + found)
    num_chars = sum(each.num_chars for each in sent.documents)
    if max_characters is not None and num_chars > max_characters:
        raise PromptTooLong(
            f"the documents have {num_chars} characters together, and this server takes "
            f"{max_characters} at most",
            "rapid.documents",
        )
    return sent

"""Stored documents in questions and answers: put into a request, and found again in its receipt."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from deployments.api.dialect import StoredNames
from deployments.api.files.objects import place_object
from library.library_access import LibraryAccess
from rapid.errors import PromptTooLong, RapidError, UnknownDocument
from rapid.messages import Finished, GenerateRequest, GenerationEvent
from rapid.receipt import Receipt


async def attach_stored(
    access: LibraryAccess | None,
    named: StoredNames | None,
    sent: GenerateRequest,
    max_characters: int | None,
) -> tuple[GenerateRequest, Mapping[str, str]]:
    """Return a request with references to the stored documents that its caller names.

    Args:
        access: Where files are kept; None for a server that keeps none.
        named: The names; None for none.
        sent: The request.
        max_characters: The most characters of its documents; None for no bound.

    Returns:
        The request, and the ids of the files by their documents' names in it.

    Raises:
        UnknownDocument: One is not the caller's, or this server keeps no files.
        DocumentNotReady: One has not been read or indexed yet.
        PromptTooLong: The documents are too long together.
    """
    if named is None:
        return sent, {}
    if access is None:
        raise UnknownDocument("This server keeps no files: send texts.", "rapid.documents")
    found = await (await access.get()).documents.find(
        sent.tenant,
        named.file_ids,
        named.store_ids,
        named.filters,
        [each.name for each in sent.documents],
    )
    documents = (*sent.documents, *(each.ref for each in found))
    num_chars = sum(each.num_chars for each in documents)
    if max_characters is not None and num_chars > max_characters:
        raise PromptTooLong(
            f"the documents have {num_chars} characters together, and this server takes "
            f"{max_characters} at most",
            "rapid.documents",
        )
    files = {each.ref.name: each.file_id for each in found}
    return replace(sent, documents=documents), files


async def add_places(
    events: AsyncIterator[GenerationEvent | None],
    access: LibraryAccess | None,
    files: Mapping[str, str],
) -> AsyncIterator[GenerationEvent | None]:
    """Yield events, of which the receipt says in which files, pages and lines its passages stand.

    A file that is deleted meanwhile, or a library that is away, leaves them out.
    """
    async for event in events:
        if isinstance(event, Finished) and files and access is not None:
            with suppress(RapidError, FileNotFoundError):
                event = replace(event, receipt=await _locate(event.receipt, access, files))
        yield event


async def _locate(receipt: Receipt, access: LibraryAccess, files: Mapping[str, str]) -> Receipt:
    spans = {(each.document, each.start, each.end) for each in receipt.chunks}
    if receipt.citations is not None:
        cited = receipt.citations.found
        spans |= {(each.document, each.document_start, each.document_end) for each in cited}
    library = await access.get()
    places: dict[tuple[str, int, int], dict[str, Any]] = {}
    for name in {name for name, _, _ in spans} & files.keys():
        layout = await library.documents.layout(files[name])
        for span in spans:
            if span[0] == name:
                place = place_object(layout.locate(*span[1:]))
                places[span] = {"file_id": files[name], **place}
    return replace(receipt, places=places)

"""Stored documents in questions and answers: put into a request, and found again in its receipt."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from deployments.api.files.objects import place_object
from deployments.api.http.dialect import StoredNames
from deployments.config.api_config import ApiConfig
from library.library_access import LibraryAccess
from rapid.errors import RapidError, UnknownDocument
from rapid.events import Finished, GenerationEvent
from rapid.messages import GenerateRequest
from rapid.receipt import Receipt


async def attach_stored(
    access: LibraryAccess | None,
    named: StoredNames | None,
    sent: GenerateRequest,
    config: ApiConfig,
) -> tuple[GenerateRequest, Mapping[str, str]]:
    """Return a request with references to the stored documents that its caller names.

    Args:
        access: Where files are kept; None for a server that keeps none.
        named: The names; None for none.
        sent: The request.
        config: The most characters of its documents.

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
    config.check_characters(num_chars, sent.model, "rapid.documents")
    files = {each.ref.name: each.file_id for each in found}
    messages = list(sent.messages)
    for each in found:
        if (place := named.places.get(each.file_id)) is not None:
            names = (*messages[place].documents, each.ref.name)
            messages[place] = replace(messages[place], documents=names)
    return replace(sent, documents=documents, messages=tuple(messages)), files


async def add_places(
    events: AsyncIterator[GenerationEvent | None],
    access: LibraryAccess | None,
    files: Mapping[str, str],
) -> AsyncIterator[GenerationEvent | None]:
    """Yield events, of which the receipt says in which files, pages and lines its passages stand.

    The file's id is always among them, as what is kept is found by it when the file is deleted.
    A file that is deleted meanwhile, or a library that is away, leaves out pages and lines.
    """
    async for event in events:
        if isinstance(event, Finished) and files and access is not None:
            event = replace(event, receipt=await _locate(event.receipt, access, files))
        yield event


async def _locate(receipt: Receipt, access: LibraryAccess, files: Mapping[str, str]) -> Receipt:
    spans = {(each.document, each.start, each.end) for each in receipt.chunks}
    spans |= {(each.document, each.start, each.end) for each in receipt.sections}
    if receipt.citations is not None:
        cited = receipt.citations.found
        spans |= {(each.document, each.document_start, each.document_end) for each in cited}
    places: dict[tuple[str, int, int], dict[str, Any]] = {
        span: {"file_id": files[span[0]]} for span in spans if span[0] in files
    }
    for name in {name for name, _, _ in places}:
        with suppress(RapidError, FileNotFoundError):
            layout = await (await access.get()).documents.layout(files[name])
            for span, place in places.items():
                if span[0] == name:
                    place |= place_object(layout.locate(*span[1:]))
    return replace(receipt, places=places)

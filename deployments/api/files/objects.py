"""OpenAI's objects of files and vector stores; what they have no field for is under ``rapid``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any, TypeVar

from library.parsing import Location
from library.storage.listing import ListedRow, Page
from library.storage.schema import DeletionRow, FileBatchRow, FileRow, StoreFileRow, VectorStoreRow

Json = dict[str, Any]
Row = TypeVar("Row", bound=ListedRow)
_STATUSES = ("in_progress", "completed", "failed", "cancelled")
_NS = 10**9  # in a second


def file_object(row: FileRow, progress: tuple[int, int] | None = None) -> Json:
    """Return a ``file``, with how many of its pages or passages are done while it is worked on."""
    return {
        "id": row.id,
        "object": "file",
        "bytes": row.num_bytes,
        "created_at": row.created // _NS,
        "expires_at": row.expires_at,
        "filename": row.filename,
        "purpose": row.purpose,
        "status": row.status,
        "status_details": row.error_message,
        "rapid": {
            "error_code": row.error_code,
            "media_type": row.media_type,
            "characters": row.num_chars,
            "pages": row.num_pages,
            "sha256": row.sha256,
            **_prefill_of(row),
            **_progress_of(progress),
        },
    }


def _prefill_of(row: FileRow) -> Json:
    """Return whether a target has read a file in advance, where that was asked for."""
    if row.prefill is None:
        return {}
    state, _, why = row.prefill.partition(": ")
    return {"prefill": state, **({"prefill_details": why} if why else {})}


def store_object(row: VectorStoreRow, counts: Counter[str], num_bytes: int) -> Json:
    """Return a ``vector_store`` whose files have these statuses."""
    days = row.expires_after_days
    return {
        "id": row.id,
        "object": "vector_store",
        "created_at": row.created // _NS,
        "name": row.name,
        "usage_bytes": num_bytes,
        "file_counts": file_counts(counts),
        "status": "in_progress" if counts["in_progress"] else "completed",
        "expires_after": None if days is None else {"anchor": "last_active_at", "days": days},
        "expires_at": None if days is None else row.last_active_at + 86400 * days,
        "last_active_at": row.last_active_at,
        "metadata": row.facts,
    }


def store_file_object(row: StoreFileRow, progress: tuple[int, int] | None = None) -> Json:
    """Return a ``vector_store.file``, with how much of it is done while it is worked on."""
    is_shown = row.status == "in_progress" and progress is not None
    error = None
    if row.error_code is not None:
        error = {"code": row.error_code, "message": row.error_message}
    return {
        "id": row.file_id,
        "object": "vector_store.file",
        "created_at": row.created // _NS,
        "usage_bytes": row.usage_bytes,
        "vector_store_id": row.store_id,
        "status": row.status,
        "last_error": error,
        "chunking_strategy": row.chunking,
        "attributes": row.attributes,
        **({"rapid": _progress_of(progress)} if is_shown else {}),
    }


def _progress_of(progress: tuple[int, int] | None) -> Json:
    return {} if progress is None else {"done": progress[0], "of": progress[1]}


def batch_object(row: FileBatchRow, counts: Counter[str]) -> Json:
    """Return a ``vector_store.file_batch`` whose files have these statuses."""
    status = "in_progress" if counts["in_progress"] else "completed"
    return {
        "id": row.id,
        "object": "vector_store.files_batch",
        "created_at": row.created // _NS,
        "vector_store_id": row.store_id,
        "status": "cancelled" if row.is_cancelled else status,
        "file_counts": file_counts(counts),
    }


def file_counts(counts: Counter[str]) -> Json:
    """Return the numbers of files by status, and of all."""
    return {each: counts[each] for each in _STATUSES} | {"total": counts.total()}


def list_object(page: Page[Row], render: Callable[[Row], Json]) -> Json:
    """Return a ``list`` with its cursors."""
    data = [render(row) for row in page.rows]
    return list_of(data, has_more=page.has_more)


def list_of(data: Iterable[Json], *, has_more: bool) -> Json:
    """Return a ``list`` of objects."""
    data = list(data)
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": has_more,
    }


def deletion_object(id_: str, kind: str) -> Json:
    """Return what a deletion answers."""
    return {"id": id_, "object": f"{kind}.deleted" if kind != "file" else kind, "deleted": True}


def certificate_object(row: DeletionRow | None) -> Json:
    """Return where the parts of a deleted file were looked for, and whether all are gone."""
    if row is None:
        return {}
    searched = [
        {
            "place": each["place"],
            "bytes": each["num_bytes"],
            "removed": each["num_found"],
            **({"pending": each["pending"]} if each["pending"] else {}),
        }
        for each in row.erasures
    ]
    state = "pending" if row.ended_at is None else "gone"
    return {"rapid": {"state": state, "searched": searched}}


def place_object(place: Location) -> Json:
    """Return where a passage stands: first and last page and line, and boxes on pages, in points.

    A file without pages has none, and one without known boxes neither.
    """
    found: Json = {"lines": [place.lines[0], place.lines[-1]]}
    if place.pages:
        found["pages"] = [place.pages[0], place.pages[-1]]
    if place.boxes:
        found["boxes"] = [asdict(each) for each in place.boxes]
    return found

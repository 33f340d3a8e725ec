"""The reading of ``multipart/form-data``, whose file goes to a temporary file on its way."""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import IO

from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from deployments.api.http.bodies import Bodies
from rapid.errors import BadRequest, LibraryFull

_MOST_FIELDS = 16  # beside the file; the SDK sends four at most
_FIELDS_BYTES = 64 * 1024  # of a form beside its file


@dataclass(frozen=True)
class Upload:
    """A form with one file; the file is closed by `read_upload`.

    Attributes:
        content: The file's bytes.
        fields: The other fields.
    """

    filename: str
    content: IO[bytes]
    fields: dict[str, str]


@asynccontextmanager
async def read_upload(
    request: Request, bodies: Bodies, tenant: str, max_bytes: int
) -> AsyncIterator[Upload]:
    """Read a form as it comes, and yield it.

    Raises:
        BadRequest: It is no form, or has not one field ``file``.
        BodyTooLarge: It is longer than a file of `max_bytes` may make it.
        LibraryFull: There is no room for it.
    """
    parts = bodies.upload(request, tenant, max_bytes + _FIELDS_BYTES)
    parser = MultiPartParser(
        request.headers, parts, max_files=1, max_fields=_MOST_FIELDS, max_part_size=_FIELDS_BYTES
    )
    try:
        form = await parser.parse()
    except (MultiPartException, UnicodeError, KeyError) as error:  # the last: it has no type
        why = getattr(error, "message", "its Content-Type names no charset of its names")
        raise BadRequest(f"The body is not multipart/form-data: {why}") from None
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise LibraryFull("The disk for uploads is full: try again later.") from error
    finally:
        await parts.aclose()
    try:
        file = form.get("file")
        if not isinstance(file, UploadFile) or file.filename is None:
            raise BadRequest(
                "file is missing: send it as a field of multipart/form-data.",
                "file",
                "missing_required_parameter",
            )
        fields = {name: value for name, value in form.items() if isinstance(value, str)}
        yield Upload(file.filename, file.file, fields)
    finally:
        await form.close()

"""Settings of the library: where files and what is known of them are kept."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from library.parsing import ParsingLimits
from rapid.config import Finite, Frozen


class LibraryConfig(Frozen):
    """Settings of the library.

    Attributes:
        folder: The folder that keeps the database and the files, unless `database` and `blobs`
            name other places. It must be on a disk of the one node on which all replicas run.
        database: URL of a PostgreSQL database, as ``postgresql://user@host/name``, which several
            nodes may use. None keeps an SQLite file in the folder. A password belongs into the
            environment (``PGPASSWORD``) or ``~/.pgpass``.
        blobs: URL of a store for the bytes of files, as ``s3://bucket/prefix``; None keeps them in
            the folder. Credentials come from the environment (``AWS_ACCESS_KEY_ID`` and so on).
        max_file_bytes: The longest file, in bytes.
        max_files: The most files of one tenant.
        max_bytes: The most bytes of one tenant's files, responses and conversations together.
        workers: Files that are read and indexed at once by each librarian.
        parsing_s: Seconds that one file may take to be read.
        parsing_bytes: Memory that reading one file may take, in bytes.
    """

    folder: Path = Path(".run/library")
    database: str | None = Field(None, pattern=r"^postgresql://")
    blobs: str | None = Field(None, pattern=r"^(s3|gs|az)://.")
    max_file_bytes: int = Field(512 * 2**20, ge=1)
    max_files: int = Field(10_000, ge=1)
    max_bytes: int = Field(10 * 2**30, ge=1)
    workers: int = Field(2, ge=1, le=16)
    parsing_s: Finite = Field(300.0, gt=0)
    parsing_bytes: int = Field(2**30, ge=128 * 2**20)

    @property
    def parsing_limits(self) -> ParsingLimits:
        """What reading one file may take."""
        return ParsingLimits(
            file_bytes=self.max_file_bytes,
            memory_bytes=self.parsing_bytes,
            cpu_s=math.ceil(self.parsing_s),
            wall_s=self.parsing_s,
        )

    @model_validator(mode="after")
    def _several_nodes_share_both(self) -> Self:
        if (self.database is None) != (self.blobs is None):
            raise ValueError(
                "library.database and library.blobs go together: set both for several nodes, or "
                "none for one"
            )
        return self

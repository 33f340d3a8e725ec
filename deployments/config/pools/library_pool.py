"""Settings of the library in an application: the librarian's replicas beside what they keep."""

from __future__ import annotations

from typing import Self

from pydantic import model_validator

from cluster.placement import PoolConfig
from library.library_config import LibraryConfig


class LibraryPoolConfig(LibraryConfig):
    """Settings of the library, and of the replicas that read and index its files.

    Attributes:
        pool: Settings of the librarian's replicas.
    """

    pool: PoolConfig = PoolConfig()

    @property
    def kept(self) -> LibraryConfig:
        """The settings that every process needs that opens the library."""
        own = {name: getattr(self, name) for name in LibraryConfig.model_fields}
        return LibraryConfig.model_construct(**own | {"folder": self.folder.absolute()})

    @model_validator(mode="after")
    def _a_folder_has_one_librarian(self) -> Self:
        if self.database is None and self.pool.max_replicas > 1:
            raise ValueError(
                "a library in a folder has one librarian: set library.pool.max_replicas to 1, or "
                "library.database and library.blobs"
            )
        return self

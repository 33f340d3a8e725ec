"""The tables of the library, as SQLAlchemy maps them; `migrations` makes them.

Every row has its tenant, and every look-up names one. Times are seconds since the epoch, except
``created``, which is in nanoseconds: rows are listed in its order.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON, BigInteger, ForeignKey, Index, Integer, String
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class Base(DeclarativeBase):
    """The base of all tables."""

    type_annotation_map = {dict[str, Any]: JSON, str: String(512), int: BigInteger}  # noqa: RUF012


class FileRow(Base):
    """A file that a tenant uploaded.

    Attributes:
        status: ``uploaded`` until it is read, then ``processed``, or ``error``; ``deleting`` once
            its deletion was asked for.
        digest: Hash of its text, as `rapid.messages.DocumentRef` has it; None until it is read.
    """

    __tablename__ = "files"
    __table_args__ = (
        Index("files_of_tenant", "tenant", "created"),
        Index("files_by_digest", "tenant", "digest"),
        Index("files_by_expiry", "expires_at"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    tenant: Mapped[str]
    filename: Mapped[str]
    purpose: Mapped[str]
    num_bytes: Mapped[int]
    sha256: Mapped[str]
    created: Mapped[int]
    expires_at: Mapped[int | None]
    status: Mapped[str]
    error_code: Mapped[str | None]
    error_message: Mapped[str | None] = mapped_column(String(2048))
    media_type: Mapped[str | None]
    digest: Mapped[str | None]
    num_chars: Mapped[int | None]
    num_pages: Mapped[int | None]


class VectorStoreRow(Base):
    """A named set of files that are searched together.

    Attributes:
        expires_after_days: Days after its last use at which it expires; None for never.
        facts: The caller's ``metadata``.
    """

    __tablename__ = "vector_stores"
    __table_args__ = (Index("stores_of_tenant", "tenant", "created"),)

    id: Mapped[str] = mapped_column(primary_key=True)
    tenant: Mapped[str]
    name: Mapped[str]
    facts: Mapped[dict[str, Any]]
    created: Mapped[int]
    last_active_at: Mapped[int]
    expires_after_days: Mapped[int | None]


class StoreFileRow(Base):
    """A file in a vector store.

    Attributes:
        status: ``in_progress``, ``completed``, ``failed`` or ``cancelled``.
        attributes: What filters look at: numbers, strings and booleans by name.
        chunking: The ``chunking_strategy`` as it was asked for.
        usage_bytes: Bytes of the text that is searched.
    """

    __tablename__ = "vector_store_files"
    __table_args__ = (
        Index("stores_of_file", "file_id"),
        Index("files_of_batch", "batch_id"),
    )

    store_id: Mapped[str] = mapped_column(
        ForeignKey("vector_stores.id", ondelete="CASCADE"), primary_key=True
    )
    file_id: Mapped[str] = mapped_column(
        ForeignKey("files.id", ondelete="CASCADE"), primary_key=True
    )
    tenant: Mapped[str]
    created: Mapped[int]
    status: Mapped[str]
    error_code: Mapped[str | None]
    error_message: Mapped[str | None] = mapped_column(String(2048))
    attributes: Mapped[dict[str, Any]]
    chunking: Mapped[dict[str, Any]]
    usage_bytes: Mapped[int]
    batch_id: Mapped[str | None] = mapped_column(ForeignKey("file_batches.id", ondelete="SET NULL"))


class FileBatchRow(Base):
    """Files that were put into a vector store together."""

    __tablename__ = "file_batches"

    id: Mapped[str] = mapped_column(primary_key=True)
    store_id: Mapped[str] = mapped_column(ForeignKey("vector_stores.id", ondelete="CASCADE"))
    tenant: Mapped[str]
    created: Mapped[int]
    is_cancelled: Mapped[bool]


class JobRow(Base):
    """Work that is still to be done for a tenant; who does it holds a lease.

    Attributes:
        kind: ``read`` a file, ``index`` it for a vector store, or ``delete`` it.
        file_id: The file.
        store_id: The vector store of an ``index`` job, else empty.
        attempts: How often it was begun.
        due_at: When it may be begun.
        owner: Who holds the lease, which ends at `leased_until`; empty for nobody.
        num_done: How far it is, of `num_all`, in the unit of its stage: pages or passages.
    """

    __tablename__ = "jobs"
    __table_args__ = (
        Index("jobs_of_file", "file_id", "kind", "store_id", unique=True),
        Index("jobs_due", "due_at"),
    )

    id: Mapped[int] = mapped_column(
        BigInteger().with_variant(Integer(), "sqlite"), primary_key=True
    )
    tenant: Mapped[str]
    kind: Mapped[str]
    file_id: Mapped[str]
    store_id: Mapped[str]
    attempts: Mapped[int]
    due_at: Mapped[float]
    owner: Mapped[str]
    leased_until: Mapped[float]
    num_done: Mapped[int]
    num_all: Mapped[int]

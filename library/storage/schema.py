"""The tables of the library, as SQLAlchemy maps them; `migrations` makes them.

Every row has its tenant, and every look-up for a tenant names it. Times are seconds since the
epoch, except ``created`` and ``changed``, which are in nanoseconds: rows are listed in their order.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON, BigInteger, ForeignKey, Index, Integer, String
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class Base(DeclarativeBase):
    """The base of all tables."""

    type_annotation_map = {  # noqa: RUF012
        dict[str, Any]: JSON,
        list[dict[str, Any]]: JSON,
        list[Any]: JSON,
        str: String(512),
        int: BigInteger,
    }


class FileRow(Base):
    """A file that a tenant uploaded.

    Attributes:
        status: ``uploaded`` until it is read, then ``processed``, or ``error``; ``deleting`` once
            its deletion was asked for.
        digest: Hash of its text, as of `rapid.chat_messages.Document`; None until it is read.
        prefill: Whether a target has read it in advance: ``queued``, ``done``, or ``failed: why``;
            None where that was not asked for.
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
    prefill: Mapped[str | None]


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


class DeletionRow(Base):
    """The certificate of a deletion, under a hash of the file's id (`library.files.deletions`).

    Attributes:
        ended_at: When everything was gone; None until then.
        text_name: Name of the text, as `rapid.documents.name_text` makes it; None if it was not
            read.
        erasures: What was done in each place, as `rapid.engine_status.Erasure` has it.
    """

    __tablename__ = "deletions"
    __table_args__ = (Index("deletions_by_end", "ended_at"),)

    id: Mapped[str] = mapped_column(primary_key=True)
    tenant: Mapped[str]
    began_at: Mapped[float]
    ended_at: Mapped[float | None]
    text_name: Mapped[str | None]
    erasures: Mapped[list[dict[str, Any]]]


class JobRow(Base):
    """Work that is still to be done for a tenant; who does it holds a lease.

    Attributes:
        kind: ``read`` a file, ``index`` it for a vector store, ``prefill`` a target with it,
            ``delete`` it, or ``forget`` a text that was deleted once more.
        file_id: The file; of ``forget`` the name of the text.
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


class ResponseRow(Base):
    """A response that is kept after its answer, or meanwhile if it is in the background.

    Attributes:
        previous_id: The response that it goes on from; None for the first of a chain.
        response: OpenAI's object, as it was at the end, or lately.
        input_items: What was new in its request, as items with ids.
        steps: How its output grew, as a stream told it.
        attached: The stored documents that were named beside the items, as fields of ``rapid``.
        num_bytes: Bytes of the four above.
        owner: Who answers it and holds the lease, which ends at `leased_until`; empty once it has
            ended.
    """

    __tablename__ = "responses"
    __table_args__ = (
        Index("responses_by_expiry", "expires_at"),
        Index("responses_of_tenant", "tenant"),
        Index("sizes_of_responses", "tenant", "num_bytes"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    tenant: Mapped[str]
    created: Mapped[int]
    expires_at: Mapped[int]
    previous_id: Mapped[str | None]
    response: Mapped[dict[str, Any]]
    input_items: Mapped[list[dict[str, Any]]]
    steps: Mapped[list[Any]]
    attached: Mapped[dict[str, Any]]
    num_bytes: Mapped[int] = mapped_column(server_default="0")
    owner: Mapped[str] = mapped_column(server_default="")
    leased_until: Mapped[float] = mapped_column(server_default="0")


class ConversationRow(Base):
    """A conversation, whose items may be of many responses.

    Attributes:
        facts: The caller's ``metadata``.
    """

    __tablename__ = "conversations"
    __table_args__ = (Index("conversations_of_tenant", "tenant"),)

    id: Mapped[str] = mapped_column(primary_key=True)
    tenant: Mapped[str]
    created: Mapped[int]
    facts: Mapped[dict[str, Any]]


class ConversationItemRow(Base):
    """An item of a conversation, in OpenAI's form, and its bytes."""

    __tablename__ = "conversation_items"
    __table_args__ = (
        Index("items_of_conversation", "conversation_id", "created"),
        Index("sizes_of_conversation_items", "conversation_id", "num_bytes"),
    )

    conversation_id: Mapped[str] = mapped_column(
        ForeignKey("conversations.id", ondelete="CASCADE"), primary_key=True
    )
    id: Mapped[str] = mapped_column(primary_key=True)
    created: Mapped[int]
    item: Mapped[dict[str, Any]]
    num_bytes: Mapped[int] = mapped_column(server_default="0")


class KeyRow(Base):
    """An API key, which is known by its hash alone.

    Attributes:
        scopes: What it may be used for, of `library.accounts.callers.Scope`, with spaces between.
        expires_at: When it stops being taken by itself; None for never.
        revoked_at: When it was revoked; None for a key that was not.
    """

    __tablename__ = "api_keys"
    __table_args__ = (
        Index("keys_by_sha256", "sha256", unique=True),
        Index("keys_of_tenant", "tenant", "created"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    tenant: Mapped[str]
    sha256: Mapped[str]
    name: Mapped[str]
    scopes: Mapped[str]
    created: Mapped[int]
    expires_at: Mapped[int | None]
    revoked_at: Mapped[int | None]


class LimitsRow(Base):
    """What one tenant may have; None leaves a limit to the configuration.

    Attributes:
        requests_per_minute: Questions.
        tokens_per_minute: Tokens of prompts and answers.
        concurrent_answers: Answers in progress, at all replicas of the ingress together.
        long_prefills: Those among them whose long prompts are still being read.
        files: Files that are kept.
        bytes: Their bytes together.
        weight: Shares of the server that the tenant has while several ask.
    """

    __tablename__ = "tenant_limits"
    __table_args__ = (Index("limits_by_change", "changed"),)

    tenant: Mapped[str] = mapped_column(primary_key=True)
    requests_per_minute: Mapped[int | None]
    tokens_per_minute: Mapped[int | None]
    concurrent_answers: Mapped[int | None]
    long_prefills: Mapped[int | None]
    files: Mapped[int | None]
    bytes: Mapped[int | None]
    weight: Mapped[int | None]
    changed: Mapped[int]


class UsageRow(Base):
    """What one answer used.

    Attributes:
        request_id: The answer's own id, which it keeps when its stream is resumed; no caller
            chooses it.
        day: Day of the request in UTC, as ``2026-01-31``.
        target_s: Seconds that the answer took of the steps of the target's engines. What its
            tenant's answers before it took without saying so, as one that was left, is in it.
        drafter_s: The same of the drafter's.
        kv_byte_s: Bytes of KV by the seconds for which they were held, on all engines.
        status: ``ok``, ``failed``, or ``left`` where the caller did not wait for the end; ``again``
            where a row has what resuming another's answer took, and is no request.
    """

    __tablename__ = "usage"
    __table_args__ = (Index("usage_of_tenant", "tenant", "day"),)

    request_id: Mapped[str] = mapped_column(primary_key=True)
    tenant: Mapped[str]
    key_id: Mapped[str]
    model: Mapped[str]
    day: Mapped[str]
    prompt_tokens: Mapped[int]
    cached_tokens: Mapped[int]
    completion_tokens: Mapped[int]
    target_s: Mapped[float]
    drafter_s: Mapped[float]
    kv_byte_s: Mapped[float]
    status: Mapped[str]


class AuditRow(Base):
    """An administrative act.

    Attributes:
        actor: The tenant and the id of the key that did it.
        action: As ``keys.revoke``.
        subject: The id of what it was done to.
    """

    __tablename__ = "audit"

    id: Mapped[int] = mapped_column(
        BigInteger().with_variant(Integer(), "sqlite"), primary_key=True
    )
    at: Mapped[float]
    actor: Mapped[str]
    action: Mapped[str]
    subject: Mapped[str]

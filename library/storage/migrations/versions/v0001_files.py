"""The tables of files, vector stores and the work on them."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Make the tables."""
    op.create_table(
        "files",
        sa.Column("id", sa.String(length=512), nullable=False),
        sa.Column("tenant", sa.String(length=512), nullable=False),
        sa.Column("filename", sa.String(length=512), nullable=False),
        sa.Column("purpose", sa.String(length=512), nullable=False),
        sa.Column("num_bytes", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.String(length=512), nullable=False),
        sa.Column("created", sa.BigInteger(), nullable=False),
        sa.Column("expires_at", sa.BigInteger(), nullable=True),
        sa.Column("status", sa.String(length=512), nullable=False),
        sa.Column("error_code", sa.String(length=512), nullable=True),
        sa.Column("error_message", sa.String(length=2048), nullable=True),
        sa.Column("media_type", sa.String(length=512), nullable=True),
        sa.Column("digest", sa.String(length=512), nullable=True),
        sa.Column("num_chars", sa.BigInteger(), nullable=True),
        sa.Column("num_pages", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("files_by_digest", "files", ["tenant", "digest"], unique=False)
    op.create_index("files_by_expiry", "files", ["expires_at"], unique=False)
    op.create_index("files_of_tenant", "files", ["tenant", "created"], unique=False)
    op.create_table(
        "jobs",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("tenant", sa.String(length=512), nullable=False),
        sa.Column("kind", sa.String(length=512), nullable=False),
        sa.Column("file_id", sa.String(length=512), nullable=False),
        sa.Column("store_id", sa.String(length=512), nullable=False),
        sa.Column("attempts", sa.BigInteger(), nullable=False),
        sa.Column("due_at", sa.Double(), nullable=False),
        sa.Column("owner", sa.String(length=512), nullable=False),
        sa.Column("leased_until", sa.Double(), nullable=False),
        sa.Column("num_done", sa.BigInteger(), nullable=False),
        sa.Column("num_all", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("jobs_due", "jobs", ["due_at"], unique=False)
    op.create_index("jobs_of_file", "jobs", ["file_id", "kind", "store_id"], unique=True)
    op.create_table(
        "vector_stores",
        sa.Column("id", sa.String(length=512), nullable=False),
        sa.Column("tenant", sa.String(length=512), nullable=False),
        sa.Column("name", sa.String(length=512), nullable=False),
        sa.Column("facts", sa.JSON(), nullable=False),
        sa.Column("created", sa.BigInteger(), nullable=False),
        sa.Column("last_active_at", sa.BigInteger(), nullable=False),
        sa.Column("expires_after_days", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("stores_of_tenant", "vector_stores", ["tenant", "created"], unique=False)
    op.create_table(
        "file_batches",
        sa.Column("id", sa.String(length=512), nullable=False),
        sa.Column("store_id", sa.String(length=512), nullable=False),
        sa.Column("tenant", sa.String(length=512), nullable=False),
        sa.Column("created", sa.BigInteger(), nullable=False),
        sa.Column("is_cancelled", sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(["store_id"], ["vector_stores.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_table(
        "vector_store_files",
        sa.Column("store_id", sa.String(length=512), nullable=False),
        sa.Column("file_id", sa.String(length=512), nullable=False),
        sa.Column("tenant", sa.String(length=512), nullable=False),
        sa.Column("created", sa.BigInteger(), nullable=False),
        sa.Column("status", sa.String(length=512), nullable=False),
        sa.Column("error_code", sa.String(length=512), nullable=True),
        sa.Column("error_message", sa.String(length=2048), nullable=True),
        sa.Column("attributes", sa.JSON(), nullable=False),
        sa.Column("chunking", sa.JSON(), nullable=False),
        sa.Column("usage_bytes", sa.BigInteger(), nullable=False),
        sa.Column("batch_id", sa.String(length=512), nullable=True),
        sa.ForeignKeyConstraint(["batch_id"], ["file_batches.id"], ondelete="SET NULL"),
        sa.ForeignKeyConstraint(["file_id"], ["files.id"], ondelete="CASCADE"),
        sa.ForeignKeyConstraint(["store_id"], ["vector_stores.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("store_id", "file_id"),
    )
    op.create_index("files_of_batch", "vector_store_files", ["batch_id"], unique=False)
    op.create_index("stores_of_file", "vector_store_files", ["file_id"], unique=False)

"""The certificates of deletions, and whether a file is read into the KV of a target."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Make the table and the column."""
    op.add_column("files", sa.Column("prefill", sa.String(length=512), nullable=True))
    op.create_table(
        "deletions",
        sa.Column("id", sa.String(length=512), nullable=False),
        sa.Column("tenant", sa.String(length=512), nullable=False),
        sa.Column("began_at", sa.Double(), nullable=False),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.Column("text_name", sa.String(length=512), nullable=True),
        sa.Column("erasures", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("deletions_by_end", "deletions", ["ended_at"], unique=False)

"""The sizes of responses and of items of conversations, which count into what a tenant may have."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    """Add the sizes, and the indexes that sum them without reading what they are the sizes of."""
    kept = {
        "responses": ("tenant", ("response", "input_items", "steps", "attached")),
        "conversation_items": ("conversation_id", ("item",)),
    }
    for table, (owner, columns) in kept.items():
        size = sa.Column("num_bytes", sa.BigInteger(), nullable=False, server_default="0")
        op.add_column(table, size)
        lengths = " + ".join(f"length(CAST({each} AS TEXT))" for each in columns)
        op.execute(f"UPDATE {table} SET num_bytes = {lengths}")
        op.create_index(f"sizes_of_{table}", table, [owner, "num_bytes"], unique=False)

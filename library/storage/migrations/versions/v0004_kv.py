"""A column of the usage ledger: bytes of KV by the seconds for which answers held them."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Add the column."""
    kept: sa.Column[float] = sa.Column("kv_byte_s", sa.Double(), nullable=False, server_default="0")
    op.add_column("usage", kept)

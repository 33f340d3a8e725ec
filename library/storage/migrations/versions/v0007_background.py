"""Who answers a response in the background, and until when that is known."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    """Add the columns."""
    owner: sa.Column[str] = sa.Column(
        "owner", sa.String(length=512), nullable=False, server_default=""
    )
    until: sa.Column[float] = sa.Column(
        "leased_until", sa.Double(), nullable=False, server_default="0"
    )
    op.add_column("responses", owner)
    op.add_column("responses", until)

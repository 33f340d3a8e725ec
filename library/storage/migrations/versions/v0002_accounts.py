"""The tables of keys, limits, usage and administrative acts."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def _text(name: str) -> sa.Column[str]:
    return sa.Column(name, sa.String(length=512), nullable=False)


def _number(name: str, *, is_optional: bool = False) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger(), nullable=is_optional)


def upgrade() -> None:
    """Make the tables."""
    op.create_table(
        "api_keys",
        *map(_text, ("id", "tenant", "sha256", "name", "scopes")),
        _number("created"),
        _number("expires_at", is_optional=True),
        _number("revoked_at", is_optional=True),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("keys_by_sha256", "api_keys", ["sha256"], unique=True)
    op.create_index("keys_of_tenant", "api_keys", ["tenant", "created"], unique=False)
    rates = ("requests_per_minute", "tokens_per_minute", "concurrent_answers", "long_prefills")
    op.create_table(
        "tenant_limits",
        _text("tenant"),
        *(_number(name, is_optional=True) for name in (*rates, "files", "bytes", "weight")),
        _number("changed"),
        sa.PrimaryKeyConstraint("tenant"),
    )
    op.create_index("limits_by_change", "tenant_limits", ["changed"], unique=False)
    op.create_table(
        "usage",
        *map(_text, ("request_id", "tenant", "key_id", "model", "day")),
        *map(_number, ("prompt_tokens", "cached_tokens", "completion_tokens")),
        sa.Column("target_s", sa.Double(), nullable=False),
        sa.Column("drafter_s", sa.Double(), nullable=False),
        _text("status"),
        sa.PrimaryKeyConstraint("request_id"),
    )
    op.create_index("usage_of_tenant", "usage", ["tenant", "day"], unique=False)
    op.create_table(
        "audit",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        *map(_text, ("actor", "action", "subject")),
        sa.PrimaryKeyConstraint("id"),
    )

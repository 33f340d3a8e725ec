"""The tables of responses and conversations."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def _text(name: str, *, is_optional: bool = False) -> sa.Column[str]:
    return sa.Column(name, sa.String(length=512), nullable=is_optional)


def _number(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger(), nullable=False)


def _json(name: str) -> sa.Column[object]:
    return sa.Column(name, sa.JSON(), nullable=False)


def upgrade() -> None:
    """Make the tables."""
    op.create_table(
        "responses",
        *map(_text, ("id", "tenant")),
        *map(_number, ("created", "expires_at")),
        _text("previous_id", is_optional=True),
        *map(_json, ("response", "input_items", "steps", "attached")),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("responses_by_expiry", "responses", ["expires_at"], unique=False)
    op.create_index("responses_of_tenant", "responses", ["tenant"], unique=False)
    op.create_table(
        "conversations",
        *map(_text, ("id", "tenant")),
        _number("created"),
        _json("facts"),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("conversations_of_tenant", "conversations", ["tenant"], unique=False)
    op.create_table(
        "conversation_items",
        *map(_text, ("conversation_id", "id")),
        _number("created"),
        _json("item"),
        sa.ForeignKeyConstraint(["conversation_id"], ["conversations.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("conversation_id", "id"),
    )
    op.create_index(
        "items_of_conversation",
        "conversation_items",
        ["conversation_id", "created"],
        unique=False,
    )

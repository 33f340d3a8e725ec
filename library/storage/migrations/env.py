"""The environment of Alembic: `library.storage.database` gives it a connection."""

from alembic import context

from library.storage.schema import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    render_as_batch=True,
)
context.run_migrations()

"""The versions of the library's tables, in Alembic's form."""

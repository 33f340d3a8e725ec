from tests.library.conftest import database, postgres

__all__ = ["database", "postgres"]

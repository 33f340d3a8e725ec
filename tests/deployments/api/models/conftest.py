from tests.library.conftest import postgres, s3, s3_server

__all__ = ["postgres", "s3", "s3_server"]

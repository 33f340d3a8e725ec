"""What answers a question: the release of this server, and a model of it."""

from functools import cache
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version


@cache
def read_release() -> str:
    """Return the release of this server."""
    try:
        return version("rapid-serve")
    except PackageNotFoundError:  # run from a source tree
        return "source"


@cache
def fingerprint_of(model: str) -> str:
    """Return OpenAI's `system_fingerprint` of a model, which another release changes."""
    return f"fp_{sha256(f'{read_release()} {model}'.encode()).hexdigest()[:10]}"

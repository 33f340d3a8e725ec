"""The tests that `docs/security.md` names: ``python -m tests.security`` runs them."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parent.parent / "docs/security.md"
_NAME = re.compile(r"`((?:\w+/)*test_\w+\.py(?:::\w+)*)`")


def named_tests() -> list[str]:
    """Return the tests that the page names, as pytest takes them, in their order."""
    return list(dict.fromkeys(f"tests/{each}" for each in _NAME.findall(PAGE.read_text())))


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    sys.exit(pytest.main(["-m", "not gpu", *named_tests()]))

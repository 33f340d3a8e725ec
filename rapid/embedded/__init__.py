"""A tiny target and a larger drafter whose weights are part of the repository."""

from pathlib import Path

TARGET = Path(__file__).parent / "target"
DRAFTER = Path(__file__).parent / "drafter"

__all__ = ["DRAFTER", "TARGET"]

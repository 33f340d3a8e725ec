"""One thread per process: tests share the machine, and torch's threads fight each other on it."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

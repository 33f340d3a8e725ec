"""One thread per process: tests share the machine, and torch's threads fight each other on it."""

from __future__ import annotations

import os

from tests.ray_cluster import application, fakes, ray_cluster

__all__ = ["application", "fakes", "ray_cluster"]

os.environ.setdefault("OMP_NUM_THREADS", "1")

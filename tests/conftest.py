"""For every test: one compute thread, a Ray that listens on loopback alone, and it only once."""

from __future__ import annotations

import os

from tests.ray_cluster import application, fakes, ray_cluster

__all__ = ["application", "fakes", "ray_cluster"]

# Tests share the machine, and torch's threads, counted on import, fight each other on it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
import torch

# Ray's name for it: no cluster over the network, so its servers bind to 127.0.0.1.
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
# Kernels of ours run in Triton's interpreter where there is no device to compile them for.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

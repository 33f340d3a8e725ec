"""For every test: one compute thread, no deadlines, one Ray, which listens on loopback alone."""

from __future__ import annotations

import os

from hypothesis import settings

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

# Machines that test may be slow, and nothing here is measured by the clock.
settings.register_profile("no deadline", settings.default, deadline=None)
settings.load_profile("no deadline")

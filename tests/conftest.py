"""For every test: one compute thread, no deadlines, one Ray, which listens on loopback alone."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

from tests.ray_cluster import application, end_ray, fakes, ray_cluster

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

_LAST_OF_RAY: list[pytest.Item] = []


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Note the last test of Ray, whose idle applications take half a core from all others."""
    of_ray = [item for item in items if "ray_cluster" in getattr(item, "fixturenames", ())]
    _LAST_OF_RAY[:] = of_ray[-1:]


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """End Ray after its last test."""
    if item in _LAST_OF_RAY:
        end_ray()

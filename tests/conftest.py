"""For every test: one compute thread, no deadlines, one Ray, which listens on loopback alone."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path

import pytest
from hypothesis import settings

from tests.ray_cluster import application, end_application, end_ray, fakes, ray_cluster

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

# Marks of few files; a file that does not name the one that -m asks for need not be imported.
_NAMED = ("ray", "slow", "gpu")
# In this order: an idle application takes half a core from all tests that run beside it.
_APPLICATIONS = ("fakes", "application")
_LAST_OF: dict[str, pytest.Item] = {}


def _names(path: Path, mark: str) -> bool:
    return f"pytest.mark.{mark}" in path.read_text(encoding="utf-8")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files without a test that has the marks asked for: to import all takes long."""
    asked = config.option.markexpr
    is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    if not is_test or not re.fullmatch(r"(not )?\w+( and (not )?\w+)*", asked):
        return None
    wanted = set(_NAMED).intersection(asked.split(" and "))
    return not all(_names(collection_path, mark) for mark in wanted) or None


@pytest.hookimpl(tryfirst=True)  # before any are deselected
def pytest_itemcollected(item: pytest.Item) -> None:
    """A test that has one of these marks by way of another file would be left out silently."""
    for mark in _NAMED:
        if item.get_closest_marker(mark) and not _names(item.path, mark):
            raise pytest.UsageError(f"{item.nodeid}: write pytest.mark.{mark} in this file")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run tests of one application after each other, and note the last of each and of Ray."""
    items.sort(key=lambda item: [name in _fixtures(item) for name in _APPLICATIONS])
    _LAST_OF.update((name, item) for item in items for name in _fixtures(item))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """End each application after its last test, and Ray after its own."""
    for name in _APPLICATIONS:
        if _LAST_OF.get(name) is item:
            end_application(name)
    if _LAST_OF.get("ray_cluster") is item:
        end_ray()


def _fixtures(item: pytest.Item) -> Collection[str]:
    """The fixtures of a test of Ray."""
    names = getattr(item, "fixturenames", ())
    return names if "ray_cluster" in names else ()

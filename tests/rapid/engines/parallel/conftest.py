"""A model in two processes, which tests share, and the processes that hold parts of models."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress

import psutil
import pytest

from rapid.engines.forward.weights.loading import LoadedModel
from rapid.engines.parallel.leading import load_replica
from tests.rapid.tiny_models import engine_config


@pytest.fixture(scope="package")
def in_two() -> Iterator[LoadedModel]:
    """A tiny model in two processes."""
    model = load_replica(engine_config(tensor_parallel=2))
    yield model
    assert model.followers is not None
    model.followers.close()
    assert not followers_of(os.getpid())


def followers_of(pid: int) -> list[psutil.Process]:
    """The processes that hold parts of models for a process."""
    found = []
    for child in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.Error):  # of another test, and about to end
            if "rapid.engines.parallel.follower" in " ".join(child.cmdline()):
                found.append(child)
    return found

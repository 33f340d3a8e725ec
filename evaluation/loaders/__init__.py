"""Loaders of items: modules with ``load(source, data) -> Iterator[Item]``, named by tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import islice
from pathlib import Path

from evaluation.items import Item
from evaluation.tasks import Source, Task
from rapid.errors import ConfigurationError

LOADERS = ("aa_lcr", "dialogue", "generated", "infinitebench", "longbench_v2", "real_text")

Load = Callable[[Source, Path | None], Iterator[Item]]


def load_items(task: Task, data: Path | None = None, limit: int | None = None) -> list[Item]:
    """Load the first `limit` items of `task`, or all, from `data` instead of its hub dataset.

    `data` is a file, or a directory that holds the source's `file`.

    Raises:
        ConfigurationError: The loader is unknown, there are no items, or two items have one id.
    """
    name = task.source.loader
    if name not in LOADERS:
        raise ConfigurationError(
            f"task {task.name}: there is no loader {name!r}; known: {', '.join(LOADERS)}"
        )
    if data is not None and data.is_dir() and task.source.file is not None:
        data = data / task.source.file
    load: Load = import_module(f"evaluation.loaders.{name}").load
    items = list(islice(load(task.source, data), limit))
    if not items:
        raise ConfigurationError(f"task {task.name}: {data or task.source.hub} has no usable item")
    seen: set[str] = set()
    for item in items:
        if item.id in seen:
            raise ConfigurationError(
                f"task {task.name}: two items have the id {item.id!r}; runs resume by it"
            )
        seen.add(item.id)
    return items

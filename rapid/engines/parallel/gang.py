"""The ranks of one model together, as the first of them, the engine's own process, leads them."""

from __future__ import annotations

import contextlib
import functools
import itertools
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, as_completed
from pathlib import Path

import torch

from rapid.config import EngineConfig
from rapid.engines.forward.sharding.group import Group
from rapid.engines.forward.sharding.meeting import AtAddress, InFile, Meeting, open_store
from rapid.engines.forward.sharding.shards import Shard
from rapid.engines.parallel.followers import Followers, OnLost
from rapid.engines.parallel.machines import Machines, listening, start_ranks
from rapid.engines.parallel.orders import Load, Meet, Order
from rapid.engines.parallel.starting import Started, start_here
from rapid.errors import ConfigurationError, EngineFailed


class Gang:
    """The followers of one model; they end with this object, or with its process."""

    def __init__(self, config: EngineConfig, machines: Machines | None = None) -> None:
        """Start the followers, on all machines, which begin to load their parts of a model."""
        self.size = config.tensor_parallel
        self._turn = threading.Lock()
        self._numbers = itertools.count()
        self._place = contextlib.ExitStack()
        self._meeting = self._open(machines)
        self._followers = Followers(functools.partial(_start, self.size, machines))
        self._ending = weakref.finalize(self, self._followers.end)
        shards = [Shard(rank, self.size) for rank in range(1, self.size)]
        self._followers.tell([Load(config, shard, self._meeting) for shard in shards])

    def _open(self, machines: Machines | None) -> Meeting:
        """Return a place for the ranks to meet."""
        if machines is None:
            folder = tempfile.TemporaryDirectory(prefix="rapid-ranks-")
            return InFile(str(Path(self._place.enter_context(folder)) / "meeting"))
        store = open_store(listening(machines.host))
        self._place.callback(lambda: store)  # it is open as long as it is kept
        return AtAddress(machines.host, store.port)

    def check_loaded(self, fingerprint: str) -> None:
        """Wait until every follower has loaded its part of the same files.

        Raises:
            ConfigurationError: One could not, or has other files.
        """
        loading = self._followers.loaded
        for done in as_completed(loading):
            rank, loaded = 1 + loading.index(done), done.result()
            if loaded.error is not None:
                raise ConfigurationError(
                    f"rank {rank} of {self.size} could not load: {loaded.error}"
                )
            if loaded.fingerprint != fingerprint:
                raise ConfigurationError(
                    f"rank {rank} of {self.size} reads other files of the model than the first: "
                    "give every process the same checkpoint"
                )

    def meet(self, device: torch.device) -> Group:
        """Connect all ranks."""
        self._followers.tell_all(Meet())
        return Group(self._meeting, 0, self.size, device)

    def number(self) -> int:
        """Return a number that nothing else of the model has: of an engine, or of a question."""
        return next(self._numbers)

    def watch(self, engine: int, on_lost: OnLost) -> None:
        """Have a function called, on any thread, with what happened when the gang is broken."""
        self._followers.on_lost[engine] = on_lost
        if self._followers.is_broken:
            on_lost("a process that holds a part of its model is lost")

    def forget(self, engine: int) -> None:
        """Call the engine's function no more."""
        self._followers.on_lost.pop(engine, None)

    @contextlib.contextmanager
    def give_order(self, order: Order) -> Iterator[None]:
        """Give every follower an order, while this rank does the same.

        All ranks do one thing at a time and in one order, also where several engines share the
        model. If this rank fails, the others may wait for it, so the gang is broken: no order is
        taken any more, and the engines are told once the turn is over, which some may wait for.

        Raises:
            EngineFailed: A follower is gone, or the gang is broken.
        """
        try:
            with self._turn:
                if self._followers.is_broken:
                    raise EngineFailed("A process that holds a part of the model is gone.")
                try:
                    self._followers.tell_all(order)
                    yield
                except BaseException:
                    self._followers.is_broken = True
                    raise
        except BaseException:
            self._followers.lose("a part of its model failed at a step")
            raise

    def ask(self, order: Callable[[int], Order]) -> Future[bool]:
        """Give all an order, made of its number, that they carry out beside others; on any thread.

        Return whether it goes well on all of them.
        """
        number = self.number()
        return self._followers.ask(number, order(number))

    def note(self, order: Order) -> None:
        """Give every follower an order without an answer, on any thread, or raise EngineFailed."""
        self._followers.tell_all(order)

    def close(self) -> None:
        """End the followers."""
        self._ending()
        self._place.close()


def _start(size: int, machines: Machines | None) -> list[Started]:
    """Start all ranks but the first."""
    num_here = size if machines is None else size // machines.number
    ranks = [start_here() for _ in range(1, num_here)]
    return ranks if machines is None else ranks + start_ranks(machines, size)

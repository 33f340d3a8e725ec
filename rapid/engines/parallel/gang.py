"""The processes that compute one model together, as the first of them sees the others.

The first rank is the engine's own process: it has the ledger, the scheduler, sampling and the
leases. The others follow. Each is started here, holds a part of the weights and of the KV, and runs
every forward that it is told. A follower that ends, or a forward that fails on any rank, closes the
engines: the ranks may no longer be in step. The end of this process ends the followers, who read
its orders from a socket.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path

import torch

from rapid.config import EngineConfig
from rapid.engines.forward.group import Group
from rapid.engines.forward.shards import Shard
from rapid.engines.parallel.orders import End, Load, Meet, Order
from rapid.errors import ConfigurationError, EngineFailed

logger = logging.getLogger(__name__)

_END_S = 5.0  # for a follower to end by itself

OnLost = Callable[[str], None]


@dataclass(slots=True)
class _Followers:
    """What the thread that watches the followers shares with their `Gang`.

    Attributes:
        members: Each follower's process and the pipe that it reads.
        on_lost: Called with what happened when one is lost, by the number of the engine.
        is_ending: Whether they were told to end.
        is_broken: Whether the ranks may no longer be in step, so that nothing more is computed.
    """

    members: list[tuple[subprocess.Popen[bytes], Connection]] = field(default_factory=list)
    on_lost: dict[int, OnLost] = field(default_factory=dict)
    is_ending: bool = False
    is_broken: bool = False

    def lose(self, why: str) -> None:
        """Close the engines of the model."""
        self.is_broken = True
        for on_lost in list(self.on_lost.values()):
            on_lost(why)

    def watch(self) -> None:
        """Wait for the end of a follower, which says nothing after it has loaded."""
        with contextlib.suppress(OSError):
            wait([pipe for _, pipe in self.members])
        if not self.is_ending:
            self.lose("a process that holds a part of its model has ended")

    def end(self) -> None:
        """Tell the followers to end, and kill those that do not."""
        self.is_ending = True
        for _, pipe in self.members:
            with contextlib.suppress(OSError):
                pipe.send(End())
        for process, pipe in self.members:
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            pipe.close()
        self.members.clear()


class Gang:
    """The followers of one model; they end with this object, or with its process.

    Attributes:
        size: Number of ranks, with this one.
    """

    def __init__(self, config: EngineConfig) -> None:
        """Start the followers, which begin to load their parts of `config`'s model."""
        self.size = config.tensor_parallel
        self._turn = threading.Lock()
        self._numbers = itertools.count()
        self._followers = _Followers()
        self._folder = tempfile.TemporaryDirectory(prefix="rapid-ranks-")
        self._meeting = Path(self._folder.name) / "meeting"
        self._ending = weakref.finalize(self, self._followers.end)
        for rank in range(1, self.size):
            self._followers.members.append(_started())
            shard = Shard(rank, self.size)
            self._followers.members[-1][1].send(Load(config, shard, str(self._meeting)))

    def check_loaded(self, fingerprint: str) -> None:
        """Wait until every follower has loaded its part of the same files.

        Raises:
            ConfigurationError: One could not, or has other files.
        """
        for rank, (_, pipe) in enumerate(self._followers.members, start=1):
            try:
                found, error = pipe.recv()
            except (EOFError, OSError):
                found, error = None, "its process ended; the log says why"
            if error is not None:
                raise ConfigurationError(f"rank {rank} of {self.size} could not load: {error}")
            if found != fingerprint:
                raise ConfigurationError(
                    f"rank {rank} of {self.size} reads other files of the model than the first: "
                    "give every process the same checkpoint"
                )

    def meet(self, device: torch.device) -> Group:
        """Connect all ranks, and watch the followers from then on."""
        self._tell(Meet())
        group = Group(self._meeting, 0, self.size, device)
        watching = threading.Thread(
            target=self._followers.watch, name="rapid-followers", daemon=True
        )
        watching.start()
        return group

    def number(self) -> int:
        """Return the number of a further engine of the model."""
        return next(self._numbers)

    def watch(self, engine: int, on_lost: OnLost) -> None:
        """Have a function called, on any thread, with what happened when the gang is broken."""
        self._followers.on_lost[engine] = on_lost
        if self._followers.is_broken:
            on_lost("a process that holds a part of its model has ended")

    def forget(self, engine: int) -> None:
        """Call the engine's function no more."""
        self._followers.on_lost.pop(engine, None)

    @contextlib.contextmanager
    def told(self, order: Order) -> Iterator[None]:
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
                    self._tell(order)
                    yield
                except BaseException:
                    self._followers.is_broken = True
                    raise
        except BaseException:
            self._followers.lose("a part of its model failed at a step")
            raise

    def close(self) -> None:
        """End the followers."""
        self._ending()
        self._folder.cleanup()

    def _tell(self, order: Order) -> None:
        try:
            for _, pipe in self._followers.members:
                pipe.send(order)
        except OSError as error:
            raise EngineFailed("A process that holds a part of the model is gone.") from error


def _started() -> tuple[subprocess.Popen[bytes], Connection]:
    """Start a follower; return it with the pipe that it reads."""
    ours, theirs = Pipe()
    paths: Sequence[str] = [path or os.getcwd() for path in sys.path]
    process = subprocess.Popen(
        [sys.executable, "-m", "rapid.engines.parallel.follower", str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for the first rank, whose end they follow
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    )
    theirs.close()
    return process, ours

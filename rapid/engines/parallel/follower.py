"""A process that holds one part of a model and does what the first rank tells it.

``python -m rapid.engines.parallel.follower FD`` is started by `rapid.engines.parallel.gang`, which
gives it orders through the socket FD. The process ends with that socket, wherever it is: a thread
reads it, so that even a collective that nobody else joins does not hold it.
"""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from rapid.checkpoints.files import checkpoint_source
from rapid.engines.forward.group import Group
from rapid.engines.forward.loading import LoadedModel, load_model
from rapid.engines.forward.opening import open_runner
from rapid.engines.forward.runner import Runner
from rapid.engines.forward.shards import Place, fingerprint
from rapid.engines.kv.host_tier import HostTier
from rapid.engines.parallel.orders import (
    AwaitCopies,
    Close,
    CopyPages,
    CopySlots,
    End,
    Forward,
    Load,
    Meet,
    Open,
    Order,
)

logger = logging.getLogger(__name__)


def follow(pipe: Connection) -> None:
    """Load a part of a model, then do as told until the end."""
    orders = _orders(pipe)
    load = orders.get()
    assert isinstance(load, Load)
    try:
        loaded = load_model(load.config, shard=load.shard)
        pipe.send((fingerprint(checkpoint_source(load.config.model)), None))
    except Exception as error:
        logger.exception("rank %d cannot load its part", load.shard.rank)
        pipe.send((None, f"{type(error).__name__}: {error}"))
        return
    meet = orders.get()
    if isinstance(meet, End):
        return
    assert isinstance(meet, Meet)
    group = Group(Path(load.meeting), load.shard.rank, load.shard.size, loaded.device)
    follower = Follower(replace(loaded, place=Place(load.shard, group)))
    while not isinstance(order := orders.get(), End):
        follower.do(order)


def _orders(pipe: Connection) -> queue.SimpleQueue[Order]:
    """Return the queue of a thread that reads a pipe and ends the process with it."""
    orders: queue.SimpleQueue[Order] = queue.SimpleQueue()

    def read() -> None:
        try:
            while True:
                orders.put(pipe.recv())
        except (EOFError, OSError):
            pass  # the first rank is gone
        finally:
            os._exit(0)  # nothing of this process is kept

    threading.Thread(target=read, name="rapid-orders", daemon=True).start()
    return orders


class Follower:
    """One rank's runners and KV, by the number of their engine."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._open: dict[int, tuple[Runner, HostTier | None, int]] = {}

    def do(self, order: Order) -> None:
        """Carry out an order.

        Raises:
            Exception: What the first rank should meet as well; if it does not, it loses this one.
        """
        match order:
            case Open(engine, config, vocab_size):
                if config.threads is not None:
                    import torch

                    torch.set_num_threads(config.threads)
                runner, host = open_runner(self._loaded, config, vocab_size)
                self._open[engine] = runner, host, config.page_tokens
            case Close(engine):
                host = self._open[engine][1]
                if host is not None:
                    host.wait()
                del self._open[engine]
            case Forward(engine, feeds):
                runner, _, page_tokens = self._open[engine]
                runner.run([feed.feed(page_tokens) for feed in feeds])
            case CopySlots(engine, sources, destinations, of_rings):
                self._open[engine][0].cache.copy(sources, destinations, of_rings=of_rings)
            case CopyPages(engine, pages, host_pages, is_restore):
                runner, host, _ = self._open[engine]
                assert host is not None
                host.follow(runner.cache, pages, host_pages, is_restore=is_restore)
            case AwaitCopies(engine, number):
                host = self._open[engine][1]
                assert host is not None
                host.await_copies(number)
            case _:
                raise AssertionError(f"a follower has no use for {order}")


if __name__ == "__main__":
    disable_progress_bar()  # the first rank shows one
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    follow(Connection(int(sys.argv[1])))

"""The loop of a follower, which computes one part of a model as the first rank orders."""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

from rapid.checkpoints.files import checkpoint_source
from rapid.config import EngineConfig
from rapid.engines.forward.opening import open_page_files, open_runner
from rapid.engines.forward.runner import Runner
from rapid.engines.forward.sharding.group import Group
from rapid.engines.forward.sharding.shards import RankPart, fingerprint
from rapid.engines.forward.weights.loading import LoadedModel, load_model
from rapid.engines.kv.tiers.host_tier import HostTier
from rapid.engines.parallel.orders import (
    BEAT_S,
    Answer,
    AwaitCopies,
    Beat,
    Close,
    CopyPages,
    CopySlots,
    Done,
    End,
    ForgetPages,
    Forward,
    Load,
    Loaded,
    Meet,
    Open,
    OpenFiles,
    Order,
    ReadPage,
    UsePages,
    WritePage,
    ZeroHostPages,
    ZeroSlots,
)
from rapid.engines.parallel.pages import FollowingFiles

logger = logging.getLogger(__name__)

Say = Callable[[Answer], None]

_MOST_SILENT = 60  # beats that the first rank may leave out, as while it loads
_MOST_UNTOLD = 300  # the same before it says anything: the ranks of all machines join first


def follow(pipe: Connection) -> None:
    """Load a part of a model, then do as told until the end."""
    orders = _orders(pipe)
    load = orders.get()
    assert isinstance(load, Load)
    try:
        loaded = load_model(load.config, shard=load.shard)
        pipe.send(Loaded(fingerprint(checkpoint_source(load.config.model)), None))
    except Exception as error:
        logger.exception("rank %d cannot load its part", load.shard.rank)
        pipe.send(Loaded(None, f"{type(error).__name__}: {error}"))
        return
    say = _voice(pipe)
    meet = orders.get()
    if isinstance(meet, End):
        return
    assert isinstance(meet, Meet)
    try:
        group = Group(load.meeting, load.shard.rank, load.shard.size, loaded.device)
        follower = Follower(replace(loaded, place=RankPart(load.shard, group)), say)
        while not isinstance(order := orders.get(), End):
            follower.do(order)
    except Exception:
        logger.exception("rank %d failed, and the model's engines close", load.shard.rank)
        os._exit(1)  # at once: the first rank may wait for this one
    os._exit(0)  # nothing of this process is kept


def _orders(pipe: Connection) -> queue.SimpleQueue[Order]:
    """Return the queue of a thread that reads a pipe and ends the process with it."""
    orders: queue.SimpleQueue[Order] = queue.SimpleQueue()

    def read() -> None:
        num_silent, most_silent = 0, _MOST_UNTOLD
        try:
            while num_silent <= most_silent:
                if not pipe.poll(BEAT_S):
                    num_silent += 1
                    continue
                num_silent, most_silent = 0, _MOST_SILENT
                if not isinstance(order := pipe.recv(), Beat):
                    orders.put(order)
        except (EOFError, OSError):
            pass  # the first rank is gone
        finally:
            os._exit(0)

    threading.Thread(target=read, name="rapid-orders", daemon=True).start()
    return orders


def _voice(pipe: Connection) -> Say:
    """Return how to answer: a thread does, which says in between that the process lives."""
    answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()

    def speak() -> None:
        while True:
            answer: Answer
            try:
                answer = answers.get(timeout=BEAT_S)
            except queue.Empty:
                answer = Beat()
            try:
                pipe.send(answer)
            except OSError:
                return  # the first rank is gone, and who reads its orders ends the process

    threading.Thread(target=speak, name="rapid-answers", daemon=True).start()
    return answers.put


@dataclass(slots=True)
class _Opened:
    """A follower's part of one engine: its runner, the tiers of its KV, and the settings."""

    runner: Runner
    host: HostTier | None
    config: EngineConfig
    files: FollowingFiles | None = None


class Follower:
    """One rank's runners and KV, by the number of their engine."""

    def __init__(self, loaded: LoadedModel, say: Say) -> None:
        self._loaded = loaded
        self._say = say
        self._open: dict[int, _Opened] = {}

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
                self._open[engine] = _Opened(*open_runner(self._loaded, config, vocab_size), config)
            case Close(engine):
                opened = self._open.pop(engine)
                if opened.files is not None:
                    opened.files.close()
                if opened.host is not None:
                    opened.host.wait()
            case Forward(engine, feeds):
                opened = self._open[engine]
                runner, page_tokens = opened.runner, opened.config.page_tokens
                runner.run([feed.feed(page_tokens, runner.device) for feed in feeds])
            case CopySlots(engine, sources, destinations, of_rings):
                cache = self._open[engine].runner.cache
                cache.copy(sources, destinations, of_rings=of_rings)
            case CopyPages(engine, pages, host_pages, is_restore):
                cache = self._open[engine].runner.cache
                self._host(engine).follow(cache, pages, host_pages, is_restore=is_restore)
            case ZeroSlots(engine, spans, of_rings):
                self._open[engine].runner.cache.zero(spans, of_rings=of_rings)
            case ZeroHostPages(engine, numbers):
                self._host(engine).wait()  # what landed on the first rank may be on its way here
                self._host(engine).zero(numbers)
            case AwaitCopies(engine, number):
                self._host(engine).await_copies(number)
            case OpenFiles(engine, number, context):
                self._say(Done(number, self._open_files(engine, context)))
            case ReadPage(engine) | WritePage(engine) | UsePages(engine) | ForgetPages(engine):
                files = self._open[engine].files if engine in self._open else None
                if files is not None:
                    files.do(order)
                elif not isinstance(order, UsePages):  # a thread's last order is late
                    self._say(Done(order.number, False))
            case _:
                raise AssertionError(f"a follower has no use for {order}")

    def _host(self, engine: int) -> HostTier:
        host = self._open[engine].host
        assert host is not None
        return host

    def _open_files(self, engine: int, context: bytes) -> bool:
        """Open the rank's page files; return whether their folder can be used."""
        opened, host = self._open[engine], self._host(engine)
        try:
            files = open_page_files(self._loaded, opened.config, host, context)
        except OSError:
            logger.exception("disk_cache_folder cannot be used by another process of the model")
            return False
        opened.files = FollowingFiles(files, host, self._say)
        return True

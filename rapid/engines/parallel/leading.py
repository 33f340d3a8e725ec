"""What the first rank computes, told to the others."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from typing_extensions import override

from rapid.checkpoints.files import checkpoint_source
from rapid.config import EngineConfig
from rapid.engines.attention.batch import Feed
from rapid.engines.forward.opening import (
    folder_of_pages,
    open_page_files,
    open_runner,
    page_context,
)
from rapid.engines.forward.runner import Runner
from rapid.engines.forward.sharding.shards import RankPart, Shard, fingerprint
from rapid.engines.forward.weights.loading import LoadedModel, load_model
from rapid.engines.kv.cache import KVCache, KVLayout
from rapid.engines.kv.tiers.disk_tier import DiskTier
from rapid.engines.kv.tiers.host_tier import HostTier, Move
from rapid.engines.kv.tiers.lanes import Mark
from rapid.engines.parallel.gang import Gang
from rapid.engines.parallel.machines import Machines
from rapid.engines.parallel.orders import (
    AwaitCopies,
    Close,
    CopyPages,
    CopySlots,
    Forward,
    Open,
    OpenFiles,
    PackedFeed,
    ZeroHostPages,
    ZeroSlots,
)
from rapid.engines.parallel.pages import LeadingDiskTier
from rapid.errors import ConfigurationError, EngineFailed

logger = logging.getLogger(__name__)


def load_replica(
    config: EngineConfig, *, with_pools: bool = False, machines: Machines | None = None
) -> LoadedModel:
    """Load a model in as many processes as `tensor_parallel` says; see `load_model`.

    The number of `machines`, if there is more than this one, divides that of the processes.

    Raises:
        ConfigurationError: As `load_model`, or a machine has too few GPUs, a follower could not
            load its part, or the ranks have different files.
        EngineFailed: Another machine cannot be reached.
    """
    if config.tensor_parallel == 1:
        return load_model(config, with_pools=with_pools)
    num_machines = 1 if machines is None else machines.number
    _check_devices(config, num_machines)
    gang = Gang(config, machines)
    try:
        shard = Shard(0, gang.size)
        loaded = load_model(config, with_pools=with_pools, shard=shard, num_machines=num_machines)
        gang.check_loaded(fingerprint(checkpoint_source(config.model)))
        place = RankPart(shard, gang.meet(loaded.device))
    except BaseException:
        gang.close()
        raise
    return replace(loaded, place=place, followers=gang)


def _check_devices(config: EngineConfig, num_machines: int) -> None:
    if config.device == "cpu" or not torch.cuda.is_available():
        return
    found, needed = torch.cuda.device_count(), config.tensor_parallel // num_machines
    if found < needed:
        many = "as many GPUs" if num_machines == 1 else f"{needed} GPUs of each machine"
        raise ConfigurationError(
            f"tensor_parallel: {config.tensor_parallel} needs {many}, and {found} are "
            "visible: give the engine more (pool.num_gpus), or lower it"
        )


def open_leading_runner(
    loaded: LoadedModel, config: EngineConfig, vocab_size: int
) -> tuple[Runner, HostTier | None]:
    """Open a runner on every rank of a model (see `open_runner`); return the first rank's."""
    gang = loaded.followers
    if gang is None:
        return open_runner(loaded, config, vocab_size)
    assert isinstance(gang, Gang)
    engine = gang.number()
    with gang.give_order(Open(engine, config, vocab_size)):
        make_host = functools.partial(LeadingHostTier, gang, engine)
        runner, host = open_runner(loaded, config, vocab_size, make_host)
    return LeadingRunner(runner, gang, engine), host


def open_disk_tier(
    loaded: LoadedModel, config: EngineConfig, host: HostTier | None
) -> DiskTier | None:
    """Open the third tier of an engine's KV, on every rank of its model, if it can be."""
    if config.disk_cache_folder is None or host is None:
        return None
    try:
        context = page_context(loaded, config)
        files = open_page_files(loaded, config, host, context)
        logger.info("disk_cache_folder: %d pages found in %s", len(files), files.folder)
        if not isinstance(host, LeadingHostTier):
            return DiskTier(host, files)
        gang, engine = host.gang, host.engine
        if gang.ask(lambda number: OpenFiles(engine, number, context)).result():
            return LeadingDiskTier(host, files, gang, engine)
        why = "another process of the model cannot"
    except OSError as error:
        why = error.strerror or str(error)
    # An engine that computes what it could have read is better than none.
    logger.error(
        "disk_cache_folder: %s cannot be used (%s): the engine goes on without it",
        folder_of_pages(config),
        why,
    )
    return None


class LeadingRunner(Runner):
    """The first rank's runner, whose forwards all ranks compute."""

    def __init__(self, own: Runner, gang: Gang, engine: int) -> None:
        self.cache = LeadingCache(own.cache, gang, engine)
        self.device = own.device
        self._own = own
        self._gang = gang
        self._engine = engine

    @override
    def run(self, feeds: Sequence[Feed]) -> list[torch.Tensor]:
        with self._gang.give_order(Forward(self._engine, [PackedFeed.of(feed) for feed in feeds])):
            return self._own.run(feeds)

    @override
    def watch(self, on_lost: Callable[[str], None]) -> None:
        self._gang.watch(self._engine, on_lost)

    @override
    def close(self) -> None:
        self._gang.forget(self._engine)
        with contextlib.suppress(EngineFailed), self._gang.give_order(Close(self._engine)):
            pass


class LeadingCache(KVCache):
    """The first rank's KV, whose copies all ranks make."""

    def __init__(self, own: KVCache, gang: Gang, engine: int) -> None:
        self.layout, self.page_tokens, self.centres = own.layout, own.page_tokens, own.centres
        self.stacks, self.layers = own.stacks, own.layers
        self.num_slots, self.num_ring_slots = own.num_slots, own.num_ring_slots
        self.in_rings = own.in_rings
        self._gang = gang
        self._engine = engine

    @override
    def copy(
        self,
        sources: Sequence[tuple[int, int]],
        destinations: Sequence[tuple[int, int]],
        *,
        of_rings: bool = False,
    ) -> None:
        with self._gang.give_order(CopySlots(self._engine, sources, destinations, of_rings)):
            super().copy(sources, destinations, of_rings=of_rings)

    @override
    def zero(self, spans: Sequence[tuple[int, int]], *, of_rings: bool = False) -> None:
        with self._gang.give_order(ZeroSlots(self._engine, spans, of_rings)):
            super().zero(spans, of_rings=of_rings)


class LeadingHostTier(HostTier):
    """The first rank's second tier, whose copies all ranks make."""

    def __init__(
        self, gang: Gang, engine: int, layout: KVLayout, num_pages: int, page_tokens: int
    ) -> None:
        super().__init__(layout, num_pages, page_tokens)
        self.gang = gang
        self.engine = engine

    @override
    def copy(self, cache: KVCache, pages: slice, host_pages: slice, *, is_restore: bool) -> Mark:
        with self.gang.give_order(CopyPages(self.engine, pages, host_pages, is_restore)):
            return super().copy(cache, pages, host_pages, is_restore=is_restore)

    @override
    def zero(self, pages: Sequence[int]) -> None:
        with self.gang.give_order(ZeroHostPages(self.engine, pages)):
            super().zero(pages)

    @override
    def take_landed(self) -> list[Move]:
        num_launched = len(self._launched)
        landed = super().take_landed()
        if number := num_launched - len(self._launched):
            with self.gang.give_order(AwaitCopies(self.engine, number)):
                pass
        return landed

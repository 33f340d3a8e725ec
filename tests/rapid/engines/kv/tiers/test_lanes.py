"""Copies beside the forwards: in which order, in which pieces, and who waits for them."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from rapid.engines.kv.cache import KVCache, KVLayout
from rapid.engines.kv.tiers import lanes
from rapid.engines.kv.tiers.host_tier import HostTier, Move
from rapid.engines.kv.tiers.lanes import Landed, Lane, Mark, Pairs, StreamLane, lane_for, pin
from tests.rapid.tiny_models import lease_request, random_prompt, reference_greedy, tiny_engine

CPU = torch.device("cpu")


class GatedLane(Lane):
    """Copies that land when the gate is open."""

    def __init__(self) -> None:
        self.is_open = False
        self._due: list[tuple[torch.Tensor, torch.Tensor]] = []

    def launch(self, pairs: Pairs) -> Mark:
        self._due += pairs
        lane = self

        class GatedMark(Landed):
            def is_reached(self) -> bool:
                if lane.is_open:
                    for source, destination in lane._due:
                        destination.copy_(source)
                    lane._due.clear()
                return lane.is_open

        return GatedMark()


async def test_a_restored_prompt_waits_in_line_while_others_decode() -> None:
    engine = tiny_engine(kv_cache_tokens=192, max_context=128, host_cache_tokens=512)
    document, other = random_prompt(97, seed=1), random_prompt(97, seed=2)
    for prompt in (document, other):  # the second takes the first one's pages
        await engine.open(lease_request("a", prompt, max_tokens=4))
        await engine.prefill("a")
        engine.release("a")
    await engine.open(lease_request("other", random_prompt(20), max_tokens=4))
    await engine.prefill("other")
    assert engine._compute.host is not None
    lane = engine._compute.host._lane = GatedLane()
    await engine.open(lease_request("known", document, max_tokens=4))
    waiting = asyncio.ensure_future(engine.prefill("known"))
    verdict = await engine.decode("other", 0, 4)
    assert list(verdict.token_ids) == reference_greedy(random_prompt(20).tolist(), 4)
    assert not waiting.done()
    lane.is_open = True
    assert (await waiting).num_cached_tokens == 96
    verdict = await engine.decode("known", 0, 4)
    assert list(verdict.token_ids) == reference_greedy(document.tolist(), 4)
    engine.check_integrity()
    engine.close()


class Cuda:
    """A record of what is asked of CUDA, by a lane that runs on a CPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        cuda = self

        class Stream:
            def __init__(self, name: object = "copies") -> None:
                self.name = name if isinstance(name, str) else "copies"

            def wait_stream(self, other: Stream) -> None:
                cuda.log.append(f"{self.name} wait for {other.name}")

            def wait_event(self, event: Event) -> None:
                cuda.log.append(f"{self.name} wait for an event")

            def synchronize(self) -> None:
                cuda.log.append(f"the host waits for {self.name}")

        class Event:
            is_reached = False

            def __init__(self, *, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                cuda.log.append("event")

            def query(self) -> bool:
                return self.is_reached

            def elapsed_time(self, other: Event) -> float:
                return 250.0

        @contextmanager
        def stream(chosen: Stream) -> Iterator[None]:
            cuda.log.append(f"on {chosen.name}:")
            yield
            cuda.log.append("end")

        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "stream", stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream("forwards"))


@pytest.mark.parametrize("is_restore", [False, True])
def test_a_stream_copies_in_pieces_behind_the_forwards_so_far(
    monkeypatch: pytest.MonkeyPatch, is_restore: bool
) -> None:
    cuda = Cuda(monkeypatch)
    layout = KVLayout(2, 4, torch.float32, (CPU,) * 3)
    pool, host = KVCache(layout, 9, 8), HostTier(layout, 9, 8)
    monkeypatch.setattr(lanes, "STAGED_BYTES", 2 * host.blocks[0].nbytes)
    host._lane = lane = StreamLane(CPU, host.blocks[:1])
    assert len(lane._staged) == 2
    pool.stacks[0].copy_(torch.rand(pool.stacks[0].shape))
    host.blocks.copy_(torch.rand(host.blocks.shape))
    moves = [Move(bytes([i]), 3 + i, 1 + i, is_restore=is_restore) for i in range(5)]
    tags: list[bytes | None] = [None] * 9
    (host.tags if is_restore else tags)[1 if is_restore else 3 :] = [m.name for m in moves]
    host.launch(moves, pool, tags)
    ours = pool.blocks(slice(3, 8))[0]
    assert torch.equal(ours, host.blocks[1:6])
    assert cuda.log == ["copies wait for forwards", "on copies:", "event", "event", "end"]
    assert not host.take_landed()
    mark: Any = host._launched[0][0]
    assert mark.seconds == 0.25
    mark.hold_back()
    assert cuda.log[-1] == "forwards wait for an event"
    mark.ended.is_reached = True
    for move in moves:
        host._copies[move.page] += 1
        host._host_copies[move.host_page] += 1
    landed = host.take_landed()
    assert landed == moves
    host.settle(landed)
    assert not host.is_copying


def test_a_block_of_pages_is_what_the_layers_hold() -> None:
    pool = KVCache(KVLayout(2, 4, torch.float32, (CPU,) * 3), 5, 8)
    pool.stacks[0].copy_(torch.rand(pool.stacks[0].shape))
    (block,) = pool.blocks(slice(1, 4))
    for layer, (keys, values) in enumerate(pool.layers):
        for page in range(3):
            slots = slice(8 * (1 + page), 8 * (2 + page))
            assert torch.equal(block[page, layer, 0], keys[:, slots])
            assert torch.equal(block[page, layer, 1], values[:, slots])


def test_layers_on_several_devices_come_together_in_host_memory() -> None:
    """On devices that a CPU can tell apart: `meta` holds nothing."""
    layout = KVLayout(1, 2, torch.float32, (CPU, CPU, torch.device("meta")))
    assert [stack.shape[0] for stack in KVCache(layout, 2, 8).stacks] == [2, 1]
    block = torch.zeros(1, 3, 2, 1, 8, 2)
    assert type(lane_for({CPU}, block)) is Lane
    assert type(lane_for({torch.device("cuda:0"), torch.device("cuda:1")}, block)) is Lane


def test_copies_told_to_another_rank_hold_its_forwards_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = Cuda(monkeypatch)
    layout = KVLayout(1, 2, torch.float32, (CPU,))
    pool, host = KVCache(layout, 4, 8), HostTier(layout, 4, 8)
    host._lane = StreamLane(CPU, host.blocks[:1])
    host.follow(pool, slice(0, 2), slice(1, 3), is_restore=False)
    host.follow(pool, slice(0, 1), slice(1, 2), is_restore=True)
    cuda.log.clear()
    host.await_copies(2)
    assert cuda.log == ["forwards wait for an event"] * 2


class Owner:
    """Whoever holds pinned memory."""


@pytest.mark.parametrize("error", [0, 2])
def test_memory_is_pinned_for_as_long_as_its_owner_lives(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: int
) -> None:
    pinned: list[tuple[int, int]] = []

    class Cudart:
        def cudaHostRegister(self, place: int, size: int, flags: int) -> int:
            pinned.append((place, size))
            return error

        def cudaHostUnregister(self, place: int) -> int:
            pinned[:] = [each for each in pinned if each[0] != place]
            return 0

    monkeypatch.setattr(torch.cuda, "cudart", Cudart)
    tensor, owner = torch.zeros(10), Owner()
    pin(tensor, owner)
    assert pinned == [(tensor.data_ptr(), 40)]
    assert ("could not be pinned (CUDA error 2)" in caplog.text) == bool(error)
    del owner
    gc.collect()
    assert bool(pinned) == bool(error)

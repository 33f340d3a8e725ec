"""What is forgotten is found in no tier: not by name, and not by its numbers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from rapid.engine_status import Erasure
from rapid.engines.engine import Engine
from rapid.engines.kv import prefix_cache
from rapid.engines.kv.tiers.page_files import PageFiles
from rapid.errors import EngineFailed
from rapid.messages import Int32Array
from tests.rapid.engines.kv.tiers.test_disk_tier import until_idle
from tests.rapid.engines.test_sliding_engine import engine_of
from tests.rapid.tiny_models import lease_request, random_prompt, tiny_engine

SECRET = random_prompt(97, seed=1)  # twelve pages and a token
OTHER = random_prompt(97, seed=2)
KEY, OTHER_KEY = "5ec" + "0" * 29, "07e" + "0" * 29


async def read(engine: Engine, prompt: Int32Array, *documents: str, lease_id: str = "a") -> int:
    """Have a prompt read and answered; return how many of its tokens were cached."""
    await engine.open(lease_request(lease_id, prompt, max_tokens=4, documents=frozenset(documents)))
    receipt = await engine.prefill(lease_id)
    await engine.decode(lease_id, 0, 4)
    return receipt.num_cached_tokens


async def ask(engine: Engine, prompt: Int32Array, *documents: str) -> int:
    num_cached = await read(engine, prompt, *documents)
    engine.release("a")
    engine.check_integrity()
    return num_cached


def blank(engine: Engine) -> Engine:
    """Fill the memory of a new engine with zeros, so that all numbers in it are its own."""
    for stack in engine._compute.runner.cache.stacks:
        stack.zero_()
    if engine._host is not None:
        engine._host.blocks.zero_()
    return engine


def files_in(folder: Path, pattern: str = "*.kv") -> list[Path]:
    return [*folder.rglob(pattern)]


def sum_of(erasures: tuple[Erasure, ...]) -> dict[str, int]:
    assert not any(each.pending for each in erasures)
    return {each.place: each.num_found for each in erasures}


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
async def test_pages_are_dropped_and_overwritten(kv_cache_dtype: str) -> None:
    engine = blank(tiny_engine(kv_cache_dtype=kv_cache_dtype))
    await ask(engine, SECRET, KEY)
    await ask(engine, SECRET, KEY)
    assert sum_of(await engine.forget({KEY})) == {"memory": 12}
    numbers = [stack.view(torch.uint8) for stack in engine._compute.runner.cache.stacks]
    assert not any(each.any() for each in numbers)  # nor is the answer there
    assert await ask(engine, SECRET, KEY) == 0
    assert sum_of(await engine.forget({"another"})) == {"memory": 0}
    assert await ask(engine, SECRET) == 96
    engine.close()


async def test_other_documents_stay(engine: Engine) -> None:
    await ask(engine, SECRET, KEY)
    await ask(engine, OTHER, OTHER_KEY)
    await engine.forget({KEY})
    assert await ask(engine, OTHER, OTHER_KEY) == 96


async def test_a_prompt_with_several_documents_goes_with_each(engine: Engine) -> None:
    await ask(engine, SECRET, KEY, OTHER_KEY)
    assert sum_of(await engine.forget({OTHER_KEY})) == {"memory": 12}
    assert await ask(engine, SECRET, KEY) == 0


async def test_pages_in_use_go_when_their_lease_ends() -> None:
    engine = blank(tiny_engine(host_cache_tokens=256))
    await read(engine, SECRET, KEY)
    erasures = await engine.forget({KEY})
    assert [each.pending for each in erasures] == ["in use", "in use"]
    engine.release("a")
    assert await ask(engine, SECRET) == 0
    assert sum_of(await engine.forget({KEY})) == {"memory": 0, "host memory": 0}
    assert engine._host is not None
    assert not engine._host.blocks.any()
    engine.close()


async def test_who_still_waits_for_a_lease_is_waited_for() -> None:
    engine = tiny_engine(max_leases=1)
    await read(engine, OTHER, OTHER_KEY)
    waiting = asyncio.ensure_future(read(engine, SECRET, KEY, lease_id="b"))
    await asyncio.sleep(0)
    assert [each.pending for each in await engine.forget({KEY})] == ["in use"]
    engine.release("a")
    await waiting
    engine.release("b")
    assert sum_of(await engine.forget({KEY})) == {"memory": 12}
    engine.close()


@pytest.mark.usefixtures("always_restores")
async def test_host_memory_is_overwritten() -> None:
    engine = blank(tiny_engine(max_context=128, kv_cache_tokens=128, host_cache_tokens=256))
    await ask(engine, SECRET, KEY)
    await ask(engine, OTHER, OTHER_KEY)  # which takes the room of the first
    assert engine._host is not None
    assert engine._host.blocks.any()
    _, host = await engine.forget({KEY, OTHER_KEY})
    assert host.num_found >= 10
    assert host.num_bytes >= host.num_found * engine._host.page_bytes
    assert not engine._host.blocks.any()
    assert len(engine._host) == 0
    assert await ask(engine, SECRET, KEY) == 0
    engine.close()


def with_files(folder: Path, **settings: Any) -> Engine:
    defaults: dict[str, Any] = {"host_cache_tokens": 256, "disk_cache_gib": 1.0}
    return tiny_engine(disk_cache_folder=str(folder), **defaults | settings)


@pytest.mark.usefixtures("always_restores")
async def test_files_are_removed_also_after_a_restart(tmp_path: Path) -> None:
    engine = with_files(tmp_path)
    await ask(engine, SECRET, KEY)
    await ask(engine, OTHER, OTHER_KEY)
    await until_idle(engine)
    engine.close()
    assert len(files_in(tmp_path)) == 24
    engine = with_files(tmp_path)
    num_bytes = sum(path.stat().st_size for path in files_in(tmp_path))
    memory, host, disk = await engine.forget({KEY})
    assert memory.num_bytes > host.num_bytes == 0  # nothing was asked since the start
    assert (disk.num_bytes, disk.num_found, disk.pending) == (num_bytes, 12, None)
    assert len(files_in(tmp_path)) == 12
    assert [path.stem for path in files_in(tmp_path, "*.doc")] == [OTHER_KEY]
    assert await ask(engine, SECRET, KEY) == 0
    assert await ask(engine, OTHER, OTHER_KEY) == 96
    engine.close()


async def test_a_page_that_is_being_written_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = with_files(tmp_path)
    write, may_write, loop = PageFiles.write, asyncio.Event(), asyncio.get_running_loop()
    begun = asyncio.Event()

    def when_told(self: PageFiles, *given: Any) -> None:
        loop.call_soon_threadsafe(begun.set)
        asyncio.run_coroutine_threadsafe(may_write.wait(), loop).result()
        write(self, *given)

    monkeypatch.setattr(PageFiles, "write", when_told)
    await ask(engine, SECRET, KEY)
    await begun.wait()
    forgetting = asyncio.ensure_future(engine.forget({KEY}))
    await asyncio.sleep(0.01)
    may_write.set()
    await forgetting
    await until_idle(engine)
    assert not files_in(tmp_path)
    assert sum_of(await engine.forget({KEY})) == {"memory": 0, "host memory": 0, "disk": 0}
    assert engine._host is not None
    assert len(engine._host) == 0
    engine.close()


async def test_a_page_that_is_being_read_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = with_files(tmp_path)
    await ask(engine, SECRET, KEY)
    await until_idle(engine)
    engine.close()
    engine = blank(with_files(tmp_path))
    read_file, may_read, loop = PageFiles.read, asyncio.Event(), asyncio.get_running_loop()

    def when_told(self: PageFiles, name: bytes, page: memoryview) -> bool:
        asyncio.run_coroutine_threadsafe(may_read.wait(), loop).result()
        return read_file(self, name, page)

    monkeypatch.setattr(PageFiles, "read", when_told)
    await engine.open(lease_request("a", SECRET, max_tokens=4, documents=frozenset({KEY})))
    while not engine._disk._reads:  # type: ignore[union-attr]  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    engine.release("a")
    forgetting = asyncio.ensure_future(engine.forget({KEY}))
    await asyncio.sleep(0.01)
    may_read.set()
    await forgetting
    await until_idle(engine)
    await engine.forget({KEY})
    assert engine._host is not None
    assert len(engine._host) == 0
    assert not engine._host.blocks.any()
    engine.close()


async def test_windows_of_sliding_layers_are_overwritten() -> None:
    engine = blank(engine_of("gemma3_text"))
    prompt = random_prompt(400, seed=1)
    await ask(engine, prompt, KEY)
    assert engine._kept is not None
    assert engine._kept._places
    await engine.forget({KEY})
    assert not engine._kept._places
    assert not any(stack.any() for stack in engine._compute.runner.cache.stacks)
    assert await ask(engine, prompt, KEY) == 0
    engine.close()


async def test_a_closed_engine_says_so(engine: Engine) -> None:
    engine.close()
    with pytest.raises(EngineFailed):
        await engine.forget({KEY})


async def test_names_of_documents_are_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_cache, "_LEAST_STALE", 20)
    engine = tiny_engine(max_context=128, kv_cache_tokens=128)
    for seed in range(20):
        await ask(engine, random_prompt(97, seed=seed), str(seed))
    assert len(engine._state.ledger.prefixes._documents) < 100
    engine.close()

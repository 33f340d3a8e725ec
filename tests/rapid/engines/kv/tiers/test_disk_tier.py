"""What was read stays read: over restarts, for its tenant alone, and never wrongly."""

from __future__ import annotations

import asyncio
import logging
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rapid.engines.engine import Engine
from rapid.engines.kv.cache import KVLayout
from rapid.engines.kv.tiers.disk_tier import DiskTier
from rapid.engines.kv.tiers.host_tier import HostTier
from rapid.engines.kv.tiers.page_files import PageFiles, folder_of
from rapid.messages import Int32Array
from tests.rapid.tiny_models import lease_request, random_prompt, reference_greedy
from tests.rapid.tiny_models import tiny_engine as engine_without

DOCUMENT = random_prompt(97, seed=1)  # twelve pages and a token
A, B = bytes(16), bytes([1]) * 16


def tiny_engine(folder: Path, **settings: Any) -> Engine:
    defaults: dict[str, Any] = {"max_context": 128, "kv_cache_tokens": 128}
    defaults |= {"host_cache_tokens": 256, "disk_cache_folder": str(folder)}
    return engine_without(**(defaults | {"disk_cache_gib": 1.0} | settings))


async def ask(engine: Engine, prompt: Int32Array, tenant: str = "local") -> tuple[list[int], int]:
    """The answer, and how many tokens of the prompt were found in place."""
    await engine.open(lease_request("a", prompt, max_tokens=4, tenant=tenant))
    receipt = await engine.prefill("a")
    verdict = await engine.decode("a", 0, 4)
    engine.release("a")
    engine.check_integrity()
    return list(verdict.token_ids), receipt.num_cached_tokens


async def read_once(folder: Path, *prompts: Int32Array, **settings: Any) -> None:
    """An engine reads prompts, and ends when they are on disk."""
    engine = tiny_engine(folder, **settings)
    for prompt in prompts:
        await ask(engine, prompt)
        await until_idle(engine)
    engine.close()


def tenants(folder: Path) -> dict[str, Path]:
    """The tenants' folders by name."""
    return {path.name: path for path in folder.glob("*/*/")}


async def until_idle(engine: Engine) -> None:
    assert engine._disk is not None
    async with asyncio.timeout(60):
        while not engine._disk.is_idle:  # noqa: ASYNC110 (a server need not know)
            await asyncio.sleep(0.001)


async def test_a_document_that_was_read_stays_read_after_a_restart(tmp_path: Path) -> None:
    await read_once(tmp_path, DOCUMENT)
    engine = tiny_engine(tmp_path)
    answer, num_cached = await ask(engine, DOCUMENT)
    assert answer == reference_greedy(DOCUMENT.tolist(), 4)
    assert num_cached == 96
    engine.close()


async def test_a_status_says_what_lies_below_the_pool_and_what_was_done(tmp_path: Path) -> None:
    await read_once(tmp_path, DOCUMENT)
    engine = tiny_engine(tmp_path)
    status = engine.status()
    assert (status.disk_tokens, status.disk_tokens_read, status.host_tokens) == (96, 0, 0)
    assert (status.steps, status.steps_s) == (0, 0.0)
    await ask(engine, DOCUMENT)
    status = engine.status()
    assert (status.disk_tokens_read, status.host_tokens_restored) == (96, 96)
    assert (status.disk_tokens, status.host_tokens) == (96, 96)
    assert (status.steps, status.step_calls, status.step_tokens) == (4, 4, 4)  # the answer's
    assert status.steps_s > 0
    engine.close()


@pytest.mark.parametrize("host_cache_tokens", [8, 24])
async def test_a_document_passes_through_host_memory_of_a_few_pages(
    tmp_path: Path, host_cache_tokens: int
) -> None:
    await read_once(tmp_path, DOCUMENT, host_cache_tokens=host_cache_tokens)
    engine = tiny_engine(tmp_path, host_cache_tokens=host_cache_tokens)
    answer, num_cached = await ask(engine, DOCUMENT)
    assert answer == reference_greedy(DOCUMENT.tolist(), 4)
    assert num_cached == 96
    engine.close()


async def test_broken_files_cost_time_and_no_token(tmp_path: Path) -> None:
    """Bits are flipped, ends cut off and files exchanged, before each start of an engine."""
    rng = np.random.default_rng(0)
    expected = reference_greedy(DOCUMENT.tolist(), 4)
    await read_once(tmp_path / "whole", DOCUMENT)
    for turn in range(8):
        folder = tmp_path / str(turn)
        shutil.copytree(tmp_path / "whole", folder)
        paths = sorted(folder.rglob("*.kv"))
        for index in rng.choice(len(paths), size=1 + turn % 4, replace=False):
            content = bytearray(paths[index].read_bytes())
            if turn % 3 == 0:
                content[int(rng.integers(len(content)))] ^= 1 << int(rng.integers(8))
            elif turn % 3 == 1:
                del content[int(rng.integers(len(content))) :]
            else:
                content = bytearray(paths[(index + 1) % len(paths)].read_bytes())
            paths[index].write_bytes(content)
        engine = tiny_engine(folder)
        answer, num_cached = await ask(engine, DOCUMENT)
        assert answer == expected
        assert num_cached == 96 - 8 * (1 + turn % 4)
        engine.close()


async def test_tenants_and_salts_do_not_find_each_others_files(tmp_path: Path) -> None:
    await read_once(tmp_path, DOCUMENT)
    engine = tiny_engine(tmp_path)
    assert (await ask(engine, DOCUMENT, "other"))[1] == 0
    await until_idle(engine)
    assert set(tenants(tmp_path)) == {folder_of("local"), folder_of("other")}
    engine.close()


async def test_what_an_engine_reads_to_try_its_steps_is_not_kept(tmp_path: Path) -> None:
    engine = tiny_engine(tmp_path)
    await ask(engine, DOCUMENT, tenant="")
    await until_idle(engine)
    assert not tenants(tmp_path)
    engine.close()


async def test_a_tenant_whose_folder_was_removed_is_read_anew(tmp_path: Path) -> None:
    await read_once(tmp_path, DOCUMENT)
    engine = tiny_engine(tmp_path)
    shutil.rmtree(tenants(tmp_path)[folder_of("local")])
    answer, num_cached = await ask(engine, DOCUMENT)
    assert answer == reference_greedy(DOCUMENT.tolist(), 4)
    assert num_cached == 0
    engine.close()


async def test_another_model_finds_nothing(tmp_path: Path) -> None:
    """Though its settings and the sizes of its files are the same."""
    await read_once(tmp_path, DOCUMENT)
    engine = tiny_engine(tmp_path, seed=1)
    answer, num_cached = await ask(engine, DOCUMENT)
    assert answer == reference_greedy(DOCUMENT.tolist(), 4, seed=1)
    assert num_cached == 0
    engine.close()


async def test_pages_of_another_precision_are_other_pages(tmp_path: Path) -> None:
    await read_once(tmp_path, DOCUMENT)
    engine = tiny_engine(tmp_path, kv_cache_dtype="fp8")
    assert (await ask(engine, DOCUMENT))[1] == 0
    await until_idle(engine)
    engine.close()
    for kv_cache_dtype in ("auto", "fp8"):
        engine = tiny_engine(tmp_path, kv_cache_dtype=kv_cache_dtype)
        assert (await ask(engine, DOCUMENT))[1] == 96
        engine.close()


async def test_reading_that_was_measured_to_be_slower_is_not_done(tmp_path: Path) -> None:
    await read_once(tmp_path, DOCUMENT)
    engine = tiny_engine(tmp_path)
    assert engine._disk is not None
    assert engine._compute.host is not None
    engine._compute.host.pace.observe_computed(1, 1e-6)
    engine._disk.pace.observe_restored(1, 1e6)
    assert (await ask(engine, DOCUMENT))[1] == 0
    engine.close()


async def test_a_folder_that_cannot_be_used_costs_the_tier_and_no_answer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    engine = tiny_engine(tmp_path / "file")
    assert engine._disk is None
    assert "file cannot be used (File exists): the engine goes on without it" in caplog.text
    assert (await ask(engine, DOCUMENT))[0] == reference_greedy(DOCUMENT.tolist(), 4)
    engine.close()


async def test_a_full_disk_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(PageFiles, "write", fail)
    engine = tiny_engine(tmp_path)
    for seed in (1, 2):
        await ask(engine, random_prompt(97, seed=seed))
        await until_idle(engine)
    told = [record for record in caplog.records if "No space left" in record.getMessage()]
    assert [record.levelno for record in told] == [logging.ERROR]
    assert (await ask(engine, DOCUMENT))[1] == 96  # of host memory
    engine.close()


@pytest.mark.usefixtures("always_restores")
async def test_others_decode_while_a_document_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the document waits in line, not in the way."""
    await read_once(tmp_path, DOCUMENT)
    engine = tiny_engine(tmp_path, kv_cache_tokens=256)
    read, may_read = PageFiles.read, asyncio.Event()
    loop = asyncio.get_running_loop()

    def when_called(self: PageFiles, name: bytes, page: memoryview) -> bool:
        asyncio.run_coroutine_threadsafe(may_read.wait(), loop).result()
        return read(self, name, page)

    monkeypatch.setattr(PageFiles, "read", when_called)
    await engine.open(lease_request("known", DOCUMENT, max_tokens=4))
    waiting = asyncio.ensure_future(engine.prefill("known"))
    await engine.open(lease_request("new", random_prompt(20), max_tokens=4))
    await engine.prefill("new")
    verdict = await engine.decode("new", 0, 4)
    assert list(verdict.token_ids) == reference_greedy(random_prompt(20).tolist(), 4)
    assert not waiting.done()
    may_read.set()
    assert (await waiting).num_cached_tokens == 96
    engine.close()


async def test_what_nobody_waits_for_any_more_is_not_read(tmp_path: Path) -> None:
    host, disk = tier_of(tmp_path, A, B)
    disk.restore(A)
    disk.restore(B)
    disk.go_on({A: 3}.get, {}.get)
    assert disk._to_read.qsize() == 1
    assert disk.is_read(A)
    assert not disk.is_read(B)
    assert len(host._held) == 1


def test_a_disk_that_does_not_answer_is_given_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    now = 0.0
    host, disk = tier_of(tmp_path, A)
    disk._clock = lambda: now
    disk.restore(A)
    disk.go_on({A: 3}.get, {}.get)
    while now < 9.0:
        now += 0.9
        disk.go_on({A: 3}.get, {}.get)
    assert disk.is_read(A)
    while now < 11.0:
        now += 0.9
        disk.go_on({A: 3}.get, {}.get)
    assert not disk.is_reading
    assert "has not ended for 10 s" in caplog.text
    job = disk._to_read.get()
    assert job is not None
    disk._do(job)  # late
    disk.go_on({A: 3}.get, {}.get)
    assert not host.has_moves
    assert host.page_of(A) is None
    disk.restore(A)
    assert not disk.is_reading


@pytest.mark.parametrize("begins_at", [0.0, 60.0])
def test_a_long_step_is_not_the_disks_fault(tmp_path: Path, begins_at: float) -> None:
    now = 0.0
    _, disk = tier_of(tmp_path, A)
    disk._clock = lambda: now
    disk.restore(A)
    now = begins_at
    disk.go_on({A: 3}.get, {}.get)
    now = 69.0
    disk.go_on({A: 3}.get, {}.get)
    assert disk.is_read(A)


async def test_an_engine_that_waits_for_the_disk_makes_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its watchdog does not take it for one whose step does not end."""
    await read_once(tmp_path, DOCUMENT)
    engine = tiny_engine(tmp_path)
    read, may_read = PageFiles.read, threading.Event()

    def when_told(self: PageFiles, name: bytes, page: memoryview) -> bool:
        may_read.wait()
        return read(self, name, page)

    monkeypatch.setattr(PageFiles, "read", when_told)
    asking = asyncio.ensure_future(ask(engine, DOCUMENT))
    assert engine._disk is not None
    async with asyncio.timeout(60):
        while not engine._disk._reads:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        num_turns = engine._compute.num_turns
        while engine._compute.num_turns < num_turns + 3:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    may_read.set()
    assert (await asking)[1] == 96
    engine.close()


def tier_of(tmp_path: Path, *names: bytes) -> tuple[HostTier, DiskTier]:
    """A tier without threads over four pages of host memory, with these pages on disk."""
    host = HostTier(KVLayout(1, 1, torch.float32, (torch.device("cpu"),)), 4, 8)
    files = PageFiles(tmp_path, bytes(32), len(host.memory_of(0)), 1e9)
    for name in names:
        files.write(name, "one", host.memory_of(0))
    return host, DiskTier(host, files, clock=lambda: 0.0)


async def test_the_end_of_an_engine_waits_for_what_is_being_written(tmp_path: Path) -> None:
    engine = tiny_engine(tmp_path)
    assert engine._disk is not None
    write, has_begun = engine._disk.files.write, asyncio.Event()
    loop = asyncio.get_running_loop()

    def slowly(*given: Any) -> None:
        loop.call_soon_threadsafe(has_begun.set)
        time.sleep(0.01)
        write(*given)

    engine._disk.files.write = slowly  # type: ignore[method-assign]
    await ask(engine, DOCUMENT)
    await has_begun.wait()
    await asyncio.to_thread(engine.close)
    assert len(engine._disk.files) >= 1
    assert engine._disk._to_write.empty()

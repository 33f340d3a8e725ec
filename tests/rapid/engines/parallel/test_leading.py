"""A model that two processes compute, each started as an engine starts it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from rapid.config import EngineConfig
from rapid.engines.engine import Engine
from rapid.engines.forward.weights.loading import LoadedModel
from rapid.engines.parallel import leading
from rapid.engines.parallel.gang import Gang
from rapid.engines.parallel.leading import load_replica
from rapid.errors import ConfigurationError, EngineFailed
from rapid.messages import as_prompt
from tests.rapid.engines import gate
from tests.rapid.engines.execution.test_draft_chain import Reads
from tests.rapid.engines.parallel.conftest import followers_of
from tests.rapid.tiny_families import family_checkpoint, family_config
from tests.rapid.tiny_models import engine_config, lease_request, loaded, random_prompt

PATIENCE_S = 60.0  # for what a busy machine takes long for


async def answers(model: LoadedModel, **settings: Any) -> list[tuple[int, ...]]:
    """Answers of two choices each, greedy and seeded, to prompts that evict each other."""
    config = engine_config(
        tensor_parallel=model.config.tensor_parallel, kv_cache_tokens=512, **settings
    )
    engine = Engine(model, config)
    found = []
    try:
        for turn, temperature in enumerate((0.0, 1.0, 1.0, 0.0)):
            prompt = random_prompt(120, seed=turn % 2)
            request = lease_request(
                f"{turn}", prompt, temperature=temperature, num_choices=2, max_tokens=20
            )
            await engine.open(request)
            await engine.prefill(request.lease_id)
            decoded = [engine.decode(request.lease_id, choice, 20) for choice in range(2)]
            found += [verdict.token_ids for verdict in await asyncio.gather(*decoded)]
            engine.release(request.lease_id)
            engine.check_integrity()
    finally:
        engine.close()
    return found


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"host_cache_tokens": 512},
        {"deterministic": True},
        {"host_cache_tokens": 512, "kv_cache_dtype": "fp8"},
    ],
)
async def test_two_processes_say_what_one_says(
    in_two: LoadedModel, settings: dict[str, Any]
) -> None:
    assert await answers(in_two, **settings) == await answers(loaded(), **settings)


async def test_engines_of_one_model_take_turns(in_two: LoadedModel) -> None:
    found = await asyncio.gather(answers(in_two), answers(in_two))
    assert found == [await answers(loaded())] * 2


@pytest.mark.parametrize("deterministic", [False, True])
async def test_all_ranks_are_fed_what_the_first_draws(
    in_two: LoadedModel, monkeypatch: pytest.MonkeyPatch, deterministic: bool
) -> None:
    reads = Reads().use(monkeypatch)
    config = engine_config(tensor_parallel=2, draft_ahead=False, deterministic=deterministic)
    engine = Engine(in_two, config)
    await engine.open(lease_request("a", gate.PROMPT))
    await engine.prefill("a")
    assert (await engine.draft("a", 0, None, 6)).token_ids.tolist() == gate.EXPECTED
    assert reads.sizes == [6]
    engine.close()


@asynccontextmanager
async def with_lease() -> AsyncIterator[tuple[Engine, psutil.Process]]:
    """An engine of two processes with a lease `a`, and the second process."""
    config = engine_config(tensor_parallel=2)
    before = followers_of(os.getpid())
    model = load_replica(config)
    (follower,) = set(followers_of(os.getpid())) - set(before)
    engine = Engine(model, config)
    try:
        await engine.open(lease_request("a", max_tokens=200))
        yield engine, follower
    finally:
        engine.close()
        assert model.followers is not None
        model.followers.close()
        assert not follower.is_running()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP])
async def test_a_lost_process_ends_every_lease(number: signal.Signals) -> None:
    """Also one that was stopped while nothing is computed: it is no longer heard."""
    async with with_lease() as (engine, follower):
        await engine.prefill("a")
        ends = asyncio.gather(engine.until_closed(), engine.wait_closed("a"))
        await asyncio.sleep(0)
        engine._compute.runner._gang._followers.most_silent = 1  # instead of ten
        follower.send_signal(number)
        async with asyncio.timeout(PATIENCE_S):
            await ends
        with pytest.raises(EngineFailed, match="closed"):
            await engine.decode("a", 0, 1)


@pytest.mark.slow
async def test_a_step_that_fails_here_closes_the_engine_as_the_other_process_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    async with with_lease() as (engine, _):
        monkeypatch.setattr("rapid.engines.forward.runner.assemble", fail)
        with pytest.raises(EngineFailed):
            await engine.prefill("a")
        with pytest.raises(EngineFailed, match="closed"):
            engine.check_running()


@pytest.mark.slow
def test_the_end_of_the_first_process_ends_the_others() -> None:
    """Also one that was stopped, and cannot read that its orders have ended."""
    config = engine_config(tensor_parallel=2).model_dump_json()
    code = (
        "import time; from rapid.config import EngineConfig;"
        "from rapid.engines.parallel.leading import load_replica;"
        f"model = load_replica(EngineConfig.model_validate_json({config!r}));"
        "print('ready', flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == b"ready\n"
        (follower,) = followers_of(first.pid)
        follower.suspend()
        first.kill()
    follower.wait(PATIENCE_S)


def test_processes_that_read_other_files_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    before = followers_of(os.getpid())
    monkeypatch.setattr(leading, "fingerprint", lambda source: "other files")
    with pytest.raises(ConfigurationError, match="rank 1 of 2 reads other files"):
        load_replica(engine_config(tensor_parallel=2))
    assert followers_of(os.getpid()) == before


def test_a_process_that_cannot_load_says_why(tmp_path: Path) -> None:
    missing = str(tmp_path / "gone")
    gang = Gang(engine_config(tensor_parallel=2).model_copy(update={"model": missing}))
    with pytest.raises(ConfigurationError, match=r"rank 1 of 2 could not load: .*no such check"):
        gang.check_loaded("")
    gang.close()


def test_more_processes_than_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigurationError, match="needs as many GPUs, and 1 are visible"):
        load_replica(EngineConfig(model="embedded:target", tensor_parallel=2))


@pytest.mark.parametrize(
    "setting",
    [{"device": "balanced"}, {"device": "cuda:1"}, {"quantization": {"load_in_4bit": True}}],
)
def test_settings_that_split_the_model_otherwise_are_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="tensor_parallel gives each process a device"):
        EngineConfig(model="embedded:target", tensor_parallel=2, **setting)


@pytest.mark.slow
async def test_rings_are_kept_and_copied_on_every_rank() -> None:
    """Two questions on one document go on from a kept window; choices have copies of it."""
    path = family_checkpoint("gemma3_text")
    document = random_prompt(250, seed=1).tolist()
    found = []
    for num_ranks in (1, 2):
        config = family_config(path, tensor_parallel=num_ranks, kv_cache_tokens=4096, max_leases=4)
        model = load_replica(config)
        engine = Engine(model, config)
        assert engine._kept is not None
        for seed in (2, 3):
            prompt = as_prompt([*document, *random_prompt(20, seed=seed).tolist()])
            await engine.open(lease_request("a", prompt, max_tokens=100, num_choices=2))
            cached = (await engine.prefill("a")).num_cached_tokens
            answers = [(await engine.decode("a", choice, 60)).token_ids for choice in (0, 1)]
            found.append((cached > 200, *answers))
            engine.release("a")
        engine.check_integrity()
        engine.close()
        if model.followers is not None:
            model.followers.close()
    assert found[:2] == found[2:]
    assert [is_cached for is_cached, *_ in found] == [False, True] * 2

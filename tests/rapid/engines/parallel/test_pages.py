"""What two processes have read stays read, where both have their parts of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from rapid.engines.engine import Engine
from rapid.engines.forward.weights.loading import LoadedModel
from rapid.engines.kv.tiers.page_files import PageFiles
from rapid.messages import Int32Array
from tests.rapid.engines.kv.tiers.test_disk_tier import ask, until_idle
from tests.rapid.tiny_models import (
    engine_config,
    lease_request,
    random_prompt,
    reference_greedy,
)

DOCUMENT = random_prompt(97, seed=1)  # twelve pages and a token
ANSWER = reference_greedy(DOCUMENT.tolist(), 4)


def started(model: LoadedModel, folder: Path, **settings: object) -> Engine:
    """An engine with a disk tier."""
    config = engine_config(
        tensor_parallel=2,
        kv_cache_tokens=256,
        host_cache_tokens=256,
        disk_cache_folder=str(folder),
        disk_cache_gib=1.0,
        **settings,
    )
    return Engine(model, config)


async def asked(
    model: LoadedModel, folder: Path, prompt: Int32Array = DOCUMENT
) -> tuple[list[int], int]:
    """What an engine answers that starts with this folder, and what it found of the prompt."""
    engine = started(model, folder)
    assert engine._disk is not None
    found = await ask(engine, prompt)
    await until_idle(engine)
    engine.close()
    return found


def folders_of(engine: Engine, folder: Path) -> list[Path]:
    """The folders of the first process and of the second."""
    assert engine._disk is not None
    first = engine._disk.files.folder
    return [first, *(path for path in folder.glob("*/") if path != first)]


def files_of(model: LoadedModel, folder: Path) -> list[list[Path]]:
    """The files of the first process and of the second."""
    engine = started(model, folder)
    engine.close()
    return [sorted(path.rglob("*.kv")) for path in folders_of(engine, folder)]


async def test_a_document_stays_read_after_a_restart(in_two: LoadedModel, tmp_path: Path) -> None:
    assert await asked(in_two, tmp_path) == (ANSWER, 0)
    first, second = files_of(in_two, tmp_path)
    assert [path.name for path in first] == [path.name for path in second]
    assert len(first) == 12
    assert await asked(in_two, tmp_path) == (ANSWER, 96)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("is_gone", [True, False])
async def test_what_one_process_lacks_is_read_by_none_and_written_again(
    in_two: LoadedModel, tmp_path: Path, rank: int, is_gone: bool
) -> None:
    await asked(in_two, tmp_path)
    for path in files_of(in_two, tmp_path)[rank][2:8:5]:
        if is_gone:
            path.unlink()
        else:
            content = bytearray(path.read_bytes())
            content[-1] ^= 1
            path.write_bytes(content)
    assert await asked(in_two, tmp_path) == (ANSWER, 80)
    assert await asked(in_two, tmp_path) == (ANSWER, 96)


async def test_files_of_the_other_process_are_not_taken_for_its_own(
    in_two: LoadedModel, tmp_path: Path
) -> None:
    await asked(in_two, tmp_path)
    first, second = files_of(in_two, tmp_path)
    for ours, theirs in zip(first, second, strict=True):
        shutil.copy(ours, theirs)
    assert await asked(in_two, tmp_path) == (ANSWER, 0)


async def test_a_process_that_cannot_use_the_folder_costs_the_tier_and_no_answer(
    in_two: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    def usable_here(root: Path, *rest: object) -> PageFiles:
        monkeypatch.undo()
        files = PageFiles(root, *rest)  # type: ignore[arg-type]
        shutil.move(root, root.with_name("moved"))
        root.write_text("no folder any more")
        return files

    monkeypatch.setattr("rapid.engines.forward.opening.PageFiles", usable_here)
    engine = started(in_two, tmp_path / "kv")
    assert engine._disk is None
    assert "kv cannot be used (another process of the model cannot)" in caplog.text
    assert await ask(engine, DOCUMENT) == (ANSWER, 0)
    engine.close()


async def test_a_process_that_cannot_write_ends_writing(
    in_two: LoadedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = started(in_two, tmp_path)
    first, second = folders_of(engine, tmp_path)
    shutil.rmtree(second)
    second.write_text("no folder any more")
    assert await ask(engine, DOCUMENT) == (ANSWER, 0)
    await until_idle(engine)
    assert "cannot write its part" in caplog.text
    assert not list(first.rglob("*.kv"))
    engine.close()


async def test_what_is_forgotten_is_gone_in_both(in_two: LoadedModel, tmp_path: Path) -> None:
    engine = started(in_two, tmp_path)
    assert engine._disk is not None
    for prompt, name in ((DOCUMENT, "aa"), (random_prompt(97, seed=2), "bb")):
        await engine.open(lease_request("a", prompt, max_tokens=4, documents=frozenset({name})))
        await engine.prefill("a")
        engine.release("a")
    await until_idle(engine)
    found = {each.place: each.num_found for each in await engine.forget({"aa"})}
    # Each process removes what it finds of both: only the leader's number is told.
    assert found.keys() == {"memory", "host memory", "disk"}
    assert found["memory"] == found["host memory"] == 12
    for path in folders_of(engine, tmp_path):
        assert len([*path.rglob("*.kv")]) == 12
    assert (await ask(engine, DOCUMENT)) == (ANSWER, 0)
    engine.close()

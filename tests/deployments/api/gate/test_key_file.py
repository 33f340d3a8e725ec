"""Keys that come and go in a file while the ingress serves."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from deployments.api.ingress import Ingress
from deployments.config.api_config import ApiConfig
from deployments.config.tenants import hash_key
from tests.deployments.scripted import ScriptedOrchestrator


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Door:
    """An ingress whose keys are in a mounted Secret: a file behind a link that is exchanged."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.clock, self.num_versions = folder, Clock(), 0
        self.mount("old")
        config = ApiConfig(keys_file=folder / "data" / "api_keys")
        self.ingress = Ingress(ScriptedOrchestrator(), config, clock=self.clock)

    def mount(self, *keys: str) -> None:
        self.write(json.dumps([{"tenant": key, "sha256": hash_key(key)} for key in keys]))

    def write(self, content: str) -> None:
        self.num_versions += 1
        version = self.folder / f"version-{self.num_versions}"
        version.mkdir()
        (version / "api_keys").write_text(content)
        link = self.folder / "data"
        link.unlink(missing_ok=True)
        link.symlink_to(version)

    async def status(self, key: str, later_s: float = 0.0) -> int:
        self.clock.now += later_s
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(self.ingress), base_url="http://10.0.0.1"
        ) as http:
            response = await http.get("/v1/models", headers={"authorization": f"Bearer {key}"})
        return response.status_code


@pytest.fixture
def door(tmp_path: Path) -> Door:
    return Door(tmp_path)


async def test_a_key_is_revoked_and_another_added_without_a_restart(door: Door) -> None:
    assert (await door.status("old"), await door.status("new")) == (200, 401)
    door.mount("new")
    assert (await door.status("old", 0.5), await door.status("new")) == (200, 401)  # not yet
    assert (await door.status("old", 1.0), await door.status("new")) == (401, 200)


async def test_who_holds_the_last_key_can_be_locked_out(door: Door) -> None:
    door.mount()
    assert await door.status("old", 1.0) == 401


@pytest.mark.parametrize(
    "spoil", [lambda door: door.write("[{"), lambda door: (door.folder / "data").unlink()]
)
async def test_a_file_that_is_none_changes_nothing_and_is_told_once(
    door: Door, spoil: Callable[[Door], None], caplog: pytest.LogCaptureFixture
) -> None:
    spoil(door)
    with caplog.at_level(logging.ERROR):
        assert [await door.status("old", 1.0) for _ in range(3)] == [200] * 3
    (line,) = caplog.records
    assert "new keys are refused, those in force stay: api.keys_file" in line.message
    door.mount("new")
    assert (await door.status("old", 1.0), await door.status("new")) == (401, 200)

"""A model that the hub gives only to some: every command that meets it says what to do, at once."""

from __future__ import annotations

import httpx
import huggingface_hub
import pytest
from huggingface_hub.errors import GatedRepoError

from tests.deployments.cli.command import rapid
from tests.deployments.cli.doctor.healthy import write_config

_TOLD = "then run `hf auth login`, or set HF_TOKEN"


@pytest.fixture
def asked(monkeypatch):
    """Have a hub that lets nobody in; the addresses that it is asked for."""
    addresses: list[str] = []

    def refuse(url, **_):
        addresses.append(url)
        response = httpx.Response(403, request=httpx.Request("HEAD", url))
        raise GatedRepoError("gated", response=response)

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", refuse)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda name, file: None)
    return addresses


@pytest.mark.parametrize("command", ["check-config", "doctor", "serve"])
def test_a_gated_model(command, asked, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    engine = {"model": "acme/gated", "max_context": 2048, "kv_cache_tokens": 32768, "max_leases": 4}
    config = write_config(tmp_path, target={"engine": engine})
    result = rapid(command, str(config), env={"COLUMNS": "500"})
    assert result.exit_code != 0
    told = " ".join((result.stdout + result.stderr).split())  # however wide the terminal is
    assert _TOLD in told
    assert len(asked) == 1  # and not again and again

"""Models of the hub: here, given, refused, or out of reach, within seconds and asked once."""

from __future__ import annotations

import threading

import httpx
import huggingface_hub
import pytest
from huggingface_hub.errors import (
    GatedRepoError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
)

from rapid.checkpoints.downloads import hub
from rapid.errors import ConfigurationError

REFUSAL = {"response": httpx.Response(403, request=httpx.Request("HEAD", "https://hub"))}


@pytest.fixture
def answer(monkeypatch):
    """Have the hub, which is asked for a model that is not here, do something."""
    asked = []

    def script(what):
        def get(url, **options):
            asked.append((url, options))
            what()

        monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", get)
        monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda name, file: None)
        return asked

    return script


def raising(error):
    def fail():
        raise error

    return fail


def test_what_the_hub_gives_is_fine_and_asked_for_once(answer):
    asked = answer(lambda: None)
    hub.check_available(["acme/large", "acme/large", "embedded:target"])
    ((url, options),) = asked
    assert url.endswith("/acme/large/resolve/main/config.json")
    assert options["timeout"] < 3


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (GatedRepoError("gated", **REFUSAL), "ask for it at .*/acme/large, then run `hf auth"),
        (RepositoryNotFoundError("none", **REFUSAL), "no such model, or not for this user"),
        (RemoteEntryNotFoundError("none", **REFUSAL), "has no config.json"),
        (OfflineModeIsEnabled("offline"), "HF_HUB_OFFLINE forbids"),
        (httpx.ConnectError("[Errno -2] Name or service not known"), "cannot be reached"),
    ],
)
def test_why_a_model_cannot_be_had_is_one_sentence(error, told, answer):
    answer(raising(error))
    with pytest.raises(ConfigurationError, match=f"'acme/large' is not on this machine, .*{told}"):
        hub.check_available(["acme/large"])


def test_a_hub_that_says_nothing_is_not_waited_for(answer, monkeypatch):
    silence = threading.Event()
    monkeypatch.setattr(hub, "_WAIT_S", 0.01)
    answer(silence.wait)
    with pytest.raises(ConfigurationError, match="has not answered within"):
        hub.check_available(["acme/large"])
    silence.set()


def test_what_is_in_the_cache_is_not_asked_for(answer, monkeypatch):
    asked = answer(lambda: None)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda name, file: "/a/file")
    hub.check_available(["acme/large"])
    assert not asked
    assert hub.has_weights("acme/large")


def test_a_path_that_is_nowhere_is_for_others_to_tell():
    assert hub.find_hub_names(["/no/such/folder", "embedded:target", "a/b"]) == ["a/b"]

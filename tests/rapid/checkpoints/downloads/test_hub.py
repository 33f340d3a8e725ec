"""Models of the hub: here, given, refused, or out of reach, within seconds and asked once."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import closing

import httpx
import huggingface_hub
import pytest
from huggingface_hub import constants
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
        return asked

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda name, file: None)
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


@pytest.fixture
def cached(answer, monkeypatch):
    """Have all models in the cache, but for the files that a test names."""
    missing = []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "")
    monkeypatch.setattr(
        huggingface_hub,
        "try_to_load_from_cache",
        lambda name, file: None if file in missing else "/a/file",
    )
    return missing


@pytest.mark.parametrize("error", [None, GatedRepoError("gated", **REFUSAL)])
def test_what_is_in_the_cache_needs_no_leave_and_one_question(error, cached, answer):
    asked = answer((lambda: None) if error is None else raising(error))
    hub.check_available(["acme/large", "acme/small"])
    assert len(asked) == 1
    assert not hub.is_offline()
    assert hub.has_weights("acme/large")


def test_what_is_in_the_cache_is_taken_unasked_where_the_hub_is_away(cached, answer):
    asked = answer(raising(httpx.ConnectError("refused")))
    hub.check_available(["acme/large", "acme/small"])
    assert len(asked) == 1
    assert hub.is_offline()
    assert os.environ["HF_HUB_OFFLINE"] == "1"  # for the server that is started


def test_a_server_that_lacks_weights_goes_on_trying(cached, answer):
    cached += ["model.safetensors", "model.safetensors.index.json"]
    answer(raising(httpx.ConnectError("refused")))
    hub.check_available(["acme/large"])
    assert hub.is_offline()
    assert not os.environ["HF_HUB_OFFLINE"]


@pytest.mark.parametrize(
    ("listens", "told"), [(True, "has not answered within"), (False, "refused")]
)
def test_a_socket_that_accepts_and_says_nothing_or_refuses(listens, told, monkeypatch, tmp_path):
    """Nothing is replaced but the address: what is tried, tries once."""
    monkeypatch.setattr(hub, "_WAIT_S", 1.0 if listens else 60.0)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    # Else it would first ask which program it is run by.
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        place = f"http://127.0.0.1:{listener.getsockname()[1]}/{{repo_id}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", place)
        if not listens:
            listener.close()
        with pytest.raises(ConfigurationError, match=f"the hub cannot be reached .*{told}"):
            hub.check_available(["acme/large"])
        assert not listens or count_waiting(listener) == 1


def count_waiting(listener):
    listener.setblocking(False)
    count = 0
    while True:
        try:
            listener.accept()[0].close()
        except BlockingIOError:
            return count
        count += 1


def test_a_path_that_is_nowhere_is_for_others_to_tell():
    assert hub.find_hub_names(["/no/such/folder", "embedded:target", "a/b"]) == ["a/b"]

"""Checks that models are in the local cache, or that the Hugging Face hub gives them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from concurrent.futures import wait
from functools import partial
from pathlib import Path

from rapid.checkpoints.files import checkpoint_source
from rapid.errors import ConfigurationError, first_line
from rapid.threads import begin

_WAIT_S = 1.8  # for all models together, name service included: a hub that is slower is away
_TIMEOUT_S = 1.5  # of one request, so that its own reason comes before ours
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")


def find_hub_names(models: Iterable[str]) -> list[str]:
    """Return the repositories of the hub among models; one that is nowhere is left out."""
    sources = set()
    for model in models:
        with contextlib.suppress(ConfigurationError):
            sources.add(checkpoint_source(model))
    return sorted(source for source in sources if not Path(source).exists())


def has_settings(name: str) -> bool:
    """Return whether a repository's ``config.json`` is in the cache."""
    return _is_cached(name, "config.json")


def has_weights(name: str) -> bool:
    """Return whether a repository's weights are in the cache, or have begun to be."""
    return any(_is_cached(name, each) for each in _WEIGHTS)


def is_offline() -> bool:
    """Return whether this process asks no hub: its user forbids it, or the hub does not answer."""
    from huggingface_hub import is_offline_mode

    return bool(is_offline_mode())


def check_available(models: Iterable[str]) -> None:
    """Check that each repository is in the cache, or that the hub gives it to this user.

    The hub is asked once for each model that is not here, for all at the same time; for one of them
    where all are here. If it does not answer then, this process takes them from the cache without
    asking. So do those that it starts, if the cache has all weights. Libraries ask for each file of
    a model several times: a hub that is away would cost minutes.

    Raises:
        ConfigurationError: One is not; the message says whether the hub is away, or refuses.
    """
    names = find_hub_names(models)
    missing = [name for name in names if not has_settings(name)]
    # Nobody has to wait for these threads: a name service may keep one for minutes.
    asked = {name: begin(partial(_ask, name)) for name in missing or names[:1]}
    wait(asked.values(), timeout=_WAIT_S)
    for name, answer in asked.items():
        error = answer.result() if answer.done() else TimeoutError()
        if missing and error is not None:
            why = _tell(name, error)
            raise ConfigurationError(f"model {name!r} is not on this machine, and {why}")
        if error is not None and not _is_refusal(error):
            _stop_asking(has_all=all(map(has_weights, names)))


def _stop_asking(*, has_all: bool) -> None:
    from huggingface_hub import constants

    constants.HF_HUB_OFFLINE = True  # which it reads before each request
    if has_all:
        os.environ["HF_HUB_OFFLINE"] = "1"


def _is_cached(name: str, file: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(name, file), str)


def _ask(name: str) -> Exception | None:
    """Ask the hub for a repository; return why it does not give it."""
    from huggingface_hub import get_hf_file_metadata, get_token, hf_hub_url

    try:
        url = hf_hub_url(name, "config.json")
        get_hf_file_metadata(url, token=get_token(), timeout=_TIMEOUT_S)
    except Exception as error:  # its own, and those of its HTTP client, which has many
        return error
    return None


def _is_refusal(error: Exception) -> bool:
    """Return whether the hub has answered."""
    from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError

    return isinstance(error, EntryNotFoundError | RepositoryNotFoundError)


def _tell(name: str, error: Exception) -> str:
    """Return what an error says of a repository, and what to do about it."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    match error:
        case GatedRepoError():
            page = hf_hub_url(name, "config.json").split("/resolve/")[0]
            return (
                "the hub gives it to those only whom its owner lets in: ask for it at "
                f"{page}, then run `hf auth login`, or set HF_TOKEN"
            )
        case RepositoryNotFoundError():
            return (
                "the hub has no such model, or not for this user: check the name, and for a "
                "private one run `hf auth login`, or set HF_TOKEN"
            )
        case EntryNotFoundError():
            return "the hub's repository has no config.json: take one with safetensors weights"
        case OfflineModeIsEnabled():
            return "HF_HUB_OFFLINE forbids to fetch it: unset that, or write the path of a copy"
        case TimeoutError():
            why = f"it has not answered within {_WAIT_S:g} s"
        case _:
            why = first_line(error)
    return (
        f"the hub cannot be reached ({why}): check the network and HF_ENDPOINT, or write the path "
        "of a copy in its place"
    )

"""Whether models of the hub can be had: from the cache here, or from the hub within seconds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from concurrent.futures import wait
from functools import partial
from pathlib import Path

from rapid.checkpoints.files import checkpoint_source
from rapid.errors import ConfigurationError, first_line
from rapid.threads import begin

_WAIT_S = 3.0  # for all models together, name service included: a hub that is slower is away
_TIMEOUT_S = 2.5  # of one request, so that its own reason comes before ours
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


def check_available(models: Iterable[str]) -> None:
    """Check that each repository is in the cache, or that the hub gives it to this user.

    The hub is asked once for each model that is not here, for all at the same time.

    Raises:
        ConfigurationError: One is not; the message says whether the hub is away, or refuses.
    """
    missing = [name for name in find_hub_names(models) if not has_settings(name)]
    # Nobody has to wait for these threads: a name service may keep one for minutes.
    asked = {name: begin(partial(_why_refused, name)) for name in missing}
    wait(asked.values(), timeout=_WAIT_S)
    for name, answer in asked.items():
        problem = answer.result() if answer.done() else f"has not answered within {_WAIT_S:g} s"
        if problem:
            raise ConfigurationError(f"model {name!r} is not on this machine, and {problem}")


def _is_cached(name: str, file: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(name, file), str)


def _why_refused(name: str) -> str:
    """Return why the hub does not give a repository; empty if it does."""
    from huggingface_hub import get_hf_file_metadata, get_token, hf_hub_url
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    url = hf_hub_url(name, "config.json")
    try:
        get_hf_file_metadata(url, token=get_token(), timeout=_TIMEOUT_S)
    except GatedRepoError:
        page = url.split("/resolve/")[0]
        return (
            f"the hub gives it to those only whom its owner lets in: ask for it at {page}, then "
            "run `hf auth login`, or set HF_TOKEN"
        )
    except RepositoryNotFoundError:
        return (
            "the hub has no such model, or not for this user: check the name, and for a private "
            "one run `hf auth login`, or set HF_TOKEN"
        )
    except EntryNotFoundError:
        return "the hub's repository has no config.json: take one with safetensors weights"
    except OfflineModeIsEnabled:
        return "HF_HUB_OFFLINE forbids to fetch it: unset that, or write the path of a copy"
    except Exception as error:  # of its HTTP client, which has many
        return (
            f"the hub cannot be reached ({first_line(error)}): check the network and HF_ENDPOINT, "
            "or write the path of a copy in its place"
        )
    return ""

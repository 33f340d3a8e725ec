"""The runner and the KV of an engine, as every process of a replica makes them."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from rapid.checkpoints.digests import digest_of_files, digest_of_sources
from rapid.checkpoints.files import checkpoint_source, read_json
from rapid.config import EngineConfig
from rapid.engines.forward.graphs.buckets import padding_pages
from rapid.engines.forward.graphs.cuda_graphs import GraphCapture
from rapid.engines.forward.kernels import kernels_of
from rapid.engines.forward.key_centres import key_centres
from rapid.engines.forward.runner import Runner
from rapid.engines.forward.sharding.shards import weight_files
from rapid.engines.forward.tiles import TiledRunner
from rapid.engines.forward.weights.loading import (
    LoadedModel,
    kv_layout_of,
    plan_kv_pages,
    plan_rings,
)
from rapid.engines.kv.cache import KVCache, KVLayout
from rapid.engines.kv.passages import PassageCache
from rapid.engines.kv.tiers.host_tier import HostTier
from rapid.engines.kv.tiers.page_files import PageFiles

logger = logging.getLogger(__name__)

# Settings that decide the numbers of a page.
_DECIDING = {"dtype", "rope_scaling", "quantization", "kv_cache_dtype", "page_tokens"}
_DECIDING |= {"deterministic"}
_ROOT = Path(__file__).parents[2]  # of the package `rapid`


def open_runner(
    loaded: LoadedModel,
    config: EngineConfig,
    vocab_size: int,
    make_host: Callable[[KVLayout, int, int], HostTier] = HostTier,
) -> tuple[Runner, HostTier | None]:
    """Allocate an engine's KV and choose its kernels; return the runner and, if any, the host tier.

    `make_host` makes that, from its layout, its pages and the tokens of each. Logits are those of
    `vocab_size` ids.

    Raises:
        ConfigurationError: The KV pool cannot hold one sequence.
    """
    max_context, num_pages = plan_kv_pages(loaded, config)
    rings = plan_rings(loaded, config)
    if rings is None and any(loaded.kv_layout.sliding):
        why = "rings would take as much as kv_cache_tokens"
        if config.host_cache_tokens:
            why = "host_cache_tokens keeps pages"
        logger.info("layers with a sliding window have pages for all tokens: %s", why)
    has_padding = config.deterministic or rings is not None or loaded.device.type == "cuda"
    num_extra = padding_pages(config.page_tokens) if has_padding else 0
    num_ring_slots = rings.num_tokens + num_extra * config.page_tokens if rings else 0
    layout = kv_layout_of(loaded, config)
    centres = key_centres(loaded.model) if layout.is_fp8 else ()
    num_pages += num_extra
    cache = KVCache(layout, num_pages, config.page_tokens, centres, num_ring_slots)
    kernels = kernels_of(loaded, cache, max_context, config)
    runner_class = TiledRunner if config.deterministic else Runner
    runner = runner_class(loaded.model, cache, loaded.device, vocab_size, kernels, loaded.place)
    if len(set(layout.devices)) == 1:
        runner.capture_steps(max_context, GraphCapture(), config.max_leases)
    num_host_pages = config.host_cache_tokens // config.page_tokens
    host = make_host(layout, num_host_pages, config.page_tokens) if num_host_pages else None
    return runner, host


def open_passages(loaded: LoadedModel, config: EngineConfig, runner: Runner) -> PassageCache | None:
    """Make the cache of passages; None, and a line in the log, where prompts are read together."""
    if not config.passage_cache_tokens:
        return None
    layout = runner.cache.layout
    frequencies = None if loaded.place is not None else runner.frequencies
    refusals = {
        "the model is computed by several processes": loaded.place is not None,
        "its layers lie on several devices": len(set(layout.devices)) > 1,
        "KV is kept in fp8": layout.is_fp8,
        "layers have a sliding window": layout.window is not None,
        "its own layers turn keys": frequencies is None,
    }
    for why, is_so in refusals.items():
        if is_so:
            logger.warning("passage_cache_tokens: passages are read together: %s", why)
            return None
    assert frequencies is not None
    max_bytes = layout.num_bytes(config.passage_cache_tokens)
    return PassageCache(runner.cache, frequencies, max_bytes, config.passage_cache_bits)


def open_page_files(
    loaded: LoadedModel, config: EngineConfig, host: HostTier, context: bytes
) -> PageFiles:
    """Open the files of the pages of a model, or of this rank's part of it.

    `context` is what `page_context` returned, on the first rank.

    Raises:
        OSError: The folder cannot be used.
    """
    assert config.disk_cache_gib is not None
    num_writers = 1
    if loaded.place is not None:
        shard = loaded.place.shard
        num_writers = shard.size
        part = f"{shard.rank} of {shard.size}"
        context = blake2b(part.encode(), digest_size=len(context), key=context).digest()
    cap_bytes = config.disk_cache_gib * 2**30
    page_bytes = len(host.memory_of(0))
    return PageFiles(folder_of_pages(config), context, page_bytes, cap_bytes, num_writers)


def folder_of_pages(config: EngineConfig) -> Path:
    """Return the folder of the files of all models' pages."""
    assert config.disk_cache_folder is not None
    return Path(os.path.expanduser(config.disk_cache_folder))


def page_context(loaded: LoadedModel, config: EngineConfig) -> bytes:
    """Return a digest of all that the numbers of a page depend on, beside its tokens.

    Software and device belong to it, as they may change the last bits or more.

    Raises:
        OSError: The folder of the files cannot be used.
    """
    root = folder_of_pages(config)
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    memo = root / "weights.json"
    source = checkpoint_source(config.model)
    is_one_file = Path(source).is_file()
    weights = [Path(source)] if is_one_file else weight_files(source)
    layout, device = loaded.kv_layout, loaded.device
    is_cuda = device.type == "cuda"
    settings: Any = loaded.model.config
    facts = {
        "weights": digest_of_files(weights, memo),
        "settings": None if is_one_file else read_json(source, "config.json"),
        "layout": [len(layout.devices), layout.num_kv_heads, layout.head_dim, str(layout.dtype)],
        "device": torch.cuda.get_device_name(device) if is_cuda else device.type,
        "threads": torch.get_num_threads() if config.deterministic else None,
        "rope": settings.rope_parameters,  # as resolved: of some, `max_context` decides
        "versions": [_version(package) for package in ("torch", "transformers", "triton")],
        "code": digest_of_sources(_computing_files(_ROOT), _ROOT),
        "engine": config.model_dump(include=_DECIDING),
    }
    return blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=32).digest()


def _computing_files(root: Path) -> Iterator[Path]:
    """Return the files of this package whose code decides the numbers of a page."""
    # The package's version would not do: kernels change without it.
    yield root / "checkpoints" / "ropes.py"
    for folder in ("attention", "forward", "kv"):
        yield from (root / "engines" / folder).glob("*.py")


def _version(package: str) -> str | None:
    """Return a package's version, or None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None

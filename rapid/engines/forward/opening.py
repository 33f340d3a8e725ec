"""The runner and the KV of an engine, as every process of a replica makes them."""

from __future__ import annotations

from collections.abc import Callable

from rapid.config import EngineConfig
from rapid.engines.forward.buckets import padding_pages
from rapid.engines.forward.cuda_graphs import GraphCapture
from rapid.engines.forward.kernels import kernels_of
from rapid.engines.forward.loading import LoadedModel, plan_kv_pages
from rapid.engines.forward.runner import Runner
from rapid.engines.forward.tiles import TiledRunner
from rapid.engines.kv.cache import KVCache, KVLayout
from rapid.engines.kv.host_tier import HostTier


def open_runner(
    loaded: LoadedModel,
    config: EngineConfig,
    vocab_size: int,
    make_host: Callable[[KVLayout, int, int], HostTier] = HostTier,
) -> tuple[Runner, HostTier | None]:
    """Allocate an engine's KV and choose its kernels.

    Args:
        loaded: The model, or this rank's part of it.
        config: Settings of the engine.
        vocab_size: Number of token ids that logits are returned for.
        make_host: Makes the second tier, from its layout, its pages and the tokens of each.

    Returns:
        The runner over the KV, and the KV's second tier, in host memory, if there is one.

    Raises:
        ConfigurationError: The KV pool cannot hold one sequence.
    """
    max_context, num_pages = plan_kv_pages(loaded, config)
    has_padding = config.deterministic or loaded.device.type == "cuda"
    num_extra = padding_pages(config.page_tokens) if has_padding else 0
    cache = KVCache(loaded.kv_layout, num_pages + num_extra, config.page_tokens)
    kernels = kernels_of(loaded, cache, max_context, config)
    runner_class = TiledRunner if config.deterministic else Runner
    runner = runner_class(loaded.model, cache, loaded.device, vocab_size, kernels, loaded.place)
    if len(set(loaded.kv_layout.devices)) == 1:
        runner.capture_steps(max_context, GraphCapture())
    num_host_pages = config.host_cache_tokens // config.page_tokens
    host = None
    if num_host_pages:
        host = make_host(loaded.kv_layout, num_host_pages, config.page_tokens)
    return runner, host

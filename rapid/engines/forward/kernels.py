"""Selection of the attention kernels of an engine that is starting."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rapid.engines.attention import ragged as attention
from rapid.engines.attention.cuda import CAPTURING, choose_kernels, float32_partial
from rapid.engines.attention.kernel_inputs import Kernels
from rapid.engines.forward.tiles import tile_kernels
from rapid.engines.kv.cache import KVCache
from rapid.planning.families import window_of

if TYPE_CHECKING:
    from rapid.config import EngineConfig
    from rapid.engines.forward.weights.loading import LoadedModel

_chosen: dict[tuple[object, ...], Kernels] = {}


def kernels_of(
    loaded: LoadedModel, cache: KVCache, max_context: int, config: EngineConfig
) -> Kernels | None:
    """Return the kernels of an engine that is starting; None off CUDA unless it is deterministic.

    The cache must be unused, since timing overwrites it.
    """
    layout = loaded.kv_layout
    is_cuda = all(device.type == "cuda" for device in layout.devices)
    if config.deterministic:  # a fixed kernel, not chosen by its time, which no graph captures
        return tile_kernels(float32_partial if is_cuda else attention.partial)
    if not is_cuda:
        return None
    settings: Any = loaded.model.config
    num_heads = int(settings.num_attention_heads)
    page_tokens, step_tokens = config.page_tokens, config.step_tokens
    window = window_of(settings.to_dict())
    has_sinks = hasattr(loaded.model.get_submodule("model.layers.0.self_attn"), "sinks")
    # Engines of one shape and of about the same size reuse what the first of them found.
    alike = (
        *(layout.devices[0], layout.num_kv_heads, layout.head_dim, layout.dtype),
        *(
            config.kv_cache_dtype,
            num_heads,
            page_tokens,
            max_context.bit_length(),
            step_tokens,
            window,
            has_sinks,
        ),
    )
    if alike not in _chosen:
        # Torch must not draw random numbers while another engine captures a graph.
        with CAPTURING, torch.cuda.device(layout.devices[0]):
            _chosen[alike] = choose_kernels(
                *(cache, num_heads, page_tokens, max_context, step_tokens),
                window=window,
                has_sinks=has_sinks,
            )
    return _chosen[alike]

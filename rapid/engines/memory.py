"""Room for KV, planned before anything is allocated and refused with numbers."""

from __future__ import annotations

import torch

from rapid.config import EngineConfig
from rapid.engines.loading import LoadedModel
from rapid.errors import ConfigurationError


def plan_kv_pages(loaded: LoadedModel, config: EngineConfig) -> tuple[int, int]:
    """The longest sequence and the number of pages of an engine.

    Raises:
        ConfigurationError: the pool cannot hold one sequence, the model cannot reach `max_context`,
            or the device lacks the memory.
    """
    max_context = config.max_context or loaded.max_context
    if max_context > loaded.max_context:
        raise ConfigurationError(
            f"max_context {max_context} is beyond the {loaded.max_context} positions of "
            f"{loaded.name!r}; set rope_scaling or lower it"
        )
    per_token = loaded.kv_layout.bytes_per_token
    num_pages = config.kv_cache_tokens // config.page_tokens
    room = num_pages * config.page_tokens
    if room < max_context:
        raise ConfigurationError(
            f"KV pool too small for one sequence of {loaded.name!r}: kv_cache_tokens gives "
            f"{room} tokens ({_mebibytes(room * per_token)}), max_context is {max_context} "
            f"({_mebibytes(max_context * per_token)}); raise kv_cache_tokens or set max_context"
        )
    if loaded.device.type == "cuda" and len(set(loaded.kv_layout.devices)) == 1:
        free, _ = torch.cuda.mem_get_info(loaded.device)
        if room * per_token > free:
            raise ConfigurationError(
                f"a KV pool of {room} tokens takes {_mebibytes(room * per_token)}; "
                f"{loaded.device} has {_mebibytes(free)} left after the weights of {loaded.name!r}"
            )
    return max_context, num_pages


def _mebibytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"

"""Room for KV, planned before anything is allocated and refused with numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rapid.config import EngineConfig
from rapid.errors import ConfigurationError

if TYPE_CHECKING:  # preflight plans without torch
    from rapid.engines.loading import LoadedModel


def plan_pages(config: EngineConfig, num_positions: int) -> tuple[int, int]:
    """The longest sequence and the number of pages of an engine, as its settings have them.

    Args:
        num_positions: how far the model reaches.

    Raises:
        ConfigurationError: the pool cannot hold one sequence, or the model cannot reach
            `max_context`.
    """
    max_context = config.max_context or num_positions
    if max_context > num_positions:
        raise ConfigurationError(
            f"max_context {max_context} is beyond the {num_positions} positions of "
            f"{config.model!r}; set rope_scaling or lower it"
        )
    num_pages = config.kv_cache_tokens // config.page_tokens
    if num_pages * config.page_tokens < max_context:
        raise ConfigurationError(
            f"KV pool too small for one sequence of {config.model!r}: kv_cache_tokens "
            f"{config.kv_cache_tokens} gives {num_pages} pages of {config.page_tokens} tokens, "
            f"max_context is {max_context}; raise kv_cache_tokens or set max_context"
        )
    return max_context, num_pages


def plan_kv_pages(loaded: LoadedModel, config: EngineConfig) -> tuple[int, int]:
    """`plan_pages` on the device where the model is.

    Raises:
        ConfigurationError: as there, or the device lacks the memory.
    """
    max_context, num_pages = plan_pages(config, loaded.max_context)
    room = num_pages * config.page_tokens
    per_token = loaded.kv_layout.bytes_per_token
    if loaded.device.type == "cuda" and len(set(loaded.kv_layout.devices)) == 1:
        import torch

        free, _ = torch.cuda.mem_get_info(loaded.device)
        if room * per_token > free:
            raise ConfigurationError(
                f"a KV pool of {room} tokens takes {_mebibytes(room * per_token)}; "
                f"{loaded.device} has {_mebibytes(free)} left after the weights of {config.model!r}"
            )
    return max_context, num_pages


def _mebibytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"

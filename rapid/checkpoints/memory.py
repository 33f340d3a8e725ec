"""Memory for weights, KV and the largest step, planned before anything is allocated."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rapid.checkpoints.digests import read_safetensors_header
from rapid.checkpoints.facts import ModelFacts
from rapid.checkpoints.files import checkpoint_source, read_json
from rapid.config import EngineConfig
from rapid.errors import ConfigurationError
from rapid.planning import packed_bits
from rapid.planning.plan import MemoryNeed
from rapid.planning.ring_sizes import ring_plan

STAGED_BYTES = 2**26  # on a GPU, through which pages pass to and from the host cache
ALL_GPUS = "all GPUs together"  # where the layers of `device: balanced` go
_INDEX = "model.safetensors.index.json"
# Of the dtypes that an engine computes in.
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_CONVERTED = {"F32": 4, "F16": 2, "BF16": 2}  # are converted to `dtype`; quantized tensors are not


def plan_pages(config: EngineConfig, num_positions: int) -> tuple[int, int]:
    """Return the longest sequence, in tokens, and the number of pages of an engine.

    Raises:
        ConfigurationError: the pool cannot hold one sequence, or `max_context` is beyond the
            model's positions.
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


def memory_needs(
    config: EngineConfig,
    facts: ModelFacts,
    *,
    on_gpu: bool,
    with_pools: bool,
    num_machines: int = 1,
) -> tuple[MemoryNeed, MemoryNeed]:
    """Return the memory that a model will need on its device and, beside a GPU, on the host.

    With `tensor_parallel`, a GPU needs what its part needs; on a CPU all parts of a machine share
    the host, as does on GPUs what is cached there. `with_pools` counts KV pool and host cache too.
    """
    width = _DTYPE_BYTES.get(config.dtype, 2 if on_gpu else 4)
    num_parts = config.tensor_parallel if on_gpu else num_machines
    shape = facts.shape.part_of(num_parts)
    kv_width = 1 if config.kv_cache_dtype == "fp8" else width
    whole_per_token = facts.shape.kv_bytes_per_token(kv_width) if with_pools else 0
    rings = ring_plan(config, facts.shape.window or None)
    pool_tokens = facts.shape.count_kept_tokens(
        config.kv_cache_tokens, None if rings is None else rings.num_tokens
    )
    cached_tokens = config.host_cache_tokens + config.passage_cache_tokens
    host = MemoryNeed(host_cache=cached_tokens * whole_per_token / num_machines)
    workspace = shape.workspace_bytes(config.step_tokens, config.max_leases, width, on_gpu=on_gpu)
    is_int4 = config.quantization == "int4" or _has_four_bits(facts)
    if is_int4 and on_gpu:
        workspace += packed_bits.unpacking_bytes(shape)
    device = MemoryNeed(
        weights=_weight_bytes(config, facts, width) / num_parts,
        kv_pool=pool_tokens * whole_per_token / num_parts,
        workspace=workspace,
    )
    if on_gpu:
        max_context = config.max_context or facts.num_positions
        checked = shape.check_bytes(config.step_tokens, max_context, width)
        if config.host_cache_tokens:
            device = replace(device, kv_pool=device.kv_pool + STAGED_BYTES)
        graphs = shape.graph_bytes(config.max_leases, width)
        return replace(device, graphs=graphs, check=checked), host
    return replace(device, host_cache=host.host_cache), MemoryNeed()


def check_fits(needs: Sequence[tuple[str, MemoryNeed]], where: str, free: float) -> None:
    """Raise ConfigurationError, with all numbers, if models need more than is `free` at a place."""
    total = sum(need.total for _, need in needs)
    if total <= free:
        return
    models = " and ".join(f"{name} ({_parts(need)})" for name, need in needs)
    more = "give the engine more GPUs" if where == ALL_GPUS else "device: balanced"
    change = f"take a smaller model or dtype, set quantization, or {more}"
    if sum(need.total - need.pools for _, need in needs) < free:
        has_host_cache = any(need.host_cache for _, need in needs)
        change = "lower kv_cache_tokens" + " or host_cache_tokens" * has_host_cache
    raise ConfigurationError(
        f"{where} cannot hold {models}: {_size(total)} are needed, {_size(free)} are free; {change}"
    )


def free_bytes(device: str) -> int:
    """Return the bytes that can be allocated on ``cpu``, ``cuda``, ``cuda:1`` or ``balanced``."""
    if device == "cpu":
        import psutil

        return int(psutil.virtual_memory().available)
    import torch

    if device == "balanced":
        return sum(free_bytes(f"cuda:{index}") for index in range(torch.cuda.device_count()))
    free, _ = torch.cuda.mem_get_info(device)
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(free + kept)  # torch reuses the memory that it keeps of freed tensors


def _has_four_bits(facts: ModelFacts) -> bool:
    return facts.stored is not None and facts.stored.bits == packed_bits.BITS


def _weight_bytes(config: EngineConfig, facts: ModelFacts, width: int) -> float:
    """Return the bytes of the weights from safetensors headers, the hub's index or the shape."""
    part = facts.shape.part_of(config.tensor_parallel)
    if facts.has_mxfp4:
        return facts.shape.weight_bytes(8 * width, 8 * width)
    if facts.stored is not None:
        bits = packed_bits.layer_bits_of(part, facts.stored)
        return facts.shape.weight_bytes(bits, 8 * width)
    if config.quantization is None or facts.quantization is not None:
        source = checkpoint_source(config.model)
        stored = _bytes_in_headers(Path(source), width) or _bytes_in_index(source, facts, width)
        if stored:
            return stored
    quantization = facts.quantization or config.quantization
    if quantization == "int4":
        bits = packed_bits.layer_bits(part)
    else:
        bits = 8 * width if quantization is None else weight_bits(quantization)
    return facts.shape.weight_bytes(bits, 8 * width)


def weight_bits(quantization: Mapping[str, Any] | str) -> float:
    """Return the bits of a weight in the layers; 4, a common minimum, for unknown methods."""
    # Scales are not counted: a plan may refuse only what is certain not to fit. Those of ``int4``
    # are (`rapid.planning.packed_bits`).
    if isinstance(quantization, str):
        return 8.0
    for name in ("bits", "nbits", "w_bit"):
        if isinstance(quantization.get(name), (int, float)):
            return float(quantization[name])
    method = str(quantization.get("quant_method", ""))
    return 8.0 if quantization.get("load_in_8bit") or "8" in method else 4.0


def _bytes_in_headers(directory: Path, width: int) -> float:
    """Return the bytes of all tensors as they will be in memory; 0 where there are no files."""
    index = directory / _INDEX
    if index.is_file():
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    else:
        names = {"model.safetensors"}
    files = [directory / name for name in names if (directory / name).is_file()]
    return sum(
        _tensor_bytes(tensor, width)
        for file in files
        for name, tensor in read_safetensors_header(file)[0].items()
        if name != "__metadata__"
    )


def _tensor_bytes(tensor: Mapping[str, Any], width: int) -> float:
    start, stop = map(int, tensor["data_offsets"])
    stored = _CONVERTED.get(tensor["dtype"], width)
    return (stop - start) * width / stored


def _bytes_in_index(source: str, facts: ModelFacts, width: int) -> float:
    """Return the bytes of a checkpoint on the hub in several files; 0 without an index or dtype."""
    index = None if Path(source).is_dir() else read_json(source, _INDEX)
    total = float(((index or {}).get("metadata") or {}).get("total_size", 0))
    if facts.quantization is not None:
        return total
    return total * width / _DTYPE_BYTES[facts.dtype] if facts.dtype in _DTYPE_BYTES else 0.0


def _parts(need: MemoryNeed) -> str:
    is_start = need.work > need.workspace + need.graphs
    parts = {
        "weights": need.weights,
        "KV pool": need.kv_pool,
        "check of the kernels": need.check if is_start else 0,
        "workspace": 0 if is_start else need.workspace,
        "captured steps": 0 if is_start else need.graphs,
        "host cache": need.host_cache,
    }
    return ", ".join(f"{name} {_size(part)}" for name, part in parts.items() if part)


def _size(num_bytes: float) -> str:
    return (
        f"{num_bytes / 2**30:,.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:,.0f} MiB"
    )

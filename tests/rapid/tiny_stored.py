"""Tiny checkpoints as AutoAWQ, AutoGPTQ and llm-compressor publish them, packed one by one here."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from rapid.config import EngineConfig
from tests.rapid.engines.forward.sharding.test_shards import headed
from tests.rapid.tiny_families import family_checkpoint, family_config
from tests.rapid.tiny_models import FAMILIES

GROUP = 128
WIDE = {"hidden_size": 128, "intermediate_size": 384, "head_dim": 32}  # on two ranks half a group
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

_FOUR: dict[str, Any] = {"bits": 4, "group_size": GROUP}
_LINEAR: dict[str, Any] = {"targets": ["Linear"], "output_activations": None}
_IN_FOUR = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
_IN_EIGHT = {"num_bits": 8, "type": "float", "symmetric": True}
_COMPRESSED: dict[str, Any] = {"quant_method": "compressed-tensors", "ignore": ["lm_head"]}

# The settings of published checkpoints, shortened, by a name for each.
PUBLISHED: dict[str, dict[str, Any]] = {
    "awq": _FOUR | {"quant_method": "awq", "zero_point": True, "version": "gemm"},
    "gptq": _FOUR | {"quant_method": "gptq", "desc_act": False, "sym": True},
    "gptq of rows": _FOUR | {"quant_method": "gptq", "desc_act": False, "group_size": -1},
    "gptq v2": _FOUR
    | {"quant_method": "gptq", "desc_act": False, "sym": False, "checkpoint_format": "gptq_v2"},
    "w4a16": _COMPRESSED
    | {
        "format": "pack-quantized",
        "config_groups": {
            "group_0": _LINEAR
            | {"weights": _IN_FOUR | {"symmetric": True}, "input_activations": None}
        },
    },
    "w4a16 with zeros": _COMPRESSED
    | {
        "format": "pack-quantized",
        "config_groups": {
            "group_0": _LINEAR
            | {"weights": _IN_FOUR | {"symmetric": False}, "input_activations": None}
        },
    },
    "fp8": _COMPRESSED
    | {
        "format": "float-quantized",
        "config_groups": {
            "group_0": _LINEAR
            | {
                "weights": _IN_EIGHT | {"strategy": "channel"},
                "input_activations": _IN_EIGHT | {"strategy": "token", "dynamic": True},
            }
        },
    },
    "fp8 by matrix": _COMPRESSED
    | {
        "format": "float-quantized",
        "config_groups": {
            "group_0": _LINEAR
            | {"weights": _IN_EIGHT | {"strategy": "tensor"}, "input_activations": None}
        },
    },
}


def publish(
    tmp_path: Path, name: str, family: str = "llama", *, without: str = "no name", **sizes: object
) -> tuple[EngineConfig, EngineConfig]:
    """Write a checkpoint of `PUBLISHED`, and one of the numbers that it stands for, in bfloat16.

    Projections whose names have `without` in them stay as they are. Scales are powers of two, so
    that bfloat16 holds all numbers.
    """
    plain = tmp_path / "plain"
    if family in FAMILIES:
        plain.mkdir(parents=True)
        config = headed(plain, family, **WIDE | sizes)
    else:
        shutil.copytree(family_checkpoint(family, **sizes), plain)
        config = family_config(plain)
    stored = tmp_path / "stored"
    shutil.copytree(plain, stored)
    numbers = load_file(plain / "model.safetensors")
    published = {key: weight for key, weight in numbers.items() if key.endswith("bias")}
    for key, weight in list(numbers.items()):
        module, _, kind = key.rpartition(".")
        if kind == "weight" and module.endswith("_proj") and without not in module:
            parts, numbers[key] = _quantize(name, weight.float())
            for part, tensor in parts.items():
                published.setdefault(f"{module}.{part}", tensor.contiguous())
        else:
            published[key] = weight
    save_file(numbers, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(published, stored / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((stored / "config.json").read_text())
    settings["quantization_config"] = PUBLISHED[name]
    (stored / "config.json").write_text(json.dumps(settings))
    config = config.model_copy(update={"dtype": "bfloat16"})
    return config.model_copy(update={"model": str(stored)}), config


def _quantize(name: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The tensors that a weight [out, in] is published as, and its numbers."""
    if "fp8" in name:
        largest = weight.abs().amax(dim=-1 if name == "fp8" else (0, 1), keepdim=True)
        scale = (largest / 448).log2().ceil().exp2().bfloat16()
        codes = (weight / scale.float()).to(torch.float8_e4m3fn)
        numbers = codes.float() * scale.float()
        return {"weight": codes, "weight_scale": scale if name == "fp8" else scale[0]}, numbers
    num_out, num_in = weight.shape
    groups = weight.view(num_out, 1 if "rows" in name else num_in // GROUP, -1)
    has_zeros = name in ("awq", "gptq v2", "w4a16 with zeros")
    least = groups.amin(-1) if has_zeros else -groups.abs().amax(-1)
    most = groups.amax(-1) if has_zeros else -least * 7 / 8
    scale = ((most - least) / 15).log2().ceil().exp2().half()
    zero = (-least / scale.float()).round().clamp(0, 15) if has_zeros else torch.full_like(least, 8)
    steps = (groups / scale.float()[..., None]).round() + zero[..., None]
    codes = steps.clamp(0, 15)
    numbers = ((codes - zero[..., None]) * scale.float()[..., None]).view(num_out, num_in)
    codes = codes.view(num_out, num_in)
    if name == "awq":
        packed, zeros = _pack(codes, 0, _AWQ_ORDER), _pack(zero, 0, _AWQ_ORDER)
        return {"qweight": packed.T, "qzeros": zeros.T, "scales": scale.T}, numbers
    if name.startswith("gptq"):
        # The first version stores zeros less one.
        zeros = _pack(zero - int(name != "gptq v2"), 0)
        index = torch.arange(num_in, dtype=torch.int32) // groups.shape[-1]
        bias = torch.zeros(num_out)  # AutoGPTQ writes one of every layer
        parts = {"qweight": _pack(codes, 1).T, "qzeros": zeros.T, "scales": scale.T}
        return parts | {"g_idx": index} | ({"bias": bias} if name == "gptq v2" else {}), numbers
    parts = {"weight_packed": _pack(codes, 1), "weight_scale": scale}
    parts["weight_shape"] = torch.tensor(weight.shape)
    return parts | ({"weight_zero_point": _pack(zero, 0)} if has_zeros else {}), numbers


def _pack(codes: torch.Tensor, dim: int, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Codes with eight along a dimension in one integer, its lowest bits those of `order[0]`."""
    eights = codes.long().unflatten(dim, (-1, 8)).movedim(dim + 1, -1)
    packed = sum(eights[..., each] << 4 * place for place, each in enumerate(order))
    return torch.as_tensor(packed).to(torch.int32)

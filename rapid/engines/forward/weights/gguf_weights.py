"""The weights of a GGUF file, dequantized and under the names of transformers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np
import torch

from rapid.checkpoints.gguf import FREQUENCIES, GGUFHeader
from rapid.errors import ConfigurationError

_OUTSIDE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_IN_A_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


# transformers' ``gguf_file=`` is the specification; it takes five times as long.
def read_weights(
    header: GGUFHeader, settings: Mapping[str, Any], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Return all weights by transformers' names, converted to `dtype`.

    `settings` are those of `rapid.checkpoints.gguf.read_settings`.

    Raises:
        ConfigurationError: the file holds a tensor that the architecture does not have, or one of a
            type that cannot be dequantized.
    """
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    data = np.memmap(header.path, dtype=np.uint8, mode="r")
    heads = {"attn_q": settings["num_attention_heads"], "attn_k": settings["num_key_value_heads"]}
    weights = {}
    for name, place in header.tensors.items():
        if name == FREQUENCIES:  # `rope_scaling` says the same
            continue
        stored = data[place.start : place.start + place.num_bytes]
        kind = GGMLQuantizationType(place.type_id)
        try:
            rows = stored.reshape((*place.shape[:-1], -1))  # of bytes
            numbers = dequantize(rows, kind).reshape(place.shape)
        except (NotImplementedError, ValueError) as error:
            raise ConfigurationError(
                f"{header.path}: the tensor {name} is stored as {kind.name}, which cannot be "
                "dequantized: take another quantization of the same model, such as Q8_0 or Q4_K_M"
            ) from error
        layer_part = re.fullmatch(r"blk\.\d+\.(attn_[qk])\.(weight|bias)", name)
        if header.architecture == "llama" and layer_part:
            numbers = _halves_apart(numbers, heads[layer_part[1]])
        # `dequantize` may return a view of the read-only file.
        weights[_rename(header, name)] = torch.from_numpy(np.array(numbers)).to(dtype)
    return weights


def has_few_bits(header: GGUFHeader) -> bool:
    """Return whether every matrix has at most 16 bits a number."""
    matrices = [place for place in header.tensors.values() if len(place.shape) > 1]
    return all(8 * each.num_bytes <= 16 * prod(each.shape) for each in matrices)


def _halves_apart(numbers: Any, num_heads: int) -> Any:
    """Undo llama.cpp's order of a head's rows, in which RoPE turns neighbours."""
    rows = numbers.shape[0]  # transformers turns row i of a head with row i + half
    pairs = numbers.reshape(num_heads, rows // num_heads // 2, 2, *numbers.shape[1:])
    return pairs.swapaxes(1, 2).reshape(numbers.shape)


def _rename(header: GGUFHeader, name: str) -> str:
    stem, _, kind = name.rpartition(".")
    in_layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if in_layer and in_layer[2] in _IN_A_LAYER:
        return f"model.layers.{in_layer[1]}.{_IN_A_LAYER[in_layer[2]]}.{kind}"
    if stem in _OUTSIDE:
        return f"{_OUTSIDE[stem]}.{kind}"
    raise ConfigurationError(
        f"{header.path} holds the tensor {name}, which a {header.architecture} model of the "
        "supported kind does not have (experts and adapters are not supported)"
    )

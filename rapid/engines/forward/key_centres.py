"""Centres of the keys of models whose keys have a bias, for keys that are kept in fp8.

Biases of Qwen2 are so large that fp8 would keep little else. Subtracting one vector, the mean over
positions of the rotated bias, changes all scores of a query equally, which the softmax cancels.
"""

from __future__ import annotations

from typing import Any

import torch

POSITIONS = 4096  # over which the rotated bias is averaged


@torch.inference_mode()
def key_centres(model: torch.nn.Module) -> list[torch.Tensor | None]:
    """Return the centre of each layer's keys [kv_heads, head_dim]; None for keys without bias."""
    of_model: Any = model
    return [_centre(layer.self_attn, of_model.model.rotary_emb) for layer in of_model.model.layers]


def _centre(attention: Any, rotary: Any) -> torch.Tensor | None:
    bias = getattr(getattr(attention, "k_proj", None), "bias", None)
    # A sink is no score of a key: it would not change with the others.
    if bias is None or hasattr(attention, "k_norm") or hasattr(attention, "sinks"):
        return None
    heads = bias.view(-1, attention.head_dim).float()
    positions = torch.arange(POSITIONS, device=heads.device)[None]
    angles = rotary(heads[None], positions)  # on the rotary's device, where layers are spread
    cos, sin = (each[0].float().mean(0).to(heads.device) for each in angles)
    half = len(cos) // 2
    turned = torch.cat((-heads[:, half:], heads[:, :half]), dim=-1)
    centre: torch.Tensor = heads * cos + turned * sin
    return centre.to(bias.dtype)

"""Centres of the keys of models whose keys have a bias, for keys that are kept in fp8.

Keys of Qwen2 have biases of some hundred in a few dimensions, mostly in slowly rotating ones. There
every key has about the same large number, and fp8, whose error is a share of each number, would
keep little of what tells them apart. Attention is the same if one vector is subtracted from all
keys of a head: every score of a query changes by the same amount, which the softmax cancels. So the
mean over positions of the rotated bias is subtracted from each key before it is stored, and nothing
is added when it is read. It follows from the weights alone.
"""

from __future__ import annotations

from typing import Any

import torch

POSITIONS = 4096  # over which the rotated bias is averaged


@torch.inference_mode()
def key_centres(model: torch.nn.Module) -> list[torch.Tensor | None]:
    """Return the centre of each layer's keys [kv_heads, head_dim], or None for keys without bias.

    Args:
        model: A transformers model, or one rank's part of it.
    """
    of_model: Any = model
    return [_centre(layer.self_attn, of_model.model.rotary_emb) for layer in of_model.model.layers]


def _centre(attention: Any, rotary: Any) -> torch.Tensor | None:
    bias = getattr(getattr(attention, "k_proj", None), "bias", None)
    if bias is None or hasattr(attention, "k_norm"):
        return None
    heads = bias.view(-1, attention.head_dim).float()
    positions = torch.arange(POSITIONS, device=heads.device)[None]
    angles = rotary(heads[None], positions)  # on the rotary's device, where layers are spread
    cos, sin = (each[0].float().mean(0).to(heads.device) for each in angles)
    half = len(cos) // 2
    turned = torch.cat((-heads[:, half:], heads[:, :half]), dim=-1)
    centre: torch.Tensor = heads * cos + turned * sin
    return centre.to(bias.dtype)

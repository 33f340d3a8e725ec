"""The norms, rope, KV store and gate of a transformer's layer, by operations of torch.

It computes on a CPU, and specifies the kernels for CUDA (`layer_kernels` beside it).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import rms_norm
from transformers.activations import GELUTanh

from rapid.engines.forward.linear.products import (
    FP8_CAPABILITY,
    AnyProduct,
    Product,
    Rows,
    ScaledRows,
    quantize_weight,
)
from rapid.engines.kv.cache import KVCache, KVLayout
from rapid.engines.kv.fp8 import CAPABILITY

Activation = Callable[[torch.Tensor], torch.Tensor]
# Cosines and sines [rows, 1, rotated]; the first half of the sines is negated.
Angles = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class LayerOperations:
    """The operations of the layers of one model.

    Rows that go `into` a product of fp8 weights may be returned in fp8.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    epsilon: float  # added to the mean square that a norm divides by

    def norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return numbers [..., n] over their root mean square, times `weight` [..., n]."""
        if weight.dtype == hidden.dtype:
            return weight * rms_norm(hidden, hidden.shape[-1:], None, self.epsilon)
        wide = rms_norm(hidden.float(), hidden.shape[-1:], None, self.epsilon)
        return (wide * weight).to(hidden.dtype)

    def add_norm(
        self,
        hidden: torch.Tensor,
        added: torch.Tensor | None,
        after: torch.Tensor | None,
        weight: torch.Tensor,
        into: AnyProduct | None = None,
    ) -> tuple[torch.Tensor, Rows]:
        """Return the sum of hidden states and what a part of a layer adds, and the sum's norm.

        Both are [rows, hidden]; with `after`, it is the norm of `added` that is added.
        """
        if added is not None:
            hidden = hidden + (added if after is None else self.norm(added, after))
        return hidden, self.norm(hidden, weight)

    def store_heads(
        self,
        mixed: torch.Tensor,
        angles: Angles,
        qk_norm: torch.Tensor | None,
        cache: KVCache,
        layer: int,
        slots: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rotate queries and keys, store keys and values in slots, and return all three.

        Args:
            mixed: Queries, keys and values [rows, (heads + 2 kv_heads) * head_dim]; they are
                returned as `KVCache.store` returns them.
            qk_norm: Weights of the norm of queries and keys, [heads + kv_heads, head_dim], or None.
        """
        heads = mixed.view(len(mixed), -1, self.head_dim)
        num_rotated = self.num_heads + self.num_kv_heads
        rotated = heads[:, :num_rotated]
        if qk_norm is not None:
            rotated = self.norm(rotated, qk_norm)
        rotated = _rotate(rotated, *angles).transpose(0, 1)[None]
        value = heads[:, num_rotated:].transpose(0, 1)[None]
        key, value = cache.store(layer, slots, rotated[:, self.num_heads :], value)
        return rotated[:, : self.num_heads], key, value

    def gate(self, both: torch.Tensor, activation: Activation, into: AnyProduct) -> Rows:
        """Return the activation of the first half of numbers [rows, 2n] times the second half."""
        gate, up = both.chunk(2, dim=-1)
        return activation(gate) * up

    def prepare(self, rows: Rows, into: AnyProduct) -> Rows:
        """Return rows as a product takes them."""
        return rows


def _rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first part of each head, as long as the angles are; the rest stays."""
    width = cos.shape[-1]
    if width < heads.shape[-1]:
        first, rest = heads[..., :width], heads[..., width:]
        return torch.cat((_rotate(first, cos, sin), rest), dim=-1)
    return heads * cos + heads.roll(width // 2, -1) * sin


@torch.inference_mode()
def try_out(
    operations: LayerOperations,
    device: torch.device,
    dtype: torch.dtype,
    norm_dtype: torch.dtype,
    width: int,
    rotated: int,
) -> list[torch.Tensor]:
    """Return what all operations make of random numbers, float32, with and without every option.

    Args:
        dtype: Of the numbers; the weights of norms are of `norm_dtype`.
        width: Numbers of a hidden state; must be a multiple of 16.
        rotated: Numbers of a head that rotate.
    """
    generator = torch.Generator().manual_seed(0)
    num_rows = 3

    def draw(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    products = [Product(draw(16, width))]
    if capability >= FP8_CAPABILITY:
        products.append(Product(*quantize_weight(draw(16, width), "fp8")))
    hidden, added, both = draw(num_rows, width), draw(num_rows, width), draw(num_rows, 2 * width)
    weight, after = draw(width, dtype=norm_dtype), draw(width, dtype=norm_dtype)
    found: list[Rows] = []
    for into in products:
        found += operations.add_norm(hidden, None, None, weight, into)
        found += operations.add_norm(hidden, added, None, weight, into)
        found += operations.add_norm(hidden, added, after, weight, into)
        for activation in (torch.nn.SiLU(), GELUTanh()):
            found.append(operations.gate(both, activation, into))
        found.append(operations.prepare(hidden, into))
    num_heads, head_dim = operations.num_heads + operations.num_kv_heads, operations.head_dim
    mixed = draw(num_rows, (num_heads + operations.num_kv_heads) * head_dim)
    angles = draw(num_rows, 1, rotated), draw(num_rows, 1, rotated)
    slots = torch.tensor([5, 0, 2], device=device)
    for is_fp8 in (False, True) if capability >= CAPABILITY else (False,):
        layout = KVLayout(operations.num_kv_heads, head_dim, dtype, (device,), is_fp8)
        for qk_norm in (None, draw(num_heads, head_dim, dtype=norm_dtype)):
            cache = KVCache(layout, 1, 6, [draw(operations.num_kv_heads, head_dim)])
            found += operations.store_heads(mixed, angles, qk_norm, cache, 0, slots)
            found += [kept[:, slot] for kept in cache.layers[0] for slot in (5, 0, 2)]
    return [
        rows.numbers.float() * rows.scale[:, None] if isinstance(rows, ScaledRows) else rows.float()
        for rows in found
    ]

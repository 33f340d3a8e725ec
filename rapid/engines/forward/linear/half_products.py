"""Products on a CPU of rows in float32 with weights in float16, as FBGEMM packs them.

The numbers of a GGUF file have a few bits and the scale of their group; float16 is within 2**-12 of
each, and FBGEMM computes in float32. torch's packed product in four bits reads less, but it rounds
rows and results to bfloat16, and is slower: the products of SmolLM2-135M with 1, 5, 16 and 512 rows
took 45, 103, 148 and 1,700 ms of one thread in float32 (AVX2), 25, 30, 72 and 1,660 in float16, and
27, 59, 154 and 3,400 in four bits.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch

logger = logging.getLogger(__name__)

# Projections of a layer by module; those in one tuple read the same rows, and are one product.
_TOGETHER = {
    "self_attn": (("q_proj", "k_proj", "v_proj"), ("o_proj",)),
    "mlp": (("gate_proj", "up_proj"), ("down_proj",)),
}


@dataclass(frozen=True, slots=True)
class HalfProduct:
    """The product with one matrix of weights in float16, in place of a `Product`."""

    is_of_scaled_rows: ClassVar[bool] = False
    packed: Any  # weights and bias, as torch's operators pack them

    @classmethod
    def of(cls, weight: torch.Tensor, bias: torch.Tensor | None) -> HalfProduct:
        """Return the product with the numbers of float16 nearest to weights [out, in]."""
        return cls(torch.ops.quantized.linear_prepack_fp16(weight, bias))

    def __call__(self, rows: Any) -> torch.Tensor:
        """Return the product of a tensor of rows [..., in] with the weights, and the bias."""
        product: torch.Tensor = torch.ops.quantized.linear_dynamic_fp16(rows, self.packed)
        return product


class HalfLinear(torch.nn.Module):
    """A linear layer in place of transformers' own: some rows of a product that layers share."""

    bias: torch.Tensor | None

    def __init__(self, product: HalfProduct, own: slice, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.product = product
        self._own = own
        self.register_buffer("bias", bias)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the product of the rows with the layer's weights."""
        return self.product(rows)[..., self._own]


@cache
def can_pack() -> bool:
    """Return whether torch has FBGEMM's products on this machine; log it if not."""
    try:
        HalfProduct.of(torch.eye(2), None)(torch.eye(2))
    except (AttributeError, RuntimeError):
        logger.info("weights stay in float32: torch has no products in float16 on this CPU")
        return False
    return True


def pack_halves(model: Any) -> None:
    """Replace a model's linear layers by ones whose weights are in float16, one by one."""
    for layer in model.model.layers:
        for module, groups in _TOGETHER.items():
            for names in groups:
                _pack(getattr(layer, module), names)
    _pack(model, ("lm_head",))


def _pack(module: Any, names: Sequence[str]) -> None:
    linears = [getattr(module, name) for name in names]
    biases = [linear.bias for linear in linears]
    bias = None if biases[0] is None else torch.cat(biases)
    product = HalfProduct.of(torch.cat([linear.weight for linear in linears]), bias)
    start = 0
    for name, linear, its_bias in zip(names, linears, biases, strict=True):
        own = slice(start, start := start + linear.out_features)
        setattr(module, name, HalfLinear(product, own, its_bias))

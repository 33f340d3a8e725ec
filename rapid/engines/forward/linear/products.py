"""Products of rows with a layer's weights, as they are or quantized.

In eight bits each row has a scale, and the product is that with the numbers, which are exact in
bfloat16, times the scales. ``int8`` on a CPU converts integers as it reads them, for few rows;
``fp8`` on a GPU quantizes rows too, each with a scale of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch.nn.functional import linear

from rapid.engines.forward.linear import four_bits
from rapid.engines.forward.linear.half_products import HalfProduct
from rapid.errors import ConfigurationError
from rapid.planning.packed_bits import BITS, StoredBits

Method = Literal["fp8", "int4", "int8"]

MOST_READ_ROWS = 12  # more rows are multiplied faster with weights that were converted before
FP8_CAPABILITY = (9, 0)  # the least of a GPU whose scaled product has a scale for each row
INT4_CAPABILITY = (8, 0)  # the least of a GPU that multiplies weights in four bits
_WIDTH = 16  # numbers that the kernels for eight bits read at once
LEAST = 1e-12  # magnitude that a row of zeros is quantized for


@dataclass(frozen=True, slots=True)
class ScaledRows:
    """Rows in fp8, each with a scale."""

    numbers: torch.Tensor  # [rows, in]
    scale: torch.Tensor  # of each row, float32 [rows]
    dtype: torch.dtype  # of the rows before, and of their product


Rows: TypeAlias = torch.Tensor | ScaledRows


@dataclass(frozen=True, slots=True)
class Product:
    """The product with one matrix of weights."""

    weight: torch.Tensor  # [out, in], of the rows' dtype, or in eight bits; or packed in four bits
    # Of each row of the weights in eight bits, [out]; scale and middle of each group of those in
    # four bits, [groups, out, 2]; None where they are not quantized.
    scale: torch.Tensor | None = None
    bias: torch.Tensor | None = None  # [out], or None

    @property
    def is_of_scaled_rows(self) -> bool:
        """Whether the product takes its rows in fp8, as on a GPU with weights in fp8."""
        return self.weight.dtype == torch.float8_e4m3fn and _is_scaled(self.weight)

    def __call__(self, rows: Rows) -> torch.Tensor:
        """Return the product of `rows` [..., in] with the weights, with the bias, [..., out].

        Only where it is `is_of_scaled_rows` may the rows be in fp8.
        """
        if isinstance(rows, ScaledRows):
            assert self.scale is not None
            shape, product = rows.scale.shape, _multiply_scaled(rows, self.weight, self.scale)
        elif self.scale is None:
            return linear(rows, self.weight, self.bias)
        else:
            shape, flat = rows.shape[:-1], rows.reshape(-1, rows.shape[-1])
            is_in_groups = self.scale.dim() == 3
            multiply = four_bits.product if is_in_groups else _product_of_eight_bits
            product = multiply(flat, self.weight, self.scale)
        if self.bias is not None:
            product = product + self.bias
        return product.view(*shape, -1)


AnyProduct: TypeAlias = Product | HalfProduct


class QuantizedLinear(torch.nn.Module):
    """A linear layer with weights in eight or four bits, in place of transformers' own."""

    weight: torch.Tensor
    scale: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None):
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", bias)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the product of the rows with the weights."""
        return Product(self.weight, self.scale, self.bias)(rows)


def check_method(method: Method, device: torch.device, dtype: torch.dtype) -> None:
    """Raise ConfigurationError unless a device can compute with weights of this kind."""
    if method == "int8" and device.type != "cpu":
        raise ConfigurationError(
            "quantization: int8 is for a CPU: set quantization to fp8, or load_in_8bit: true"
        )
    if dtype != torch.bfloat16:
        raise ConfigurationError(
            f"quantization: {method} computes in bfloat16: set dtype to bfloat16"
        )
    if (least := _lacks(method, device)) is not None:
        instead = "load_in_8bit" if method == "fp8" else "load_in_4bit"
        raise ConfigurationError(
            f"quantization: {method} needs {least}: set quantization to {instead}: true, or leave "
            "it out"
        )


def check_stored(stored: StoredBits, device: torch.device, dtype: torch.dtype) -> None:
    """Raise ConfigurationError unless a device can compute with weights that are stored so."""
    if dtype != torch.bfloat16:
        raise ConfigurationError(
            f"weights that are stored quantized ({stored}) compute in bfloat16: set dtype to "
            "bfloat16"
        )
    if (least := _lacks("int4" if stored.bits == BITS else "fp8", device)) is not None:
        raise ConfigurationError(
            f"weights that are stored quantized ({stored}) need {least}: take another checkpoint"
        )


def _lacks(method: Method, device: torch.device) -> str | None:
    """Return what a method needs where a device is not that."""
    least = {"fp8": FP8_CAPABILITY, "int4": INT4_CAPABILITY}.get(method)
    if device.type != "cuda" or least is None:
        return None
    if torch.cuda.get_device_capability(device) >= least:
        return None
    name = "H100" if method == "fp8" else "A100"
    return f"a GPU of compute capability {least[0]}.{least[1]} ({name} or later)"


def quantize(model: torch.nn.Module, method: Method, device: torch.device) -> None:
    """Replace the linear layers of the model's decoder layers, one at a time, by quantized ones."""
    for parent in list(model.get_submodule("model").modules()):
        for name, layer in list(parent.named_children()):
            if type(layer) is torch.nn.Linear:
                # Made on `device`, which so never holds the weights that they replace.
                weight, scale = quantize_weight(layer.weight.detach().to(device), method)
                bias = None if layer.bias is None else layer.bias.detach().to(device)
                setattr(parent, name, QuantizedLinear(weight, scale, bias))
                layer.weight.data = layer.weight.data.new_empty(0)


def quantize_weight(weight: torch.Tensor, method: Method) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights [out, in] quantized, and their scales, as `Product` takes both."""
    if method == "int4":
        return four_bits.pack_weight(weight)
    if method == "fp8":
        return _in_fp8(weight)
    scale = _largest(weight).div(127).to(torch.bfloat16)
    return (weight.float() / scale[:, None]).round().clamp(-127, 127).to(torch.int8), scale


def _product_of_eight_bits(
    rows: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor
) -> torch.Tensor:
    """Return the product of rows [n, in] with weights in eight bits by the kernel for them."""
    # Of other widths torch 2.13 reads beyond the end of a row in int8, and refuses fp8.
    is_read = len(rows) <= MOST_READ_ROWS and not (weight.shape[1] % _WIDTH or rows.is_cuda)
    if weight.dtype == torch.int8 and is_read:
        return torch._weight_int8pack_mm(rows, weight, scale)
    if weight.dtype == torch.float8_e4m3fn and _is_scaled(weight):
        return _multiply_scaled(rows, weight, scale)
    return product_of_numbers(rows, weight, scale)


def _is_scaled(weight: torch.Tensor) -> bool:
    return weight.is_cuda and not any(number % _WIDTH for number in weight.shape)


def product_of_numbers(
    rows: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor
) -> torch.Tensor:
    """Return the product of rows [n, in] with weights in eight bits: what quantizing means."""
    return linear(rows, weight.to(rows.dtype)) * scale.to(rows.dtype)


def _in_fp8(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = _largest(rows) / torch.finfo(torch.float8_e4m3fn).max
    return (rows.float() / scale[:, None]).to(torch.float8_e4m3fn), scale


def _largest(rows: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude of each row, float32; never 0, as it becomes a divisor."""
    return rows.float().abs().amax(-1).clamp_min(LEAST)


def _multiply_scaled(rows: Rows, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the product of rows, each quantized by its own largest number, with weights in fp8."""
    if isinstance(rows, torch.Tensor):
        rows = ScaledRows(*_in_fp8(rows), rows.dtype)
    return torch._scaled_mm(
        rows.numbers,
        weight.t(),
        scale_a=rows.scale[:, None],
        scale_b=scale[None],
        out_dtype=rows.dtype,
    )

"""The operations of a layer on CUDA, in one launch each, in Triton.

Numbers are rounded where torch's operations round them. Where a product takes rows in fp8, what
computes them quantizes them as well. ``TRITON_INTERPRET=1`` runs the code on a CPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from transformers.activations import GELUTanh, SiLUActivation
from typing_extensions import override

from rapid.engines.forward.layers.layer_operations import Activation, Angles, LayerOperations
from rapid.engines.forward.linear.products import LEAST, AnyProduct, Rows, ScaledRows
from rapid.engines.kv.cache import KVCache
from rapid.engines.kv.fp8 import FP8, LARGEST

GATED = 2048  # numbers of a row of the MLP that are computed at once
GATE_WARPS = 8  # of a program, so that a thread has eight of them
_TURNED = 1024  # numbers of the heads of a row that a program rotates
KINDS = _NO_GATE, _SILU, _GELU = range(3)  # what a row's numbers are multiplied with
_ACTIVATIONS = {SiLUActivation: _SILU, torch.nn.SiLU: _SILU, GELUTanh: _GELU}

_LARGEST = tl.constexpr(LARGEST)
_LEAST = tl.constexpr(LEAST)
_IS_PLAIN, _IS_SILU = tl.constexpr(_NO_GATE), tl.constexpr(_SILU)


class LayerKernels(LayerOperations):
    """Operations of one launch each, for tensors on CUDA."""

    @override
    def add_norm(
        self,
        hidden: torch.Tensor,
        added: torch.Tensor | None,
        after: torch.Tensor | None,
        weight: torch.Tensor,
        into: AnyProduct | None = None,
    ) -> tuple[torch.Tensor, Rows]:
        width = hidden.shape[1]
        block = triton.next_power_of_2(width)
        total = hidden
        if added is not None:
            total, added = torch.empty_like(hidden), added.contiguous()
        rows, normed, scales = _empty_rows(hidden, width, into)
        with torch.cuda.device_of(hidden):
            _add_norm[(len(hidden),)](
                hidden, added, after, weight, total, normed, scales, self.epsilon, width, block,
                num_warps=warps_of(block),
            )  # fmt: skip
        return total, rows

    @override
    def store_heads(
        self,
        mixed: torch.Tensor,
        angles: Angles,
        qk_norm: torch.Tensor | None,
        cache: KVCache,
        layer: int,
        slots: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        keys, values = cache.layers[layer]
        is_fp8 = cache.layout.is_fp8
        centre = cache.centres[layer] if is_fp8 else None
        counts = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
        heads = mixed.new_empty((len(mixed), sum(counts), self.head_dim))
        dim, tile = tile_of(self.head_dim)
        with torch.cuda.device_of(mixed):
            _store_heads[(len(mixed), triton.cdiv(sum(counts), tile))](
                mixed.contiguous(), *angles, qk_norm, heads, slots, keys, values, centre,
                self.epsilon, keys.stride(0), self.num_heads, self.num_kv_heads, self.head_dim,
                angles[0].shape[-1], dim, tile, is_fp8,
            )  # fmt: skip
        query, key, value = torch.split(heads.transpose(0, 1)[None], counts, dim=1)
        return query, key, value

    @override
    def gate(self, both: torch.Tensor, activation: Activation, into: AnyProduct) -> Rows:
        kind = _ACTIVATIONS.get(type(activation))
        if kind is None:
            return self.prepare(super().gate(both, activation, into), into)
        return _gate_rows(both, both.shape[1] // 2, kind, into)

    @override
    def prepare(self, rows: Rows, into: AnyProduct) -> Rows:
        if isinstance(rows, ScaledRows) or not into.is_of_scaled_rows:
            return rows
        return _gate_rows(rows, rows.shape[1], _NO_GATE, into)


def warps_of(block: int) -> int:
    """Return the warps of a program that holds so many numbers of a row."""
    return min(max(block // 512, 1), 16)


def tile_of(head_dim: int) -> tuple[int, int]:
    """Return the numbers of a head, with its padding, and the heads that a program rotates."""
    dim = triton.next_power_of_2(head_dim)
    return dim, max(_TURNED // dim, 1)


def _gate_rows(both: torch.Tensor, width: int, kind: int, into: AnyProduct) -> Rows:
    rows, output, scales = _empty_rows(both, width, into)
    # A row's scale needs all of it.
    grid = (len(both), triton.cdiv(width, GATED) if scales is None else 1)
    with torch.cuda.device_of(both):
        _gate[grid](both.contiguous(), output, scales, width, kind, GATED, num_warps=GATE_WARPS)
    return rows


def _empty_rows(
    like: torch.Tensor, width: int, into: AnyProduct | None
) -> tuple[Rows, torch.Tensor, torch.Tensor | None]:
    """Return memory for rows that go into a product, with that of their numbers and scales."""
    if into is None or not into.is_of_scaled_rows:
        rows = like.new_empty((len(like), width))
        return rows, rows, None
    numbers = like.new_empty((len(like), width), dtype=FP8)
    scales = like.new_empty((len(like),), dtype=torch.float32)
    return ScaledRows(numbers, scales, like.dtype), numbers, scales


@triton.jit
def _add_norm(
    hidden, added, after, weight, total, normed, scales, epsilon,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the sum of a row and what is added to it, and the sum's norm."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    is_column = column < WIDTH
    place = row * WIDTH + column
    dtype = hidden.dtype.element_ty
    x = tl.load(hidden + place, mask=is_column, other=0.0).to(tl.float32)
    if added is not None:
        more = tl.load(added + place, mask=is_column, other=0.0).to(tl.float32)
        if after is not None:
            factor = tl.load(after + column, mask=is_column, other=0.0)
            more = _normalize(more, tl.sum(more * more, 0) / WIDTH + epsilon, factor, dtype)
        x = (x + more).to(dtype)
        tl.store(total + place, x, mask=is_column)
        x = x.to(tl.float32)
    factor = tl.load(weight + column, mask=is_column, other=0.0)
    x = _normalize(x, tl.sum(x * x, 0) / WIDTH + epsilon, factor, dtype)
    if scales is not None:
        scale = tl.maximum(tl.max(tl.abs(x), 0), _LEAST) / _LARGEST
        tl.store(scales + row, scale)
        x = x / scale
    tl.store(normed + place, x.to(normed.dtype.element_ty), mask=is_column)


@triton.jit
def _normalize(x, mean_square, factor, dtype: tl.constexpr):
    """Return numbers over their root mean square times a factor, as float32, rounded to `dtype`."""
    x *= tl.rsqrt(mean_square)
    if factor.dtype == dtype:
        x = x.to(dtype).to(tl.float32)
    return (x * factor.to(tl.float32)).to(dtype).to(tl.float32)


@triton.jit
def _store_heads(
    mixed, cos, sin, factors, heads, slots, keys, values, centre, epsilon, kv_head_stride,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    ROTATED: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr, IS_FP8: tl.constexpr,
):  # fmt: skip
    """Write some heads of one row as they are attended with, and keys and values in its slot."""
    NUM_ROTATED: tl.constexpr = NUM_HEADS + NUM_KV_HEADS
    NUM_ALL: tl.constexpr = NUM_ROTATED + NUM_KV_HEADS
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * TILE + tl.arange(0, TILE)
    dim = tl.arange(0, DIM)
    # The dimension that each one is rotated with.
    other = tl.where(dim < ROTATED, (dim + ROTATED // 2) % ROTATED, dim)
    is_there = (head < NUM_ALL)[:, None] & (dim < HEAD_DIM)[None, :]
    is_turned = is_there & (head < NUM_ROTATED)[:, None]
    dtype = mixed.dtype.element_ty
    first = (row * NUM_ALL + head)[:, None] * HEAD_DIM
    plain = tl.load(mixed + first + dim[None, :], mask=is_there, other=0.0).to(tl.float32)
    x = plain
    y = tl.load(mixed + first + other[None, :], mask=is_turned, other=0.0).to(tl.float32)
    if factors is not None:
        mean_square = (tl.sum(x * x, 1) / HEAD_DIM + epsilon)[:, None]
        own = factors + head[:, None] * HEAD_DIM
        factor = tl.load(own + dim[None, :], mask=is_turned, other=0.0)
        x = _normalize(x, mean_square, factor, dtype)
        factor = tl.load(own + other[None, :], mask=is_turned, other=0.0)
        y = _normalize(y, mean_square, factor, dtype)
    angle = row * ROTATED + dim
    cosine = tl.load(cos + angle, mask=dim < ROTATED, other=1.0).to(tl.float32)[None, :]
    sine = tl.load(sin + angle, mask=dim < ROTATED, other=0.0).to(tl.float32)[None, :]
    turned = (x * cosine).to(dtype).to(tl.float32) + (y * sine).to(dtype).to(tl.float32)
    x = tl.where(is_turned, turned.to(dtype).to(tl.float32), plain)
    is_key = is_turned & (head >= NUM_HEADS)[:, None]
    is_value = is_there & (head >= NUM_ROTATED)[:, None]
    kv_head = tl.where(head < NUM_ROTATED, head - NUM_HEADS, head - NUM_ROTATED)[:, None]
    if centre is not None:
        shift = tl.load(centre + kv_head * HEAD_DIM + dim[None, :], mask=is_key, other=0.0)
        x = (x - shift.to(tl.float32)).to(dtype).to(tl.float32)
    kept = x
    if IS_FP8:
        # Unlike minimum and maximum, comparisons leave what is not a number as it is.
        kept = tl.where(x > _LARGEST, _LARGEST, tl.where(x < -_LARGEST, -_LARGEST, x))
        kept = kept.to(keys.dtype.element_ty).to(tl.float32)
        x = tl.where(is_key | is_value, kept, x)
    tl.store(heads + first + dim[None, :], x.to(dtype), mask=is_there)
    place = kv_head.to(tl.int64) * kv_head_stride + tl.load(slots + row) * HEAD_DIM + dim[None, :]
    tl.store(keys + place, kept.to(keys.dtype.element_ty), mask=is_key)
    tl.store(values + place, kept.to(keys.dtype.element_ty), mask=is_value)


@triton.jit
def _gate(both, output, scales, WIDTH: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """Write a row's numbers for the last product of an MLP, or the given ones, with its scale."""
    row = tl.program_id(0).to(tl.int64)
    place = output + row * WIDTH
    if scales is None:
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        x = _gate_part(both, row, column, WIDTH, KIND)
        tl.store(place + column, x.to(output.dtype.element_ty), mask=column < WIDTH)
    else:
        largest = tl.zeros([BLOCK], tl.float32)
        for start in range(0, WIDTH, BLOCK):
            x = _gate_part(both, row, start + tl.arange(0, BLOCK), WIDTH, KIND)
            largest = tl.maximum(largest, tl.abs(x))
        scale = tl.maximum(tl.max(largest, 0), _LEAST) / _LARGEST
        tl.store(scales + row, scale)
        for start in range(0, WIDTH, BLOCK):
            column = start + tl.arange(0, BLOCK)
            x = _gate_part(both, row, column, WIDTH, KIND) / scale
            tl.store(place + column, x.to(output.dtype.element_ty), mask=column < WIDTH)


@triton.jit
def _gate_part(both, row, column, WIDTH: tl.constexpr, KIND: tl.constexpr):
    """Return some numbers of a row as float32, 0 beyond its end."""
    is_column = column < WIDTH
    if KIND == _IS_PLAIN:
        return tl.load(both + row * WIDTH + column, mask=is_column, other=0.0).to(tl.float32)
    gate = tl.load(both + row * 2 * WIDTH + column, mask=is_column, other=0.0).to(tl.float32)
    up = tl.load(both + (row * 2 + 1) * WIDTH + column, mask=is_column, other=0.0).to(tl.float32)
    slope = gate
    if KIND != _IS_SILU:  # GELU by tanh, which is a sigmoid of twice as much
        slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    activated = (gate / (1.0 + tl.exp(-slope))).to(both.dtype.element_ty).to(tl.float32)
    return (activated * up).to(both.dtype.element_ty).to(tl.float32)

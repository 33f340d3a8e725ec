"""Products with weights in four bits, packed as torch's own operators read them.

A weight is the nearest of sixteen numbers, ``(code - 8) * scale + middle``, at equal distances from
the least of its group of columns to the largest.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch

from rapid.planning.packed_bits import BITS, CONVERTED, PACKED_ROWS, group_of

MOST_PACKED_ROWS = {"cpu": 64, "cuda": 512}  # more are multiplied faster with converted weights
_LEAST = 1e-12  # scale of a group of equal numbers
_HALF = 8  # code of the middle
_LARGEST = 15  # code
_CPU_WIDTH = 32  # columns that are converted at once on a CPU: the fewest that its operator takes
_GPU_BLOCK = 8  # rows that are packed together on a GPU
_GPU_COLUMNS = 16  # of a block that its operator reads at once, or a multiple
MXFP4_GROUP = 32  # numbers in MXFP4 with a common exponent
_MXFP4_BIAS = 127  # of the exponent
_MXFP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # numbers of the first codes; others are negative
_GPU_BLOCKS = 65_535  # that a GPU's operator takes: a grid's most in its second axis


def pack_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights [out, in] packed in four bits for their device, and scales of `codes_of`."""
    codes, scales = codes_of(weight)
    return pack_codes(codes, len(scales)), scales


def pack_codes(codes: torch.Tensor, num_groups: int) -> torch.Tensor:
    """Return codes [out, in] packed for their device, where a row has so many groups."""
    if _is_on_cpu(codes):
        # Few rows at a time: the operator takes eight times the bytes of what it returns.
        num_rows = max(CONVERTED["cpu"] // codes.shape[1] // PACKED_ROWS, 1) * PACKED_ROWS
        pack = torch._convert_weight_to_int4pack_for_cpu
        return torch.cat([pack(part.int(), 1) for part in torch.split(codes, num_rows)])
    pairs = codes[:, ::2] << 4 | codes[:, 1::2]
    return torch._convert_weight_to_int4pack(pairs, codes.shape[1] // num_groups // _GPU_COLUMNS)


def numbers_of_mxfp4(
    blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return the numbers [experts, in, out] of weights in MXFP4, which bfloat16 holds exactly.

    The format is that of "OCP Microscaling Formats (MX) Specification", version 1.0, section 5.

    Args:
        blocks: two codes in a byte, the first in its lower half, [experts, out, groups, 16].
        scales: exponents of two, [experts, out, groups].
    """
    table = torch.tensor([*_MXFP4, *(-number for number in _MXFP4)])
    num_experts, num_out, num_groups = scales.shape
    numbers = torch.empty(num_experts, num_groups * MXFP4_GROUP, num_out, dtype=dtype)
    for expert, codes, exponents in zip(numbers, blocks, scales, strict=True):
        pairs = torch.stack((codes & _LARGEST, codes >> BITS), -1).flatten(2)
        shifts = exponents.int()[..., None] - _MXFP4_BIAS
        expert.copy_(torch.ldexp(table[pairs.int()], shifts).flatten(1).t())
    return numbers


def scales_of(scale: torch.Tensor, zero: torch.Tensor | int) -> torch.Tensor:
    """Return scale and middle [..., 2] of weights (code - zero) * scale.

    What bfloat16 does not hold is rounded, as torch's operators take no more; the middle is that of
    the rounded scale, which leaves small weights nearest.
    """
    scale = scale.bfloat16()
    return torch.stack((scale, ((_HALF - zero) * scale.float()).bfloat16()), -1)


def codes_of(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes of weights [out, in], and scale and middle of groups [groups, out, 2]."""
    num_out, num_in = weight.shape
    groups = weight.float().reshape(num_out, -1, group_of(num_in))
    least, most = groups.aminmax(dim=-1, keepdim=True)
    scale = ((most - least) / _LARGEST).clamp_min(_LEAST).bfloat16()
    middle = (least + _HALF * scale.float()).bfloat16()
    steps = ((groups - middle.float()) / scale.float()).round()
    codes = (steps + _HALF).clamp(0, _LARGEST).to(torch.uint8).flatten(1)
    return codes, torch.cat((scale, middle), -1).transpose(0, 1).contiguous()


def numbers_of(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the weights that codes and scales stand for, float32: what quantizing means."""
    scale, middle = scales.float().transpose(0, 1)[..., None].unbind(2)
    groups = codes.float().view(len(codes), len(scales), -1)
    return ((groups - _HALF) * scale + middle).flatten(1)


def product(rows: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the product of rows [n, in] with packed weights, [n, out]."""
    if len(rows) <= MOST_PACKED_ROWS[rows.device.type]:
        return _multiply(rows, weight, rows.shape[1] // len(scales), scales)
    return product_of_converted(rows, weight, scales)


def product_of_converted(
    rows: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    """Return the product of rows [n, in] with packed weights that are converted for it."""
    products = rows.new_empty(len(rows), scales.shape[1])
    done = 0
    for columns in unpack_parts(weight, scales, rows.shape[1]):
        torch.mm(rows, columns, out=products[:, done : done + columns.shape[1]])
        done += columns.shape[1]
    return products


def unpack_parts(weight: torch.Tensor, scales: torch.Tensor, num_in: int) -> Iterator[torch.Tensor]:
    """Yield packed weights in bfloat16, transposed [in, some of out], at most `CONVERTED` each."""
    # They are the operator's own: its product with the identity. A block is packed in tiles of few
    # columns, one after the other. Here tiles pass for blocks of a matrix that has no more columns,
    # so that the identity is small, and converting takes as long as the product of so many rows.
    most = CONVERTED[weight.device.type]
    if not _is_on_cpu(weight):
        most = min(most, _GPU_BLOCKS * _GPU_BLOCK * (num_in // len(scales)))  # a tile is a group
    step = max(most // num_in // PACKED_ROWS, 1) * PACKED_ROWS
    num_out = scales.shape[1]
    packed_rows = num_out // len(weight)  # 1 on a CPU, a block on a GPU
    for start in range(0, num_out, step):
        part = weight[start // packed_rows : (start + step) // packed_rows]
        yield _unpack(part, scales[:, start : start + step], num_in)


def _unpack(weight: torch.Tensor, scales: torch.Tensor, num_in: int) -> torch.Tensor:
    """Return packed weights in bfloat16, transposed [in, out]."""
    is_on_cpu = _is_on_cpu(weight)
    block = _cpu_block() if is_on_cpu else _GPU_BLOCK
    width = _CPU_WIDTH if is_on_cpu else num_in // weight.shape[1]
    num_blocks, num_tiles = scales.shape[1] // block, num_in // width
    shape = (-1, width // 2) if is_on_cpu else (-1, 1, *weight.shape[2:])
    of_tiles = scales.repeat_interleave(num_tiles // len(scales), dim=0)
    of_tiles = of_tiles.view(num_tiles, num_blocks, block, 2).transpose(0, 1).reshape(1, -1, 2)
    identity = torch.eye(width, dtype=scales.dtype, device=scales.device)
    tiles = _multiply(identity, weight.view(shape), width, of_tiles)
    tiles = tiles.view(width, num_blocks, num_tiles, block)
    return tiles.permute(2, 0, 1, 3).reshape(num_in, -1)


def _multiply(
    rows: torch.Tensor, weight: torch.Tensor, group: int, scales: torch.Tensor
) -> torch.Tensor:
    """Return the product of rows with packed weights by torch's operator, [n, out]."""
    on_cpu, on_gpu = torch._weight_int4pack_mm_for_cpu, torch._weight_int4pack_mm
    multiply = on_cpu if _is_on_cpu(rows) else on_gpu
    return multiply(rows.contiguous(), weight, group, scales.contiguous())


def _is_on_cpu(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


@cache
def _cpu_block() -> int:
    """Return how many rows torch packs together on this CPU: 64, or fewer of a narrower one."""
    is_first = torch.zeros(PACKED_ROWS, 2, dtype=torch.int32)
    is_first[:, 0] = 1
    packed_rows = torch._convert_weight_to_int4pack_for_cpu(is_first, 1)
    return 2 * int(packed_rows.flatten().argmin())  # a block begins with its first column, in pairs

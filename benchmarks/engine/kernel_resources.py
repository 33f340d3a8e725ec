"""Compile the Triton kernels ahead of time and print what each of their programs takes.

It needs no GPU and takes about a minute. The table shows the registers of a thread, the bytes that
it spills, the shared memory of a program and, of attention, into how many buffers the loop loads
keys and values: two mean that a block is loaded while the one before is computed. Kernels are
compiled for capabilities 8.0 (A100), 8.9 (L4, L40S), 9.0 (H100, H200), 10.0 (B200) and 12.0 (RTX):
attention in every number format, with the blocks and tiles that a device takes, and with KV in fp8
and queries in bfloat16. `--drawing` prints the kernels that draw and judge tokens instead, and
`--layers` those of a layer's other operations, and the merge of attention's parts.

    python -m benchmarks.engine.kernel_resources [--json] [--quick | --first] [--drawing | --layers]
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from typing import Any

import torch
from triton import compile, knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rapid.engines.attention.triton_kernel import (
    LAUNCHES,
    MERGED,
    Launch,
    _attend_to_items,
    _merge_parts,
    constants_of,
    first_launch,
)
from rapid.engines.attention.work_items import ITEM, ROW, TILES, tiling_of
from rapid.engines.forward.layers import layer_kernels
from rapid.speculation.fast import race_kernels, row_kernels

CAPABILITIES = (80, 90)
# Shared memory of a program, from the CUDA manual.
SHARED_BYTES = {80: 163 * 2**10, 89: 99 * 2**10, 90: 227 * 2**10}
SHARED_BYTES |= {100: 227 * 2**10, 120: 99 * 2**10}
DRAWING = (
    "read_rows", "settle_blocks", "fuse_rows", "cut_rows", "race_candidates", "race_rows",
    "choose_tokens",
)  # fmt: skip
# A vocabulary of 131,072 tokens and proposals of 64.
DRAWING_CONSTANTS = {"BLOCK": row_kernels.BLOCK, "WIDTH": 128, "M": 64, "SIZE": 1024, "WORDS": 7}
DRAWING_POINTERS = {"logits": "*fp32"} | dict.fromkeys(
    ("integers", "starts", "ids", "order", "settings", "tokens"), "*i64"
) | dict.fromkeys(
    ("numbers", "probs", "partial", "readings", "draft", "weights", "decided", "borders", "best",
     "candidates"),
    "*fp64",
)  # fmt: skip
FP8 = "fp8e4nv"  # Triton's name of e4m3
LAYER_WIDTHS = (2048, 5376, 8192, 16384)
LAYER_HEADS = (64, 96, 128, 256)
LAYER_TYPES = {"scales": "*fp32", "epsilon": "fp32", "slots": "*i64", "kv_head_stride": "i32"}
MERGING_TYPES = dict.fromkeys(("parts", "lses", "sinks"), "*fp32")
MERGING_TYPES |= {"table": "*i32", "rows_at": "i32"}
FORMATS = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.float16: "fp16"}
ALIGNED = {"query", "keys", "values", "table", "parts", "lses"}
ALIGNED |= {"query_head_stride", "query_row_stride", "kv_head_stride"}  # Triton finds that out


def resources(
    capability: int,
    dtype: torch.dtype,
    kept: str,
    packed: int,
    launch: Launch,
    group: int,
    head_dim: int,
    block_keys: int,
) -> dict[str, Any]:
    """Compile the kernel and return what the compiler says about it.

    Args:
        capability: of the GPU, times 10.
        dtype: of the queries.
        kept: Triton's name of the format of keys and values.
        packed: rows of a tile.
        launch: warps and stages.
        group: query heads of a KV head.
        head_dim: numbers of a head.
        block_keys: most keys of a block.
    """
    constants = constants_of(
        dtype, 8 * group, group, head_dim, packed, block_keys, is_windowed=False
    )
    pointers = {"query": f"*{FORMATS[dtype]}", "keys": f"*{kept}", "values": f"*{kept}"}
    pointers |= {"table": "*i32", "parts": "*fp32", "lses": "*fp32", "scale": "fp32"}
    arguments = _attend_to_items.arg_names
    signature = {
        one: "constexpr" if one in constants else pointers.get(one, "i32") for one in arguments
    }
    aligned = {
        (place,): [["tt.divisibility", 16]] for place, one in enumerate(arguments) if one in ALIGNED
    }
    kernel = compile(
        ASTSource(_attend_to_items, signature, constants, aligned),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": launch.num_warps, "num_stages": launch.num_stages},
    )
    return {
        "capability": capability,
        "format": FORMATS[dtype],
        "keys": kept,
        "block_keys": block_keys,
        "packed": packed,
        "warps": launch.num_warps,
        "stages": launch.num_stages,
        **used(kernel.asm["cubin"]),
        "shared_bytes": kernel.metadata.shared,
        "buffers": buffers(kernel.asm["ttgir"], head_dim, block_keys),
    }


def drawing_resources(capability: int, name: str) -> dict[str, Any]:
    """Compile a kernel that draws tokens and return what the compiler says about it."""
    given = DRAWING_CONSTANTS | {"FILTERED": True}
    kernel = getattr(race_kernels if name == "race_candidates" else row_kernels, name)
    return small_resources(capability, kernel, given, DRAWING_POINTERS, "i32")


def layer_resources(capability: int) -> list[dict[str, Any]]:
    """Compile the kernels of layers in bfloat16, plain and with all that there is; see above."""
    found = []
    # Whether it computes with norms in float32, and with fp8 where the device has that.
    for has_all in (False, True):
        is_fp8 = has_all and capability >= 89
        kept = f"*{FP8}" if is_fp8 else "*bf16"
        types = LAYER_TYPES | dict.fromkeys(("normed", "output", "keys", "values"), kept)
        types |= dict.fromkeys(("after", "weight", "factors"), "*fp32" if has_all else "*bf16")
        absent = {} if has_all else dict.fromkeys(("after", "factors", "centre", "sinks"))
        absent |= {} if is_fp8 else {"scales": None}
        cases: list[tuple[Any, int, dict[str, object]]] = []
        for width in LAYER_WIDTHS:
            block = 1 << (width - 1).bit_length()
            constants = {"WIDTH": width, "BLOCK": block}
            cases.append((layer_kernels._add_norm, layer_kernels.warps_of(block), constants))
        for head_dim in LAYER_HEADS:
            dim, tile = layer_kernels.tile_of(head_dim)
            constants = {"NUM_HEADS": 32, "NUM_KV_HEADS": 8, "HEAD_DIM": head_dim, "DIM": dim}
            constants |= {"ROTATED": head_dim, "TILE": tile, "IS_FP8": is_fp8}
            cases.append((layer_kernels._store_heads, 4, constants))
            constants = constants | {"ITEM": ITEM, "ROW": ROW, "MERGED": MERGED}
            cases.append((_merge_parts, 4, constants))
        for kind in layer_kernels.KINDS:
            constants = {"WIDTH": 14_336, "KIND": kind, "BLOCK": layer_kernels.GATED}
            cases.append((layer_kernels._gate, layer_kernels.GATE_WARPS, constants))
        found += [
            small_resources(
                *(capability, kernel, constants | absent),
                *(MERGING_TYPES if kernel is _merge_parts else types, "*bf16", warps),
            )
            for kernel, warps, constants in cases
        ]
    return found


def small_resources(
    capability: int,
    kernel: Any,
    given: dict[str, Any],
    types: dict[str, str],
    other: str,
    num_warps: int = 4,
) -> dict[str, Any]:
    """Compile a kernel, whose arguments that `types` does not name are of type `other`."""
    constants = {one: given[one] for one in kernel.arg_names if one in given}
    signature = {
        one: "constexpr" if one in constants else types.get(one, other) for one in kernel.arg_names
    }
    compiled = compile(
        ASTSource(kernel, signature, constants),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": num_warps},
    )
    return {
        "capability": capability,
        "kernel": kernel.__name__.strip("_"),
        **used(compiled.asm["cubin"]),
        "shared_bytes": compiled.metadata.shared,
    }


def used(cubin: bytes) -> dict[str, int]:
    """Return the registers of a thread and the bytes that it spills."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", told))
    return {
        "registers": int(found["REG"]),
        "spilled_bytes": int(found["STACK"]) + int(found["LOCAL"]),
    }


def buffers(code: str, head_dim: int, block_keys: int) -> int:
    """Return into how many buffers the loop loads keys, or values if those are fewer."""
    shapes = {f"{head_dim}x{block_keys}x", f"{block_keys}x{head_dim}x"}
    found = re.findall(r"local_alloc : \(\).*?memdesc<(\d+)x(\d+x\d+x)", code)
    numbers = [int(number) for number, shape in found if shape in shapes]
    return min(numbers, default=0) if len(numbers) == 2 else 0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="a list instead of a table")
    parser.add_argument("--first", action="store_true", help="untimed launches, a format a width")
    parser.add_argument("--quick", action="store_true", help="those in bfloat16 for 8.0 and 9.0")
    parser.add_argument("--drawing", action="store_true", help="kernels that draw tokens instead")
    parser.add_argument("--layers", action="store_true", help="kernels of layers instead")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--group", type=int, default=4, help="query heads of a KV head")
    arguments = parser.parse_args()
    found = []
    capabilities = CAPABILITIES if arguments.quick else tuple(SHARED_BYTES)
    for capability in capabilities:
        if arguments.drawing:
            found += [drawing_resources(capability, name) for name in DRAWING]
        elif arguments.layers:
            found += layer_resources(capability)
    formats = [*FORMATS][: 1 if arguments.quick else 2 if arguments.first else 3]
    cases = [(dtype, FORMATS[dtype], each) for dtype in formats for each in capabilities]
    cases += [(torch.bfloat16, FP8, each) for each in capabilities if each >= 89]
    for dtype, kept, capability in [] if found else cases:
        is_first_only = dtype == torch.float32 or arguments.quick or arguments.first
        tiling = tiling_of(arguments.head_dim, dtype.itemsize, SHARED_BYTES[capability])
        found += [
            resources(
                *(capability, dtype, kept, packed, one),
                *(arguments.group, arguments.head_dim, tiling.block_keys),
            )
            for packed in TILES
            if packed <= tiling.most_rows
            for one in ([first_launch(dtype)] if is_first_only else LAUNCHES)
        ]
    if arguments.json:
        print(json.dumps(found))
        return
    print("| " + " | ".join(found[0]) + " |\n|" + " --- |" * len(found[0]))
    for one in found:
        print("| " + " | ".join(map(str, one.values())) + " |")


if __name__ == "__main__":
    main()

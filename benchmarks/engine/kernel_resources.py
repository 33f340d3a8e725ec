"""Compile the Triton attention kernel ahead of time and print what each of its programs takes.

It needs no GPU and takes about a minute. For compute capabilities 8.0 (A100) and 9.0 (H100, H200),
every number format and every size of tile, the table shows the registers of a thread, the bytes
that it spills, the shared memory of a program, and into how many buffers the loop loads keys and
values. Two buffers mean that a block is loaded while the one before is computed. KV in fp8 is
compiled for 9.0, with queries in bfloat16.

    python -m benchmarks.engine.kernel_resources [--json] [--quick] [--head-dim 128] [--group 4]
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

from rapid.engines.attention.cases import TILES
from rapid.engines.attention.triton_kernel import (
    LAUNCHES,
    MAX_PACKED_FLOAT32,
    Launch,
    _attend_to_items,
    constants_of,
    first_launch,
)
from rapid.engines.attention.work_items import BLOCK_KEYS

CAPABILITIES = (80, 90)
FP8 = "fp8e4nv"  # Triton's name of e4m3
FORMATS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
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
    """
    constants = constants_of(dtype, 8 * group, group, head_dim, packed, is_windowed=False)
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
        "packed": packed,
        "warps": launch.num_warps,
        "stages": launch.num_stages,
        **used(kernel.asm["cubin"]),
        "shared_bytes": kernel.metadata.shared,
        "buffers": buffers(kernel.asm["ttgir"], head_dim),
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


def buffers(code: str, head_dim: int) -> int:
    """Return into how many buffers the loop loads keys, or values if those are fewer."""
    shapes = {f"{head_dim}x{BLOCK_KEYS}x", f"{BLOCK_KEYS}x{head_dim}x"}
    found = re.findall(r"local_alloc : \(\).*?memdesc<(\d+)x(\d+x\d+x)", code)
    numbers = [int(number) for number, shape in found if shape in shapes]
    return min(numbers, default=0) if len(numbers) == 2 else 0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="a list instead of a table")
    parser.add_argument("--quick", action="store_true", help="only first launches in bfloat16")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--group", type=int, default=4, help="query heads of a KV head")
    arguments = parser.parse_args()
    formats = [torch.bfloat16] if arguments.quick else FORMATS
    cases = [
        (dtype, FORMATS[dtype], capability) for dtype in formats for capability in CAPABILITIES
    ]
    found = []
    for dtype, kept, capability in [*cases, (torch.bfloat16, FP8, 90)]:
        is_float32 = dtype == torch.float32
        launches = [first_launch(dtype)] if is_float32 or arguments.quick else LAUNCHES
        for packed in TILES:
            if not is_float32 or packed <= MAX_PACKED_FLOAT32:
                found += [
                    resources(
                        capability, dtype, kept, packed, one, arguments.group, arguments.head_dim
                    )
                    for one in launches
                ]
    if arguments.json:
        print(json.dumps(found))
        return
    print("| " + " | ".join(found[0]) + " |\n|" + " --- |" * len(found[0]))
    for one in found:
        print("| " + " | ".join(map(str, one.values())) + " |")


if __name__ == "__main__":
    main()

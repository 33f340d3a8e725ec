"""Registers and shared memory of the Triton kernels, compiled ahead of time without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engine.kernel_resources import SHARED_BYTES

ROOT = Path(__file__).parents[3]
MAX_REGISTERS = {16: 128, 32: 128, 64: 192, 128: 255}
MORE_REGISTERS = {16: 168, 32: 192, 64: 192, 128: 255}  # where keys and values are converted


@pytest.fixture(scope="module")
def compiled() -> list[dict[str, Any]]:
    """The launches that are taken where none was timed, in bfloat16, and with KV in fp8."""
    return compile_ahead("--quick")


def compile_ahead(*options: str) -> list[dict[str, Any]]:
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    module = "benchmarks.engine.kernel_resources"
    command = [sys.executable, "-m", module, "--json", *options]
    ran = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, cwd=ROOT
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def test_every_tile_is_compiled_for_both(compiled: list[dict[str, Any]]) -> None:
    sizes = {(one["capability"], one["keys"], one["packed"]) for one in compiled}
    kinds = ((80, "bf16"), (90, "bf16"), (90, "fp8e4nv"))
    assert sizes == {(*kind, packed) for kind in kinds for packed in MAX_REGISTERS}


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_heads_of_every_width_fit_all_devices(head_dim: int) -> None:
    compiled = compile_ahead("--first", "--head-dim", str(head_dim))
    assert {one["capability"] for one in compiled} == SHARED_BYTES.keys()
    for one in compiled:
        assert one["shared_bytes"] <= SHARED_BYTES[one["capability"]]
        is_float32 = one["format"] == "fp32"
        assert one["buffers"] >= 2 - is_float32
        assert one["spilled_bytes"] <= (72 if is_float32 else 16)


def test_a_block_is_loaded_while_the_one_before_is_computed(compiled: list[dict[str, Any]]) -> None:
    assert all(one["buffers"] >= 2 for one in compiled)
    assert all(one["shared_bytes"] <= SHARED_BYTES[one["capability"]] for one in compiled)


def test_nothing_is_spilled_and_registers_are_bounded(compiled: list[dict[str, Any]]) -> None:
    assert [one["spilled_bytes"] for one in compiled] == [0] * len(compiled)
    for one in compiled:
        most = MAX_REGISTERS if one["keys"] == "bf16" else MORE_REGISTERS
        assert one["registers"] <= most[one["packed"]]


@pytest.mark.slow
def test_kernels_that_draw_tokens_spill_nothing() -> None:
    compiled = compile_ahead("--quick", "--drawing")
    assert {one["capability"] for one in compiled} == {80, 90}
    assert [one["spilled_bytes"] for one in compiled] == [0] * 14
    assert max(one["registers"] for one in compiled) <= 128


@pytest.mark.slow
def test_kernels_of_layers_spill_nothing() -> None:
    compiled = compile_ahead("--quick", "--layers")
    assert {one["capability"] for one in compiled} == {80, 90}
    kernels = {"add_norm", "store_heads", "merge_parts", "gate"}
    assert {one["kernel"] for one in compiled} == kernels
    assert [one["spilled_bytes"] for one in compiled] == [0] * 60
    assert max(one["registers"] for one in compiled) <= 128

"""The Triton kernel in Triton's interpreter against the textbook; on CUDA see `make test-gpu`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import triton
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from rapid.engines.attention.cases import tile_timings
from rapid.engines.attention.kernel_inputs import AttentionInputs, RaggedRows
from rapid.engines.attention.key_tables import KeyTables, TableSpace
from rapid.engines.attention.segments import Segment
from rapid.engines.attention.shared_prefixes import MIN_SHARED_KEYS
from rapid.engines.attention.triton_kernel import (
    LAUNCHES,
    BlockAttention,
    attend_to_table,
)
from rapid.engines.attention.work_items import BLOCK_KEYS, TILES, Sizes, work_table
from rapid.engines.kv.cache import KVCache, KVLayout
from tests.rapid.engines.attention.small_cases import textbook

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
Spans = list[tuple[int, int]]


@pytest.fixture
def _bfloat16_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter multiplies the bits of bfloat16 as integers: give it the numbers."""
    multiply: Callable[..., Any] = InterpreterBuilder.create_dot

    def exact(handle: Any) -> Any:
        if str(handle.dtype.scalar) != "bf16":
            return handle
        numbers = (handle.data.astype(np.uint32) << 16).view(np.float32)
        return TensorHandle(numbers, triton.language.float32)

    def create_dot(builder: object, a: object, b: object, *rest: object) -> object:
        return multiply(builder, exact(a), exact(b), *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


def batch_of(
    sequences: list[tuple[Spans, int]],
    kv_heads: int,
    group: int,
    head_dim: int,
    dtype: torch.dtype = torch.float32,
    *,
    is_fp8: bool = False,
) -> AttentionInputs:
    """Random rows over random keys of sequences given as (spans of slots, new rows)."""
    segments: list[Segment] = []
    slots: list[int] = []
    for spans, rows in sequences:
        first = segments[-1].stop if segments else 0
        *others, (start, stop) = spans
        past = [*others, (start, stop - rows)] if stop - rows > start else others
        segments.append(Segment(first, first + rows, past, spans))
        slots += range(stop - rows, stop)
    last = max(stop for spans, _ in sequences for _, stop in spans)
    layout = KVLayout(kv_heads, head_dim, dtype, (DEVICE,), is_fp8)
    cache = KVCache(layout, num_pages=last + BLOCK_KEYS, page_tokens=1)
    for tensor in cache.layers[0]:
        tensor.fill_(float("nan"))  # slots nobody wrote must never count
        for segment in segments:
            for start, stop in segment.all_spans:
                numbers = torch.randn(kv_heads, stop - start, head_dim)
                tensor[:, start:stop] = numbers.to(layout.kept_dtype)
    shape = (1, len(slots), kv_heads * group, head_dim)
    query = (3 * torch.randn(shape)).to(DEVICE, dtype).transpose(1, 2)
    rows = RaggedRows(cache, segments, torch.tensor(slots, device=DEVICE))
    keys, values = cache.layers[0]
    own = keys[None, :, rows.slots].to(dtype), values[None, :, rows.slots].to(dtype)
    return AttentionInputs(query, *own, keys, values, rows, head_dim**-0.5)


def attend(
    inputs: AttentionInputs, processors: int = 2, block_keys: int = BLOCK_KEYS
) -> torch.Tensor:
    rows, num_kv_heads = inputs.rows, inputs.keys.shape[0]
    sizes = Sizes.of(len(rows.slots), len(rows.segments), num_kv_heads, processors, block_keys)
    table = torch.from_numpy(work_table(rows.segments, sizes, inputs.window)).to(DEVICE)
    return attend_to_table(inputs, table, sizes, {})


def runs(*lengths: int, first: int) -> Spans:
    """Runs of these lengths with slots of nobody between them, the last run in front."""
    spans = []
    for length in lengths:
        spans.append((first, first + length))
        first += length + 2
    return spans[::-1]


DECODE = [(runs(5, first=3), 1), (runs(20, 64, 1, first=200), 1)]
VERIFY = [(runs(70, 9, first=3), 8), (runs(3, first=120), 1)]
FIRST = [(runs(16, first=0), 16)]  # every row sees another number of keys
ODD = [(runs(66, first=0), 3)]  # neither the group nor the head is a power of 2


@pytest.mark.parametrize("processors", [1, 4])
@pytest.mark.parametrize(
    ("sequences", "kv_heads", "group", "head_dim"),
    [(DECODE, 2, 2, 16), (VERIFY, 1, 4, 16), (FIRST, 1, 8, 16), (ODD, 1, 7, 24)],
    ids=["decode", "verify", "first", "odd"],
)
def test_steps_equal_the_textbook_however_many_programs_share_them(
    sequences: list[tuple[Spans, int]], kv_heads: int, group: int, head_dim: int, processors: int
) -> None:
    torch.manual_seed(processors)
    inputs = batch_of(sequences, kv_heads, group, head_dim)
    torch.testing.assert_close(attend(inputs, processors), textbook(inputs), atol=2e-5, rtol=0)


@pytest.mark.usefixtures("_bfloat16_products")
@pytest.mark.parametrize(("dtype", "error"), [(torch.float16, 2e-3), (torch.bfloat16, 2e-2)])
def test_half_precision_is_rounded_once(dtype: torch.dtype, error: float) -> None:
    torch.manual_seed(0)
    inputs = batch_of([(runs(90, 9, first=0), 3), (runs(40, first=110), 1)], 2, 2, 16, dtype)
    got = attend(inputs)
    assert got.dtype == dtype
    torch.testing.assert_close(got.float(), textbook(inputs), atol=error, rtol=0)


@pytest.mark.usefixtures("_bfloat16_products")
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)])
def test_keys_in_fp8_are_read_as_the_numbers_they_are(dtype: torch.dtype, error: float) -> None:
    torch.manual_seed(0)
    inputs = batch_of([*VERIFY, (runs(90, 9, first=200), 3)], 2, 2, 16, dtype, is_fp8=True)
    got = attend(inputs)
    assert got.dtype == dtype
    torch.testing.assert_close(got.float(), textbook(inputs), atol=error, rtol=0)


DOCUMENT = (7, 7 + MIN_SHARED_KEYS + 40)
QUESTIONS = [
    ([DOCUMENT, (2000, 2011)], 4),
    (runs(30, first=2100), 2),  # about no document
    ([DOCUMENT, (2200, 2201)], 1),
    ([(DOCUMENT[0], DOCUMENT[1] - 20), (2300, 2370)], 3),
]


def test_questions_about_one_document_equal_the_textbook() -> None:
    torch.manual_seed(0)
    inputs = batch_of(QUESTIONS, 1, 4, 16)
    torch.testing.assert_close(attend(inputs, 2), textbook(inputs), atol=2e-5, rtol=0)


@pytest.mark.parametrize("block_keys", [16, 32])
@pytest.mark.parametrize("window", [None, 70])
def test_smaller_blocks_for_smaller_devices_equal_the_textbook(
    block_keys: int, window: int | None
) -> None:
    torch.manual_seed(block_keys)
    inputs = replace(batch_of([*VERIFY, (runs(150, 9, first=400), 8)], 1, 2, 24), window=window)
    got = attend(inputs, 2, block_keys)
    torch.testing.assert_close(got, textbook(inputs), atol=2e-5, rtol=0)


@pytest.mark.parametrize("window", [1, 6, 70, 5000])
def test_rows_see_the_last_keys_of_their_window(window: int) -> None:
    torch.manual_seed(window)
    inputs = replace(batch_of([*DECODE, (runs(150, 9, first=400), 8)], 1, 2, 16), window=window)
    torch.testing.assert_close(attend(inputs), textbook(inputs), atol=2e-5, rtol=0)


@pytest.mark.usefixtures("_bfloat16_products")
@pytest.mark.parametrize("is_fp8", [False, True])
@pytest.mark.parametrize("window", [None, 70])
def test_sinks_take_their_share_of_every_row(window: int | None, is_fp8: bool) -> None:
    """Heads of 64 in groups of 8, as gpt-oss has them; the questions share a document."""
    torch.manual_seed(0)
    dtype, error = (torch.bfloat16, 2e-2) if is_fp8 else (torch.float32, 2e-5)
    sequences = [*VERIFY, (runs(90, 9, first=200), 3)] if window else QUESTIONS
    inputs = batch_of(sequences, 1, 8, 64, dtype, is_fp8=is_fp8)
    inputs = replace(inputs, window=window, sinks=8 + 3 * torch.randn(8, device=DEVICE))
    got = attend(inputs)
    torch.testing.assert_close(got.float(), textbook(inputs), atol=error, rtol=0)
    without = textbook(replace(inputs, sinks=None))
    assert float((got.float() - without).abs().max()) > 0.1


def test_a_table_that_is_refilled_serves_other_lengths_and_other_sharing() -> None:
    torch.manual_seed(0)
    alone = [(runs(31, first=3100), 4), (runs(30, first=2100), 2), (runs(1, first=3200), 1),
             (runs(400, first=2300), 3)]  # fmt: skip
    first, second = batch_of(alone, 1, 2, 16), batch_of(QUESTIONS, 1, 2, 16)
    example = KeyTables(is_example=True)
    example.of(first.rows, DEVICE, None)
    space = TableSpace([example], len(alone), 5, max_context=2048)
    memory = np.zeros(space.num_ints, dtype=np.int32)
    for inputs in (first, second):
        assert space.fill(memory, [inputs.rows.segments]) is not None
        (inputs.rows.memo["key tables"],) = space.tables(torch.from_numpy(memory).to(DEVICE))
        torch.testing.assert_close(BlockAttention()(inputs), textbook(inputs), atol=2e-5, rtol=0)


def test_every_size_of_tile_takes_the_launch_that_was_fastest_for_it() -> None:
    kernel = BlockAttention()
    cache = KVCache(KVLayout(1, 16, torch.bfloat16, (DEVICE,)), 64, 16)
    cases = tile_timings(cache, num_heads=4, page_tokens=16, max_context=512)
    tiles = iter([tile for tile in TILES for _ in LAUNCHES])

    def measure(run: Callable[[], object]) -> float:
        launch = kernel.launches[torch.bfloat16, next(tiles)]
        if launch.num_stages == 4:
            raise RuntimeError("out of resource: shared memory")
        return 1.0 if (launch.num_warps == 4) == (len(kernel.launches) < 3) else 2.0

    kernel.tune(cases, measure)
    chosen = [kernel.launches[torch.bfloat16, tile].num_warps for tile in TILES]
    assert chosen == [4, 4, 8, 8]


def test_a_kernel_that_runs_in_no_form_keeps_the_first() -> None:
    def fails(run: Callable[[], object]) -> float:
        raise RuntimeError("no kernel image")

    kernel = BlockAttention()
    cache = KVCache(KVLayout(1, 16, torch.float32, (DEVICE,)), 64, 16)
    kernel.tune(tile_timings(cache, num_heads=4, page_tokens=16, max_context=512), fails)
    assert kernel.launches == {}

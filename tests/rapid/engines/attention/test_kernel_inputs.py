"""The rows of a batch, derived once for all layers and split between the kernels."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rapid.engines.attention import kernel_inputs, ragged
from rapid.engines.attention.cases import CaseRows, checks
from rapid.engines.attention.kernel_inputs import Attend, AttentionInputs, Kernels, RaggedRows
from rapid.engines.attention.ragged import attend_ragged
from rapid.engines.attention.segments import MAX_STEP_ROWS, Partial, Segment
from tests.rapid.engines.attention.small_cases import (
    CPU,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    PAGE,
    cache_of,
    right,
    textbook,
)


def rows_of(*segments: Segment) -> RaggedRows:
    """A batch whose rows go to the slots 100, 101, ..."""
    return RaggedRows(cache_of(), [*segments], torch.arange(100, 100 + segments[-1].stop))


def test_layers_share_what_is_derived_from_the_batch() -> None:
    rows = rows_of(Segment(0, 1, [], [(100, 101)]))
    num_made = 0

    def make() -> int:
        nonlocal num_made
        num_made += 1
        return num_made

    assert [rows.once("a", make), rows.once("a", make), rows.once("b", make)] == [1, 1, 2]
    assert rows.slots_on(CPU) is rows.slots
    moved = rows.slots_on(torch.device("meta"))
    assert moved.device.type == "meta"
    assert rows.slots_on(torch.device("meta")) is moved


def test_spans_are_single_only_if_all_sequences_have_one_row_and_one_run() -> None:
    plain = Segment(0, 1, [(0, 40)], [(0, 41)])
    assert rows_of(plain, Segment(1, 2, [], [(64, 65)])).single_spans() == [(0, 41), (64, 65)]
    assert rows_of(plain, Segment(1, 3, [(64, 70)], [(64, 72)])).single_spans() == []
    two_runs = [(64, 80), (96, 97)]
    assert rows_of(plain, Segment(1, 2, two_runs[:1], two_runs)).single_spans() == []


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("most", [0, 2 * PAGE, 2**20])
def test_pages_strewn_over_a_pool_are_read_in_a_few_calls(
    monkeypatch: pytest.MonkeyPatch, rows: int, most: int
) -> None:
    """A pool that has been full for long has no run of free pages; long runs stay views."""
    slot_bytes = 2 * KV_HEADS * HEAD_DIM * 4
    monkeypatch.setattr(kernel_inputs, "_COPIED_BYTES", most * slot_bytes)
    monkeypatch.setattr(kernel_inputs, "_MOST_COPIED_BYTES", 300 * slot_bytes)
    called, partial = [], ragged.partial

    def note(*tensors: Any, **how: Any) -> Partial:
        called.append(tensors[1].shape[2])
        return partial(*tensors, **how)

    monkeypatch.setattr(ragged, "partial", note)
    torch.manual_seed(0)
    past = [(first * PAGE, (first + 1) * PAGE) for first in range(0, 50, 2)] + [(816, 1000)]
    spans = [*past, (1000, 1000 + rows)]
    cache = cache_of()
    for tensor in cache.layers[0]:
        tensor.normal_()
    batch = RaggedRows(cache, [Segment(0, rows, past, spans)], torch.arange(1000, 1000 + rows))
    keys, values = cache.layers[0]
    own = slice(1000, 1000 + rows)
    query = torch.randn(1, HEADS, rows, HEAD_DIM)
    inputs = AttentionInputs(
        query, keys[None, :, own], values[None, :, own], keys, values, batch, 1
    )
    got = ragged.attend_by_runs(inputs)
    torch.testing.assert_close(got, textbook(inputs))
    to_self = rows > 1  # several rows need a mask among themselves, and so a call
    assert len(called) == {0: len(past) + 1, 2 * PAGE: 3 + to_self, 2**20: 2 + to_self}[most]
    assert sum(called) == 25 * PAGE + 184 + rows


def test_each_stretch_of_steps_or_chunks_is_a_batch_of_its_own() -> None:
    step, chunk = 2, MAX_STEP_ROWS + 1
    lengths = [step, step, chunk, step]
    stops = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    segments = [
        Segment(stop - length, stop, [], [(stop - length, stop)])
        for length, stop in zip(lengths, stops, strict=True)
    ]
    keys, values = cache_of().layers[0]
    row = torch.arange(stops[-1]).expand(1, 1, -1)[..., None]  # [1, 1, rows, 1]
    inputs = AttentionInputs(row, row + 100, row + 200, keys, values, rows_of(*segments), 0.5)
    found = inputs.stretches()
    assert [[one.stop - one.start for one in part.rows.segments] for part in found] == [
        [step, step], [chunk], [step],
    ]  # fmt: skip
    for part, first in zip(found, (0, 2 * step, 2 * step + chunk), strict=True):
        own = torch.arange(first, first + part.rows.segments[-1].stop)
        assert part.rows.segments[0].start == 0
        assert torch.equal(part.query.flatten(), own)
        assert torch.equal(part.key.flatten(), own + 100)
        assert torch.equal(part.value.flatten(), own + 200)
        assert torch.equal(part.rows.slots, own + 100)
        assert (part.keys is keys, part.values is values, part.scale) == (True, True, 0.5)


def test_a_batch_of_steps_and_prefill_is_split_between_their_kernels() -> None:
    called: list[tuple[str, int]] = []

    def noting(kind: str) -> Attend:
        def attend(inputs: AttentionInputs) -> torch.Tensor:
            called.append((kind, inputs.query.shape[2]))
            return right(inputs)

        return attend

    torch.manual_seed(0)
    shape = [
        CaseRows(40, 1),
        CaseRows(7, MAX_STEP_ROWS),
        CaseRows(30, MAX_STEP_ROWS + 1),
        CaseRows(0, 50),
    ]
    (case,) = checks({"mixed": shape}, cache_of().layout, HEADS, PAGE)
    new, rows = (case.inputs.query, case.inputs.key, case.inputs.value), case.inputs.rows
    rows.kernels = Kernels(noting("steps"), noting("chunks"))
    layer = SimpleNamespace(layer_idx=0)
    output, _ = attend_ragged(layer, *new, None, ragged=rows)  # type: ignore[arg-type]
    assert called == [("steps", 1 + MAX_STEP_ROWS), ("chunks", MAX_STEP_ROWS + 1 + 50)]
    assert case.expected is not None
    torch.testing.assert_close(output, case.expected)

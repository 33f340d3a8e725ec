"""Candidates are checked before they are timed: fakes here, real ones with `make test-gpu`."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from rapid.engines.attention.cases import Case, Rows, checks, chunk_checks, step_checks
from rapid.engines.attention.cuda import (
    all_candidates,
    attend_by_pages,
    choose_kernels,
    efficient_partial,
    flash_partial,
    float32_partial,
)
from rapid.engines.attention.ragged import attend_by_runs, plain_partial, ragged_attention
from rapid.engines.attention.rows import Attend, Kernels, PartialKernel
from rapid.engines.attention.segments import MAX_STEP_ROWS
from rapid.engines.attention.survey import TOLERANCES, Candidate, device_ms, fastest, survey
from rapid.engines.kv.cache import KVCache, KVLayout
from rapid.errors import ConfigurationError

CPU = torch.device("cpu")
PAGE, KV_HEADS, HEADS, HEAD_DIM = 16, 2, 4, 16


def cache_of(dtype: torch.dtype = torch.float32, page: int = PAGE) -> KVCache:
    return KVCache(KVLayout(KV_HEADS, HEAD_DIM, dtype, (CPU,)), 64 * PAGE // page, page)


def step_cases(page: int = PAGE) -> list[Case]:
    torch.manual_seed(0)
    return step_checks(cache_of().layers[0][0], HEADS, page)


def right(*arguments: object) -> torch.Tensor:
    return attend_by_runs(*arguments, kernel=plain_partial)  # type: ignore[arg-type]


def unavailable() -> Attend:
    raise ImportError("no module named 'flash_attn'")


def wrong_beyond_the_first_sequence(*arguments: object) -> torch.Tensor:
    output = right(*arguments)
    rows = arguments[5]
    output[:, rows.segments[0].stop :] *= 1.01  # type: ignore[attr-defined]
    return output


def blind_to_the_last_key(*arguments: object) -> torch.Tensor:
    """Reads one slot too few of every span that is long."""
    query, key, value, keys, values, rows, scale = arguments
    for segment in rows.segments:  # type: ignore[attr-defined]
        segment.past = [(a, b - (b - a > 100)) for a, b in segment.past]
        segment.all_spans = [(a, b - (b - a > 100)) for a, b in segment.all_spans]
    return right(query, key, value, keys, values, rows, scale)


def timer(**ms: float) -> Callable[[Callable[[], object]], float]:
    """Milliseconds by the name of the function that is timed."""

    def measure(run: Callable[[], object]) -> float:
        (attend,) = run.args  # type: ignore[attr-defined]
        return ms[attend.__name__]

    return measure


def test_the_fastest_of_the_right_ones_wins(caplog: pytest.LogCaptureFixture) -> None:
    def slow(*arguments: object) -> torch.Tensor:
        return right(*arguments)

    candidates = [
        Candidate("slow", lambda: slow),
        Candidate("right", lambda: right),
        Candidate("wrong", lambda: wrong_beyond_the_first_sequence),
        Candidate("missing", unavailable),
    ]
    cases = step_cases()
    with caplog.at_level(logging.WARNING):
        found = survey(candidates, cases, cases[:2], 1e-4, timer(slow=3, right=2))
    assert fastest(found).candidate.name == "right"
    assert fastest(found).ms == 4
    assert [finding.attend is None for finding in found] == [False, False, True, True]
    assert found[2].error > 1e-3
    (warning,) = caplog.messages
    assert warning.startswith("attention candidate refused: wrong is wrong: ")
    assert found[3].problem == "is not available (no module named 'flash_attn')"
    with pytest.raises(ConfigurationError, match="no attention is right on this device: wrong"):
        fastest(found[2:])


def test_a_single_key_left_out_is_found_in_bfloat16_too() -> None:
    torch.manual_seed(0)
    cache = cache_of(torch.bfloat16)
    tolerance = TOLERANCES[torch.bfloat16]
    candidates = [Candidate("blind", lambda: blind_to_the_last_key)]
    chunks = chunk_checks(cache.layers[0][0], HEADS, 128)  # long spans
    (found,) = survey(candidates, chunks, [], tolerance, timer())
    assert "is wrong" in found.problem


def test_a_candidate_that_raises_or_runs_out_of_memory_is_left_out() -> None:
    def broken(*arguments: object) -> torch.Tensor:
        raise RuntimeError("no kernel image\nmore")

    def large(run: Callable[[], object]) -> float:
        raise MemoryError("out of memory")

    cases = step_cases()
    candidates = [Candidate("broken", lambda: broken)]
    (found,) = survey(candidates, cases, [], 1e-4, timer())
    assert found.problem == "cannot run here, on decode (no kernel image)"
    (found,) = survey([Candidate("right", lambda: right)], cases, cases, 1e-4, large)
    assert found.problem == "could not be timed (out of memory)"
    assert found.attend is None


def test_steps_and_prefill_choose_for_themselves(caplog: pytest.LogCaptureFixture) -> None:
    def for_steps(*arguments: object) -> torch.Tensor:
        return right(*arguments)

    def for_chunks(*arguments: object) -> torch.Tensor:
        return right(*arguments)

    rows_timed: list[int] = []

    def measure(run: Callable[[], object]) -> float:
        case: Case = run.func.__self__  # type: ignore[attr-defined]
        rows_timed.append(case.query.shape[2])
        (attend,) = run.args  # type: ignore[attr-defined]
        is_step = case.rows.segments[0].is_step
        return 1.0 if (attend is for_steps) == is_step else 2.0

    candidates = [
        Candidate("a", lambda: for_steps),
        Candidate("b", lambda: for_chunks),
        Candidate("c", lambda: right, is_for_chunks=False, is_capturable=True),
    ]
    with caplog.at_level(logging.INFO):
        kernels = choose_kernels(cache_of(), HEADS, PAGE, 512, 100, candidates, measure)
    assert kernels.steps is for_steps
    assert kernels.chunks is for_chunks
    assert kernels.captured is right
    assert rows_timed == [2, 16] * 3 + [100] * 2
    assert [message.split(" (")[0] for message in caplog.messages] == [
        "attention for steps: a",
        "attention for prefill: b",
    ]


def test_a_batch_of_steps_and_prefill_is_split_between_their_kernels() -> None:
    called: list[tuple[str, int]] = []

    def noting(kind: str) -> Attend:
        def attend(*arguments: object) -> torch.Tensor:
            called.append((kind, arguments[0].shape[2]))  # type: ignore[attr-defined]
            return right(*arguments)

        return attend

    torch.manual_seed(0)
    shape = [Rows(40, 1), Rows(7, MAX_STEP_ROWS), Rows(30, MAX_STEP_ROWS + 1), Rows(0, 50)]
    (case,) = checks({"mixed": shape}, cache_of().layers[0][0], HEADS, PAGE)
    case.rows.kernels = Kernels(noting("steps"), noting("chunks"))
    output, _ = ragged_attention(
        SimpleNamespace(layer_idx=0),  # type: ignore[arg-type]
        case.query, case.key, case.value, None, ragged=case.rows,
    )  # fmt: skip
    assert called == [("steps", 1 + MAX_STEP_ROWS), ("chunks", MAX_STEP_ROWS + 1 + 50)]
    assert case.expected is not None
    torch.testing.assert_close(output, case.expected)


def test_checks_are_batches_of_every_row_count_with_scattered_pages() -> None:
    cases = step_cases()
    rows = {s.stop - s.start for case in cases for s in case.rows.segments}
    assert rows == set(range(1, MAX_STEP_ROWS + 1))
    assert all(len(case.rows.segments) >= 2 for case in cases)
    assert all(max(len(s.all_spans) for s in case.rows.segments) > 3 for case in cases)
    for case in cases:
        assert case.expected is not None
        assert case.expected.isfinite().all()  # no slot of nobody's in the specification
        assert math.isnan(float(case.rows.cache.layers[0][0].sum()))


@pytest.mark.parametrize("page", [PAGE, 256])
def test_pages_are_padded_on_the_left_for_kernels_with_uniform_rows(page: int) -> None:
    def with_kvcache(
        query: torch.Tensor,  # [sequences, rows, heads, head_dim]
        keys: torch.Tensor,  # [pages, page, kv_heads, head_dim]
        values: torch.Tensor,
        *,
        block_table: torch.Tensor,
        cache_seqlens: torch.Tensor,
        softmax_scale: float,
        causal: bool,
    ) -> torch.Tensor:
        """What flash-attn documents, written out: the mask ends at the last row and key."""
        assert causal
        outputs = []
        for rows, table, length in zip(query, block_table, cache_seqlens, strict=True):
            num_rows, group = len(rows), query.shape[2] // keys.shape[2]
            own = [t[table].flatten(0, 1)[:length] for t in (keys, values)]
            k, v = (t.repeat_interleave(group, 1).transpose(0, 1) for t in own)
            scores = rows.transpose(0, 1) @ k.transpose(1, 2) * softmax_scale
            seen = torch.ones(num_rows, int(length)).tril(int(length) - num_rows).bool()
            weights = scores.masked_fill(~seen, -math.inf).softmax(-1).nan_to_num()
            outputs.append((weights @ v).transpose(0, 1))
        return torch.stack(outputs)

    attend = partial(attend_by_pages, kernel=with_kvcache, table_name="block_table", page=page)
    cases = [case for case in step_cases(page) if case.name != "windows"]  # no whole pages
    (found,) = survey([Candidate("pages", lambda: attend)], cases, [], 1e-4, timer())
    assert found.problem == ""


@pytest.mark.parametrize("kernel", [flash_partial, efficient_partial, float32_partial])
@pytest.mark.parametrize("is_causal", [False, True])
def test_torch_s_kernels_are_called_as_torch_declares_them(
    kernel: PartialKernel, is_causal: bool
) -> None:
    """Their arguments and the shapes of what they return, without a device to compute on."""
    shape = (8, 4, 40, 128)  # KV heads, group, rows, head_dim: as rows attend to themselves
    query = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    key = torch.empty(8, 40, 128, dtype=torch.bfloat16, device="meta")[:, None].expand(shape)
    output, lse = kernel(query, key, key, 128**-0.5, is_causal=is_causal)
    assert output.shape == shape
    assert lse.shape == shape[:3]
    assert lse.dtype == torch.float32


NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(32, 8, 128), (28, 4, 128), (8, 8, 64)]
)
def test_what_a_device_chooses_is_right_there(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    layout = KVLayout(kv_heads, head_dim, dtype, (torch.device("cuda"),))
    kernels = choose_kernels(KVCache(layout, 512, PAGE), heads, PAGE, 4096, 512)
    assert kernels.captured is not None, "ours is wrong here: see the log"
    keys = KVCache(layout, 1, PAGE).layers[0][0]
    for case in step_checks(keys, heads, PAGE):
        assert case.expected is not None
        for attend in (kernels.steps, kernels.captured):
            difference = (case.run(attend).float() - case.expected).abs().max()
            assert difference < TOLERANCES[dtype]


@pytest.mark.gpu
@NEEDS_GPU
def test_every_candidate_that_runs_on_a_device_is_right_there() -> None:
    keys = torch.empty(8, 16, 128, dtype=torch.bfloat16, device="cuda")
    tolerance = TOLERANCES[torch.bfloat16]
    found = survey(all_candidates(256), step_checks(keys, 32, 256), [], tolerance, device_ms)
    assert not [str(finding) for finding in found if "is wrong" in finding.problem]

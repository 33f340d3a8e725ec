"""The choice among the CUDA kernels and how they are called; on a device with `make test-gpu`."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.attention import _fa3

from rapid.engines.attention.cases import Case, beside_sinks, chunk_checks, step_checks
from rapid.engines.attention.cuda import (
    all_candidates,
    attend_by_pages,
    choose_kernels,
    efficient_partial,
    flash_3_partial,
    flash_partial,
    float32_partial,
)
from rapid.engines.attention.kernel_inputs import AttentionInputs, PartialKernel
from rapid.engines.attention.ragged import attend_by_runs, plain_partial
from rapid.engines.attention.survey import TOLERANCES, KernelCandidate, device_ms, survey
from rapid.engines.kv.cache import KVCache, KVLayout
from rapid.engines.kv.fp8 import CAPABILITY
from tests.rapid.engines.attention.small_cases import (
    HEADS,
    PAGE,
    cache_of,
    right,
    step_cases,
    textbook,
)


def test_who_forgets_the_window_of_sliding_layers_is_not_chosen() -> None:
    def forgetful(inputs: AttentionInputs) -> torch.Tensor:
        return right(replace(inputs, window=None))

    candidates = [
        KernelCandidate("forgetful", lambda: forgetful),
        KernelCandidate("right", lambda: right),
    ]

    def measure(run: Callable[[], object]) -> float:
        return 1.0 if run.args == (forgetful,) else 2.0  # type: ignore[attr-defined]

    for window, chosen in ((None, forgetful), (32, right)):
        kernels = choose_kernels(cache_of(), HEADS, PAGE, 512, 100, candidates, measure, window)
        assert (kernels.steps, kernels.chunks) == (chosen, chosen)


def test_who_forgets_sinks_or_does_not_take_them_is_not_chosen(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def forgetful(inputs: AttentionInputs) -> torch.Tensor:
        return right(replace(inputs, sinks=None))

    paged = partial(attend_by_pages, kernel=forgetful, table_name="block_table", page=PAGE)
    candidates = [
        KernelCandidate("pages", lambda: paged),
        KernelCandidate("forgetful", lambda: forgetful),
        KernelCandidate("right", lambda: right),
    ]
    torch.manual_seed(0)
    with caplog.at_level(logging.INFO):
        kernels = choose_kernels(
            cache_of(), HEADS, PAGE, 512, 100, candidates, lambda _: 1.0, 32, has_sinks=True
        )
    assert (kernels.steps, kernels.chunks) == (right, right)
    assert caplog.text.count("pages cannot run here, on decode, beside sinks (it is not given") == 1
    assert "forgetful is wrong" in caplog.text


def test_steps_and_prefill_choose_for_themselves(caplog: pytest.LogCaptureFixture) -> None:
    def for_steps(inputs: AttentionInputs) -> torch.Tensor:
        return right(inputs)

    def for_chunks(inputs: AttentionInputs) -> torch.Tensor:
        return right(inputs)

    rows_timed: list[int] = []

    def measure(run: Callable[[], object]) -> float:
        case: Case = run.func.__self__  # type: ignore[attr-defined]
        rows_timed.append(case.inputs.query.shape[2])
        (attend,) = run.args  # type: ignore[attr-defined]
        is_step = case.inputs.rows.segments[0].is_step
        return 1.0 if (attend is for_steps) == is_step else 2.0

    candidates = [
        KernelCandidate("a", lambda: for_steps),
        KernelCandidate("b", lambda: for_chunks),
        KernelCandidate("c", lambda: right, is_for_chunks=False, is_capturable=True),
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
        window_size: tuple[int, int],
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
            if window_size != (-1, -1):
                assert window_size[1] == 0
                seen = seen.triu(int(length) - num_rows - window_size[0])
            weights = scores.masked_fill(~seen, -math.inf).softmax(-1).nan_to_num()
            outputs.append((weights @ v).transpose(0, 1))
        return torch.stack(outputs)

    attend = partial(attend_by_pages, kernel=with_kvcache, table_name="block_table", page=page)
    cases = [case for case in step_cases(page) if case.name != "windows"]  # no whole pages
    (found,) = survey([KernelCandidate("pages", lambda: attend)], cases, [], 1e-4, device_ms)
    assert found.problem == ""
    for case in cases:
        inputs = replace(case.inputs, window=7)
        torch.testing.assert_close(attend(inputs), textbook(inputs), atol=1e-4, rtol=0)


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


def test_flash_attention_3_is_called_as_torch_registers_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what its function takes, and with a stand-in that takes heads in groups as it does."""
    name = "_fa3_scaled_dot_product_flash_attention_forward_impl_default"
    declared = inspect.signature(getattr(_fa3, name))

    def forward(*arguments: Any, **named: Any) -> tuple[torch.Tensor, ...]:
        bound = declared.bind(*arguments, **named).arguments
        query, key, value = bound["query"], bound["key"], bound["value"]
        assert key.stride(1) != 0 or key.shape[1] == 1  # no head is passed twice
        group = query.shape[1] // key.shape[1]
        keys, values = (tensor.repeat_interleave(group, 1) for tensor in (key, value))
        is_causal = bound["is_causal"]
        return *plain_partial(query, keys, values, bound["scale"], is_causal=is_causal), query

    monkeypatch.setattr(_fa3, name, forward)
    kernel = partial(attend_by_runs, kernel=flash_3_partial)
    torch.manual_seed(0)
    cases = chunk_checks(cache_of().layout, HEADS, PAGE)
    (found,) = survey([KernelCandidate("flash 3", lambda: kernel)], cases, [], 1e-4, device_ms)
    assert found.problem == ""


def test_flash_attention_3_that_is_not_installed_is_left_out() -> None:
    (one,) = [one for one in all_candidates(PAGE) if one.name == "runs, flash-attn 3"]
    (found,) = survey([one], [], [], 1e-4, device_ms)
    assert found.problem == "is not available (No module named 'flash_attn_interface')"


NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(32, 8, 128), (28, 4, 128), (8, 8, 64), (64, 8, 64)]
)
def test_what_a_device_chooses_is_right_there(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    for is_fp8 in (False, torch.cuda.get_device_capability() >= CAPABILITY):
        layout = KVLayout(kv_heads, head_dim, dtype, (torch.device("cuda"),), is_fp8)
        check_choice(layout, heads)


def check_choice(layout: KVLayout, heads: int) -> None:
    has_sinks = heads == 64
    cache = KVCache(layout, 512, PAGE)
    kernels = choose_kernels(cache, heads, PAGE, 4096, 512, has_sinks=has_sinks)
    assert kernels.captured is not None, "ours is wrong here: see the log"
    cases = step_checks(layout, heads, PAGE)
    for case in beside_sinks(cases) if has_sinks else cases:
        assert case.expected is not None
        for attend in (kernels.steps, kernels.captured):
            difference = (case.run(attend).float() - case.expected).abs().max()
            assert difference < TOLERANCES[layout.dtype]


@pytest.mark.gpu
@NEEDS_GPU
def test_every_candidate_that_runs_on_a_device_is_right_there() -> None:
    layout = KVLayout(8, 128, torch.bfloat16, (torch.device("cuda"),))
    tolerance = TOLERANCES[torch.bfloat16]
    found = survey(all_candidates(256), step_checks(layout, 32, 256), [], tolerance, device_ms)
    assert not [str(finding) for finding in found if "is wrong" in finding.problem]

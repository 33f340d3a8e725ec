"""The attention of a CUDA engine: candidates, checked against float32 first, then timed.

Fast kernels have been silently wrong at batch 2 or on some lengths (pytorch issue 194167), and
which of the right ones is fast depends on the device. So every engine looks when it starts, at its
own shapes: a candidate that is not right on every case is refused with a warning, one that cannot
run here is left out, and of the others the fastest is taken, once for steps and once for prefill.

Three families:

* runs: one kernel call of torch's per sequence and run, merged by log-sum-exp;
* pages: one call of flash-attn 2 or 3 for the batch, where the package is installed. Version 2
  takes pages of multiples of 256 tokens only. Rows are padded on the left, for its causal mask ends
  at the last row and the last key. (Its varlen form is no candidate: it does not split the keys.)
* blocks: ours in Triton (`rapid.engines.triton_attention`), the one that a graph can capture.
"""

from __future__ import annotations

import importlib
import logging
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rapid.config import EngineConfig
from rapid.engines.attention import (
    MAX_STEP_ROWS,
    Attend,
    Kernels,
    Partial,
    PartialKernel,
    RaggedRows,
    Segment,
    attend_by_runs,
    blockwise_partial,
    plain_partial,
)
from rapid.engines.batching import Feed, assemble
from rapid.engines.kv_cache import KVCache, KVLayout, PageTable, Run
from rapid.errors import ConfigurationError

if TYPE_CHECKING:
    from rapid.engines.loading import LoadedModel

logger = logging.getLogger(__name__)

# Largest difference to float32, for outputs of size 1 to 4; leaving out keys costs about 0.5.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
SHARPNESS = 3.0  # of the checks' queries: a few keys carry each output, so each of them is missed

Measure = Callable[[Callable[[], object]], float]  # milliseconds


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to attend.

    Attributes:
        load: makes it; raises where it is not available.
        is_for_chunks: it also takes rows beyond `MAX_STEP_ROWS`.
        is_capturable: it reads nothing from the host, so that a graph can hold it.
    """

    name: str
    load: Callable[[], Attend]
    is_for_chunks: bool = True
    is_capturable: bool = False


@dataclass(frozen=True, slots=True)
class Case:
    """Rows to attend with over layer 0 of their cache; `expected` [1, rows, heads, head_dim]."""

    name: str
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    rows: RaggedRows
    expected: torch.Tensor | None = None

    def run(self, attend: Attend) -> torch.Tensor:
        """Attend."""
        keys, values = self.rows.cache.layers[0]
        scale = self.query.shape[-1] ** -0.5
        return attend(self.query, self.key, self.value, keys, values, self.rows, scale)

    @property
    def kv_bytes(self) -> int:
        """Keys and values that must be read, each once for all rows of a sequence."""
        keys = self.rows.cache.layers[0][0]
        slots = sum(b - a for one in self.rows.segments for a, b in one.all_spans)
        return 2 * slots * keys.shape[0] * keys.shape[2] * keys.element_size()


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found of a candidate.

    Attributes:
        attend: None when it may not be chosen.
        error: largest difference to float32 over the cases; NaN when it did not run.
        problem: why it may not be chosen.
        ms: over all timed cases; NaN when it was not timed.
    """

    candidate: Candidate
    attend: Attend | None
    error: float
    problem: str
    ms: float

    def __str__(self) -> str:
        return f"{self.candidate.name} " + (
            self.problem or f"{self.ms:.3f} ms, within {self.error:.1e} of float32"
        )


def survey(
    candidates: Sequence[Candidate],
    cases: Sequence[Case],
    timed: Sequence[Case],
    tolerance: float,
    measure: Measure,
) -> list[Finding]:
    """Check every candidate on all cases, then time those that are right."""
    found = []
    for candidate in candidates:
        attend, error, problem = _check(candidate, cases, tolerance)
        ms = math.nan
        if attend is not None:
            try:
                ms = sum(measure(partial(case.run, attend)) for case in timed)
            except Exception as cause:  # no memory for it at full length, say
                attend, problem = None, f"could not be timed ({_told(cause)})"
        found.append(Finding(candidate, attend, error, problem, ms))
    return found


def _check(
    candidate: Candidate, cases: Sequence[Case], tolerance: float
) -> tuple[Attend | None, float, str]:
    try:
        attend = candidate.load()
    except Exception as cause:
        return None, math.nan, f"is not available ({_told(cause)})"
    worst = 0.0
    for case in cases:
        assert case.expected is not None
        try:
            error = float((case.run(attend).float() - case.expected).abs().max())
        except Exception as cause:
            return None, math.nan, f"cannot run here, on {case.name} ({_told(cause)})"
        if not error <= tolerance:  # NaN is wrong, too
            problem = f"is wrong: {error:.3g} from float32 on {case.name}"
            logger.warning("attention candidate refused: %s %s", candidate.name, problem)
            return None, error, problem
        worst = max(worst, error)
    return attend, worst, ""


def _told(cause: Exception) -> str:
    """The first sentence of an error, which from torch may go on for pages."""
    return (str(cause).strip().splitlines() or [type(cause).__name__])[0].split(". ")[0][:160]


def fastest(found: Sequence[Finding]) -> Finding:
    """The quickest of the right ones.

    Raises:
        ConfigurationError: none is right.
    """
    right = [finding for finding in found if finding.attend is not None]
    if not right:
        raise ConfigurationError(
            "no attention is right on this device: " + "; ".join(map(str, found))
        )
    return min(right, key=lambda finding: finding.ms)


def kernels_of(
    loaded: LoadedModel, cache: KVCache, max_context: int, config: EngineConfig
) -> Kernels | None:
    """The kernels of an engine that is starting, its cache still nobody's; None off CUDA."""
    layout = loaded.kv_layout
    if any(device.type != "cuda" for device in layout.devices):
        return None
    settings: Any = loaded.model.config
    num_heads = int(settings.num_attention_heads)
    page_tokens, step_tokens = config.page_tokens, config.step_tokens
    # Engines of one shape and of about one size take what the first of them found.
    alike = (
        *(layout.devices[0], layout.num_kv_heads, layout.head_dim, layout.dtype),
        *(num_heads, page_tokens, max_context.bit_length(), step_tokens),
    )
    if alike not in _chosen:
        with torch.cuda.device(layout.devices[0]):
            _chosen[alike] = choose_kernels(cache, num_heads, page_tokens, max_context, step_tokens)
    return _chosen[alike]


_chosen: dict[tuple[object, ...], Kernels] = {}


def choose_kernels(
    cache: KVCache,
    num_heads: int,
    page_tokens: int,
    max_context: int,
    step_tokens: int,
    candidates: Sequence[Candidate] | None = None,
    measure: Measure | None = None,
) -> Kernels:
    """Check and time candidates at the shapes of a cache, and say so in the log.

    Args:
        cache: timed on its first layer, whose content is lost.
        num_heads: of the queries.
        page_tokens: of its pages.
        max_context: longest sequence.
        step_tokens: rows of a prefill chunk.
        candidates: None takes `all_candidates`.
        measure: None takes `device_ms`.

    Raises:
        ConfigurationError: none is right.
    """
    keys = cache.layers[0][0]
    tolerance = TOLERANCES[keys.dtype]
    candidates = all_candidates(page_tokens) if candidates is None else candidates
    measure = measure or device_ms
    steps = survey(
        candidates,
        step_checks(keys, num_heads, page_tokens),
        step_timings(cache, num_heads, page_tokens, max_context),
        tolerance,
        measure,
    )
    chunks = survey(
        [candidate for candidate in candidates if candidate.is_for_chunks],
        chunk_checks(keys, num_heads, page_tokens),
        chunk_timings(cache, num_heads, page_tokens, max_context, step_tokens),
        tolerance,
        measure,
    )
    best_step, best_chunk = fastest(steps), fastest(chunks)
    for what, found, best in (("steps", steps, best_step), ("prefill", chunks, best_chunk)):
        logger.info(
            "attention for %s: %s (%s)", what, best.candidate.name, "; ".join(map(str, found))
        )
    capturable = [one for one in steps if one.candidate.is_capturable and one.attend is not None]
    assert best_step.attend is not None
    assert best_chunk.attend is not None
    return Kernels(
        best_step.attend,
        best_chunk.attend,
        fastest(capturable).attend if capturable else None,
    )


# --- candidates -----------------------------------------------------------------------------------


def all_candidates(page_tokens: int) -> list[Candidate]:
    """Every way to attend on CUDA; the written-out one is there so that something always is."""
    by_runs: dict[str, PartialKernel] = {
        "runs, flash": flash_partial,
        "runs, cuDNN": cudnn_partial,
        "runs, memory-efficient": efficient_partial,
        "runs, written out": float32_partial,
    }
    return [
        *(
            Candidate(name, lambda kernel=kernel: partial(attend_by_runs, kernel=kernel))  # type: ignore[misc]
            for name, kernel in by_runs.items()
        ),
        Candidate("pages, flash-attn 2", lambda: _flash_attn_2(page_tokens)),
        Candidate("pages, flash-attn 3", lambda: _flash_attn_3(page_tokens)),
        Candidate("blocks, ours in Triton", _blocks, is_for_chunks=False, is_capturable=True),
    ]


def flash_partial(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, *, is_causal: bool
) -> Partial:
    """Torch's build of flash-attention 2; it splits the keys when the rows are few."""
    output, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, 0.0, is_causal, False, scale=scale
    )
    return output, lse


def cudnn_partial(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, *, is_causal: bool
) -> Partial:
    """cuDNN's; its log-sum-exp has one more dimension."""
    output, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query, key, value, None, True, 0.0, is_causal, False, scale=scale
    )
    return output, lse.reshape(query.shape[:3])


def efficient_partial(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, *, is_causal: bool
) -> Partial:
    """The memory-efficient kernel, also in float32; its log-sum-exp is padded to 32 rows."""
    output, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, None, True, 0.0, is_causal, scale=scale
    )
    return output, lse[..., : query.shape[2]]


def float32_partial(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, *, is_causal: bool
) -> Partial:
    """Written out in float32."""
    tensors = query.float(), key.float(), value.float()
    return blockwise_partial(*tensors, scale, is_causal=is_causal)


def _blocks() -> Attend:
    from rapid.engines.triton_attention import attend_by_blocks

    return attend_by_blocks


def _flash_attn_2(page_tokens: int) -> Attend:
    if page_tokens % 256:
        raise ConfigurationError(f"needs page_tokens in multiples of 256, not {page_tokens}")
    kernel = importlib.import_module("flash_attn").flash_attn_with_kvcache
    return partial(attend_by_pages, kernel=kernel, table_name="block_table", page=page_tokens)


def _flash_attn_3(page_tokens: int) -> Attend:
    kernel = importlib.import_module("flash_attn_interface").flash_attn_with_kvcache
    return partial(attend_by_pages, kernel=kernel, table_name="page_table", page=page_tokens)


def attend_by_pages(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: RaggedRows,
    scale: float,
    *,
    kernel: Callable[..., Any],
    table_name: str,
    page: int,
) -> torch.Tensor:
    """`Attend` with a ``flash_attn_with_kvcache``; by runs where spans are no whole pages.

    Args:
        kernel: takes [sequences, rows, heads, head_dim], pages [pages, page, kv_heads, head_dim].
        table_name: what it calls the table of pages [sequences, pages].
        page: tokens of a page.
    """
    pages = rows.once(("pages", keys.device), lambda: _pages(rows.segments, page, keys.device))
    if pages is None:
        return attend_by_runs(query, key, value, keys, values, rows, scale, kernel=flash_partial)
    table, lengths, padded, back = pages
    shape = (keys.shape[0], -1, page, keys.shape[2])
    output = kernel(
        query[0].transpose(0, 1)[padded],
        keys.view(shape).permute(1, 2, 0, 3),
        values.view(shape).permute(1, 2, 0, 3),
        cache_seqlens=lengths,
        softmax_scale=scale,
        causal=True,
        **{table_name: table},
    )
    return torch.as_tensor(output).flatten(0, 1)[back][None]


def _pages(
    segments: list[Segment], page: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Table of pages, keys of each sequence, rows padded to a rectangle, and the way back."""
    tables = []
    for segment in segments:
        *whole, last = segment.all_spans
        if any(a % page or b % page for a, b in whole) or last[0] % page:
            return None
        pages = [np.arange(a // page, -(-b // page)) for a, b in segment.all_spans]
        tables.append(np.concatenate(pages))
    most = max(segment.stop - segment.start for segment in segments)
    table = np.zeros((len(tables), max(map(len, tables))), dtype=np.int32)
    for line, own in zip(table, tables, strict=True):
        line[: len(own)] = own
    padded = [
        max(segment.stop - most + i, segment.start) for segment in segments for i in range(most)
    ]
    back = [
        line * most + most - (segment.stop - segment.start) + i
        for line, segment in enumerate(segments)
        for i in range(segment.stop - segment.start)
    ]
    counted = [sum(b - a for a, b in segment.all_spans) for segment in segments]
    return (
        torch.from_numpy(table).to(device),
        torch.tensor(counted, dtype=torch.int32, device=device),
        torch.tensor(padded, device=device).view(len(segments), most),
        torch.tensor(back, device=device),
    )


# --- cases ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rows:
    """New rows of one sequence after `past` keys, `unseen` some of them."""

    past: int
    num_rows: int
    unseen: tuple[int, int] = (0, 0)


def step_checks(keys: torch.Tensor, num_heads: int, page_tokens: int) -> list[Case]:
    """Batches of 2 to 5 sequences: rows 1 to 16, odd lengths, one far longer than the others."""
    shapes = {
        "decode": [Rows(5000, 1), Rows(37, 1), Rows(700, 1), Rows(0, 1)],
        "verify of unequal blocks": [
            Rows(3001, 16), Rows(40, 1), Rows(129, 5), Rows(64, 2), Rows(0, 11)
        ],
        "windows": [Rows(901, 1, unseen=(4, 389)), Rows(300, 3, unseen=(5, 170)), Rows(50, 1)],
    }  # fmt: skip
    shapes |= {
        f"{rows} rows": [Rows(61 * rows, rows), Rows(300 + rows, rows)]
        for rows in range(1, MAX_STEP_ROWS + 1)
    }
    return checks(shapes, keys, num_heads, page_tokens)


def chunk_checks(keys: torch.Tensor, num_heads: int, page_tokens: int) -> list[Case]:
    """Prefill chunks at the start and after odd lengths."""
    shapes = {
        "first chunks": [Rows(0, 300), Rows(0, 17)],
        "later chunks": [Rows(2001, 130), Rows(33, 97), Rows(512, 64)],
    }
    return checks(shapes, keys, num_heads, page_tokens)


def checks(
    shapes: dict[str, list[Rows]], keys: torch.Tensor, num_heads: int, page_tokens: int
) -> list[Case]:
    """Cases with what float32 says of them, in a small cache of the shape of `keys`.

    Slots that belong to nobody are NaN: whoever lets them in is found out.
    """
    tables: dict[str, list[PageTable]] = {}
    start = 1
    for name, batch in shapes.items():
        tables[name] = []
        for one in batch:
            table = scattered(one.past + one.num_rows, page_tokens, start)
            tables[name].append(table)
            start = max(run.stop for run in table.runs) + 1
    layout = KVLayout(keys.shape[0], keys.shape[2], keys.dtype, (keys.device,))
    cache = KVCache(layout, start, page_tokens)
    for tensor in cache.layers[0]:
        tensor.fill_(math.nan)
    cases = [
        make_case(name, cache, batch, tables[name], num_heads, SHARPNESS)
        for name, batch in shapes.items()
    ]
    for case in cases:
        for tensor, own in zip(cache.layers[0], (case.key, case.value), strict=True):
            for segment in case.rows.segments:
                for first, stop in segment.all_spans:
                    tensor[:, first:stop].normal_()
            tensor.index_copy_(1, case.rows.slots, own[0])
    return [replace(case, expected=_specification(case)) for case in cases]


def _specification(case: Case) -> torch.Tensor:
    def kernel(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        *,
        is_causal: bool,
    ) -> Partial:
        return plain_partial(query, key.float(), value.float(), scale, is_causal=is_causal)

    exact = replace(case, query=case.query.float())
    return exact.run(partial(attend_by_runs, kernel=kernel))


def step_timings(cache: KVCache, num_heads: int, page_tokens: int, max_context: int) -> list[Case]:
    """Decoding and verifying 8 tokens of two long sequences."""
    shapes = [Rows(0, 1), Rows(0, 8)]
    return [
        _timed(f"{one.num_rows} rows", cache, num_heads, page_tokens, max_context, one, 2)
        for one in shapes
    ]


def chunk_timings(
    cache: KVCache, num_heads: int, page_tokens: int, max_context: int, step_tokens: int
) -> list[Case]:
    """One prefill chunk at the end of a long sequence."""
    rows = Rows(0, max(MAX_STEP_ROWS + 1, min(step_tokens, max_context // 2)))
    return [_timed("chunk", cache, num_heads, page_tokens, max_context, rows, 1)]


def _timed(
    name: str,
    cache: KVCache,
    num_heads: int,
    page_tokens: int,
    max_context: int,
    rows: Rows,
    num_sequences: int,
) -> Case:
    """The rows at the end of equal sequences, each in one run."""
    num_pages = cache.layers[0][0].shape[1] // page_tokens
    each = max(1, min(num_pages // num_sequences, max_context // page_tokens))
    tables = [
        PageTable([Run(i * each, (i + 1) * each)], page_tokens)
        for i in range(min(num_sequences, num_pages // each))
    ]
    batch = [
        Rows(max(0, table.num_tokens - rows.num_rows), min(rows.num_rows, table.num_tokens))
        for table in tables
    ]
    for tensor in cache.layers[0]:
        tensor[:, : each * page_tokens * len(tables)].normal_()
    return make_case(name, cache, batch, tables, num_heads)


def make_case(
    name: str,
    cache: KVCache,
    batch: Sequence[Rows],
    tables: Sequence[PageTable],
    num_heads: int,
    sharpness: float = 1.0,
) -> Case:
    """Random queries, keys and values of a batch; nothing is stored in the cache."""
    keys = cache.layers[0][0]
    num_kv_heads, _, head_dim = keys.shape
    feeds = [
        Feed([0] * one.num_rows, one.past, table, num_wanted=0, unseen=one.unseen)
        for one, table in zip(batch, tables, strict=True)
    ]
    num_rows = sum(one.num_rows for one in batch)

    def drawn(heads: int) -> torch.Tensor:  # as models pass it: heads and rows transposed
        shape = (1, num_rows, heads, head_dim)
        return torch.randn(shape, device=keys.device).to(keys.dtype).transpose(1, 2)

    query = (drawn(num_heads) * sharpness).to(keys.dtype)
    rows = assemble(feeds, cache, keys.device).rows
    return Case(name, query, drawn(num_kv_heads), drawn(num_kv_heads), rows)


def scattered(num_tokens: int, page_tokens: int, start: int) -> PageTable:
    """Runs of 3, 1, 4, 1, 5, 9, ... pages from page `start` on, others' between, the last first."""
    runs: list[Run] = []
    missing, lengths = -(-num_tokens // page_tokens), [3, 1, 4, 1, 5, 9, 2, 6]
    while missing > 0:
        length = min(lengths[len(runs) % len(lengths)], missing)
        runs.append(Run(start, start + length))
        start += length + 1
        missing -= length
    return PageTable(runs[::-1], page_tokens)


def device_ms(run: Callable[[], object], repeats: int = 7) -> float:
    """Median time of a call on the current CUDA device, by its own events."""
    for _ in range(3):
        run()
    times: list[float] = []
    events: Any = torch.cuda.Event
    for _ in range(repeats):
        start, end = events(enable_timing=True), events(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)

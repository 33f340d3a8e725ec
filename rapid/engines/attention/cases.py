"""Batches that check and time attention kernels.

Kernels fail at batch 2, at odd lengths, where one sequence is far longer than the others, and by
reading slots of other sequences.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from rapid.engines.attention.batch import Feed, assemble
from rapid.engines.attention.kernel_inputs import Attend, AttentionInputs
from rapid.engines.attention.ragged import attend_by_runs, plain_partial
from rapid.engines.attention.segments import MAX_STEP_ROWS, Partial, num_keys
from rapid.engines.attention.work_items import TILES
from rapid.engines.kv.cache import KVCache, KVLayout, PageRun, PageTable

SINK = 8.0  # mean of the checks' sinks: the log-sum-exp of 40 keys, ln 40 + SHARPNESS ** 2 / 2
SHARPNESS = 3.0  # scale of the checks' queries: a few keys carry each output, so a lost one shows


@dataclass(frozen=True, slots=True)
class Case:
    """One attention call over the longest layer of a cache."""

    name: str
    inputs: AttentionInputs
    # Output in float32, [1, rows, heads, head_dim]; None in cases that are only timed.
    expected: torch.Tensor | None = None

    def run(self, attend: Attend) -> torch.Tensor:
        """Return the output of `attend` on this case."""
        return attend(self.inputs)

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values to read, each once for all rows that attend to it."""
        keys, rows = self.inputs.keys, self.inputs.rows
        slots = sum(num_keys(segment.all_spans) for segment in rows.segments)
        slots -= sum((len(one.rests) - 1) * num_keys(one.spans) for one in rows.prefixes())
        return 2 * slots * keys.shape[0] * keys.shape[2] * keys.element_size()


@dataclass(frozen=True, slots=True)
class CaseRows:
    """The new rows of one sequence."""

    past: int  # number of positions before the rows
    num_rows: int  # number of new rows
    unseen: tuple[int, int] = (0, 0)  # past positions [a, b) that the rows do not attend to
    shared: int = 0  # first positions, of whole pages, that lie in the slots of the first sequence


def step_checks(layout: KVLayout, num_heads: int, page_tokens: int) -> list[Case]:
    """Return step batches of 2 to 5 sequences with 1 to 16 rows each, at odd lengths."""
    shapes = {
        "decode": [CaseRows(5000, 1), CaseRows(37, 1), CaseRows(700, 1), CaseRows(0, 1)],
        "verify of unequal blocks": [
            CaseRows(3001, 16), CaseRows(40, 1), CaseRows(129, 5), CaseRows(64, 2), CaseRows(0, 11)
        ],
        "windows": [
            CaseRows(901, 1, unseen=(4, 389)), CaseRows(300, 3, unseen=(5, 170)), CaseRows(50, 1)
        ],
        "one document": [
            CaseRows(2100, 1, shared=2048), CaseRows(2300, 7, shared=2048), CaseRows(33, 4)
        ],
    }  # fmt: skip
    shapes |= {
        f"{rows} rows": [CaseRows(61 * rows, rows), CaseRows(300 + rows, rows)]
        for rows in range(1, MAX_STEP_ROWS + 1)
    }
    return checks(shapes, layout, num_heads, page_tokens)


def chunk_checks(layout: KVLayout, num_heads: int, page_tokens: int) -> list[Case]:
    """Return prefill chunks at the start of a sequence and after odd lengths."""
    shapes = {
        "first chunks": [CaseRows(0, 300), CaseRows(0, 17)],
        "later chunks": [CaseRows(2001, 130), CaseRows(33, 97), CaseRows(512, 64)],
    }
    return checks(shapes, layout, num_heads, page_tokens)


def checks(
    shapes: dict[str, list[CaseRows]], layout: KVLayout, num_heads: int, page_tokens: int
) -> list[Case]:
    """Return cases with their float32 outputs, in a small cache of one layer."""
    tables: dict[str, list[PageTable]] = {}
    start = 1
    for name, batch in shapes.items():
        tables[name] = []
        for one in batch:
            others = tables[name][0].runs if tables[name] else []
            runs = _first(others, one.shared // page_tokens)
            num_left = one.past + one.num_rows - sum(map(len, runs)) * page_tokens
            rest = scatter_pages(num_left, page_tokens, start)
            tables[name].append(PageTable([*runs, *rest.runs], page_tokens))
            start = max(run.stop for run in rest.runs) + 1
    layout = replace(layout, devices=layout.devices[:1], sliding=())
    cache = KVCache(layout, start, page_tokens)
    for tensor in cache.layers[0]:
        tensor.fill_(math.nan)  # a kernel that reads slots of no sequence returns NaN
    cases = [
        make_case(name, cache, batch, tables[name], num_heads, SHARPNESS)
        for name, batch in shapes.items()
    ]
    for case in cases:
        inputs = case.inputs
        for tensor in cache.layers[0]:
            for segment in inputs.rows.segments:
                for first, stop in segment.all_spans:
                    randomise(tensor[:, first:stop])
        cache.store(0, inputs.rows.slots, inputs.key, inputs.value)
    return [replace(case, expected=_specification(case.inputs)) for case in cases]


def in_window(cases: Sequence[Case], window: int) -> list[Case]:
    """Return the cases as in a layer with a sliding window, with what is expected then."""
    return [_redo(case, "in a window", replace(case.inputs, window=window)) for case in cases]


def beside_sinks(cases: Sequence[Case]) -> list[Case]:
    """Return the cases with random sinks, and with what is expected then."""
    found = []
    for case in cases:
        query = case.inputs.query
        sinks = SINK + SHARPNESS * torch.randn(query.shape[1], device=query.device)
        found.append(_redo(case, "beside sinks", replace(case.inputs, sinks=sinks)))
    return found


def _redo(case: Case, what: str, inputs: AttentionInputs) -> Case:
    return Case(f"{case.name}, {what}", inputs, _specification(inputs))


def _first(runs: Sequence[PageRun], num_pages: int) -> list[PageRun]:
    """Return the runs of the first `num_pages` pages."""
    first: list[PageRun] = []
    for run in runs:
        length = min(len(run), num_pages - sum(map(len, first)))
        first += [PageRun(run.start, run.start + length)] if length else []
    return first


def _specification(inputs: AttentionInputs) -> torch.Tensor:
    """Return the output in float32; keys and values are converted run by run."""
    exact = replace(inputs, query=inputs.query.float())
    return attend_by_runs(exact, kernel=_float32_partial)


def _float32_partial(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, *, is_causal: bool
) -> Partial:
    return plain_partial(query, key.float(), value.float(), scale, is_causal=is_causal)


def step_timings(cache: KVCache, num_heads: int, page_tokens: int, max_context: int) -> list[Case]:
    """Return two cases over two long sequences: decoding, and verifying 8 tokens of each."""
    shapes = [CaseRows(0, 1), CaseRows(0, 8)]
    return [
        _make_timed(f"{one.num_rows} rows", cache, num_heads, page_tokens, max_context, one, 2)
        for one in shapes
    ]


def tile_timings(cache: KVCache, num_heads: int, page_tokens: int, max_context: int) -> list[Case]:
    """Return cases of one long sequence each, with the rows that fill a tile of each size."""
    group = num_heads // cache.longest[0].shape[0]
    return [
        _make_timed(
            f"tiles of {packed}", cache, num_heads, page_tokens, max_context, CaseRows(0, rows), 1
        )
        for packed in TILES
        if (rows := packed // group)
    ]


def chunk_timings(
    cache: KVCache, num_heads: int, page_tokens: int, max_context: int, step_tokens: int
) -> list[Case]:
    """Return one case: a prefill chunk at the end of a long sequence."""
    rows = CaseRows(0, max(MAX_STEP_ROWS + 1, min(step_tokens, max_context // 2)))
    return [_make_timed("chunk", cache, num_heads, page_tokens, max_context, rows, 1)]


def _make_timed(
    name: str,
    cache: KVCache,
    num_heads: int,
    page_tokens: int,
    max_context: int,
    rows: CaseRows,
    num_sequences: int,
) -> Case:
    """Return a case with the rows at the end of equally long sequences, each in one run."""
    num_pages = cache.longest[0].shape[1] // page_tokens
    each = max(1, min(num_pages // num_sequences, max_context // page_tokens))
    tables = [
        PageTable([PageRun(i * each, (i + 1) * each)], page_tokens)
        for i in range(min(num_sequences, num_pages // each))
    ]
    batch = [
        CaseRows(max(0, table.num_tokens - rows.num_rows), min(rows.num_rows, table.num_tokens))
        for table in tables
    ]
    for tensor in cache.longest:
        randomise(tensor[:, : each * page_tokens * len(tables)])
    return make_case(name, cache, batch, tables, num_heads)


def randomise(tensor: torch.Tensor) -> None:
    """Fill a tensor with random numbers, a head at a time: fp8 has no generator of its own."""
    for head in tensor:
        head.copy_(torch.randn(head.shape, device=head.device))


def make_case(
    name: str,
    cache: KVCache,
    batch: Sequence[CaseRows],
    tables: Sequence[PageTable],
    num_heads: int,
    sharpness: float = 1.0,
) -> Case:
    """Return a case with random keys, values and queries, these scaled; no cache is written."""
    keys, values = cache.longest
    num_kv_heads, _, head_dim = keys.shape
    feeds = [
        Feed([0] * one.num_rows, one.past, table, num_wanted=0, unseen=one.unseen)
        for one, table in zip(batch, tables, strict=True)
    ]
    num_rows = sum(one.num_rows for one in batch)

    def draw(heads: int) -> torch.Tensor:  # as models pass it: heads and rows transposed
        shape = (1, num_rows, heads, head_dim)
        return torch.randn(shape, device=keys.device).to(cache.layout.dtype).transpose(1, 2)

    query = (draw(num_heads) * sharpness).to(cache.layout.dtype)
    rows = assemble(feeds, cache, keys.device).rows
    key, value = cache.as_read(draw(num_kv_heads)), cache.as_read(draw(num_kv_heads))
    return Case(name, AttentionInputs(query, key, value, keys, values, rows, head_dim**-0.5))


def scatter_pages(num_tokens: int, page_tokens: int, start: int) -> PageTable:
    """Return a table of runs of 3, 1, 4, 1, 5, ... pages from page `start` on, the last first."""
    runs: list[PageRun] = []
    missing, lengths = -(-num_tokens // page_tokens), [3, 1, 4, 1, 5, 9, 2, 6]
    while missing > 0:
        length = min(lengths[len(runs) % len(lengths)], missing)
        runs.append(PageRun(start, start + length))
        start += length + 1
        missing -= length
    return PageTable(runs[::-1], page_tokens)

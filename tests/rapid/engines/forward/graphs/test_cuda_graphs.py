"""Captured steps: trusted only once they gave another step's logits, and faster."""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rapid.config import SamplingConfig, SpeculationConfig
from rapid.engines.attention.batch import Batch, Feed, RowLists
from rapid.engines.attention.kernel_inputs import Attend, AttentionInputs, Kernels
from rapid.engines.attention.key_tables import KeyTables
from rapid.engines.attention.ragged import attend_by_runs
from rapid.engines.attention.triton_kernel import BlockAttention
from rapid.engines.attention.work_items import BLOCK, ITEM, ROW
from rapid.engines.forward.graphs import cuda_graphs
from rapid.engines.forward.graphs.buckets import Bucket, padding_pages
from rapid.engines.forward.graphs.cuda_graphs import StepGraphs
from rapid.engines.forward.runner import Runner
from rapid.engines.forward.weights.loading import load_model
from rapid.engines.kv.cache import KVCache, PageRun, PageTable
from rapid.engines.kv.rings import RingPool
from rapid.errors import EngineFailed
from rapid.generation import generate
from rapid.planning.ring_sizes import RingPlan
from tests.rapid.tiny_families import family_checkpoint, family_model, reference_of
from tests.rapid.tiny_models import VOCAB, engine_config, loaded, random_prompt, reference_logits

CPU = torch.device("cpu")
PROMPTS = [random_prompt(80, seed).tolist() for seed in (1, 2)]
PAGES = 64
TABLES = [
    PageTable([PageRun(9, 12), PageRun(0, 8), PageRun(40, 52)], 4),
    PageTable([PageRun(20, 31), PageRun(52, 62)], 4),
]
Replay = Callable[[], torch.Tensor]


def attend_by_table(inputs: AttentionInputs) -> torch.Tensor:
    """Compute what `BlockAttention` does, which takes long in the interpreter, row by row."""
    table, sizes = inputs.rows.once("key tables", KeyTables).of(inputs.rows, CPU, inputs.window)
    items = table[: sizes.rows_at].reshape(-1, ITEM)
    listed = table[sizes.rows_at : sizes.blocks_at].reshape(-1, ROW)
    output = torch.zeros_like(inputs.query.transpose(1, 2))
    group = inputs.query.shape[1] // inputs.keys.shape[0]
    for row, position, own, num_own, shared, num_shared in listed.tolist():
        slots: list[int] = []
        for _, _, block, number, _ in items[
            [*range(own, own + num_own), *range(shared, shared + num_shared)]
        ].tolist():
            blocks = table[sizes.blocks_at + BLOCK * block :][: BLOCK * number].reshape(-1, BLOCK)
            for slot, first, count in blocks.tolist():
                slots += range(slot, slot + min(count, max(0, position + 1 - first)))
        keys, values = (
            x[:, slots].repeat_interleave(group, 0) for x in (inputs.keys, inputs.values)
        )
        scores = torch.einsum("hd,hkd->hk", inputs.query[0, :, row], keys) * inputs.scale
        output[0, row] = torch.einsum("hk,hkd->hd", scores.softmax(-1), values)
    return output


class Captures:
    """Runs a function again when it is replayed, as a graph does; counts both."""

    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor] = lambda output: output):
        self.num_captured = self.num_replayed = 0
        self._change = change

    def __call__(self, run: Replay) -> Replay:
        self.num_captured += 1
        run()

        def replay() -> torch.Tensor:
            self.num_replayed += 1
            return self._change(run())

        return replay


@pytest.fixture
def _instant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays take one second, ordinary steps two."""
    seconds = iter([1.0, 2.0] * 100)

    def timed(run: Replay) -> tuple[torch.Tensor, float]:
        return run(), next(seconds)

    monkeypatch.setattr(cuda_graphs, "_time", timed)


def decode(
    capture: cuda_graphs.Capture, steps: range, rows: int = 1, device: torch.device = CPU
) -> None:
    """Feed both prompts, `rows` at a time from token 20 on, and check every logit."""
    feed_all(capture, [{0: rows, 1: rows}] * len(steps), device)


def feed_all(
    capture: cuda_graphs.Capture,
    steps: list[dict[int, int]],
    device: torch.device = CPU,
    captured: Attend | None = None,
    *,
    is_drawn: bool = False,
) -> None:
    """Feed so many rows of each prompt in each step, from token 20 on, and check every logit."""
    kernels = Kernels(attend_by_runs, attend_by_runs, captured or BlockAttention())
    layout = replace(loaded().kv_layout, devices=(device,) * len(loaded().kv_layout.devices))
    cache = KVCache(layout, PAGES + padding_pages(4), page_tokens=4)
    for tensor in itertools.chain(*cache.layers):
        tensor.zero_()  # a graph that is wrong reads what nobody wrote, and that must not overflow
    model = copy.deepcopy(loaded().model).to(device)
    runner = Runner(model, cache, device, loaded().vocab_size, kernels)
    runner.capture_steps(96, capture)
    positions = [20] * len(PROMPTS)
    runner.run([Feed(p[:20], 0, t, 0) for p, t in zip(PROMPTS, TABLES, strict=True)])
    expected = [reference_logits(prompt) for prompt in PROMPTS]
    for step in steps:
        own = {index: slice(positions[index], positions[index] + step[index]) for index in step}
        feeds = [Feed(PROMPTS[i][rows], rows.start, TABLES[i], 1) for i, rows in own.items()]
        if is_drawn:
            drawn = [torch.tensor(feed.token_ids, device=device) for feed in feeds]
            feeds = [replace(f, token_ids=(0,), drawn=d) for f, d in zip(feeds, drawn, strict=True)]
        for got, (index, rows) in zip(runner.run(feeds), own.items(), strict=True):
            torch.testing.assert_close(got.cpu(), expected[index][rows][-1:], atol=1e-4, rtol=0)
            positions[index] = rows.stop


@pytest.mark.usefixtures("_instant")
@pytest.mark.parametrize("rows", [1, 2])
def test_recurring_steps_are_replayed_with_their_own_inputs(rows: int) -> None:
    captures = Captures()
    decode(captures, range(20, 20 + 7 * rows, rows), rows)
    # two ordinary, the captured one, the tried one, three replayed
    assert (captures.num_captured, captures.num_replayed) == (1, 1 + 3)


@pytest.mark.usefixtures("_instant")
def test_a_replayed_step_reads_tokens_that_lie_on_the_device() -> None:
    """Of sequences in any order, with other tokens in their places on the host."""
    captures = Captures()
    feed_all(captures, [{0: 1, 1: 1}] * 4 + [{1: 1, 0: 1}] * 3, is_drawn=True)
    assert (captures.num_captured, captures.num_replayed) == (1, 1 + 3)


@pytest.mark.usefixtures("_instant")
def test_steps_of_several_shapes_share_the_graph_of_their_bucket() -> None:
    captures = Captures()
    # plain rows beside a block, in either order, blocks that differ, and a sequence that is away
    feed_all(captures, [{0: 1, 1: 3}, {0: 2, 1: 2}, {0: 4, 1: 1}, {0: 1, 1: 2}, {1: 2, 0: 1}])
    # two ordinary, the captured one, the tried one, one replayed
    assert (captures.num_captured, captures.num_replayed) == (1, 1 + 1)


@pytest.mark.usefixtures("_instant")
def test_a_short_chunk_beside_a_step_is_replayed_as_well() -> None:
    captures = Captures()
    steps = [{0: 1, 1: 17}] * 3 + [{0: 18, 1: 1}, {0: 17, 1: 1}]
    feed_all(captures, steps, captured=attend_by_table)
    # two ordinary, the captured one, the tried one, one replayed
    assert (captures.num_captured, captures.num_replayed) == (1, 1 + 1)


def test_common_steps_are_captured_before_there_are_any() -> None:
    captures = Captures()
    kernels = Kernels(attend_by_runs, attend_by_runs, attend_by_table)
    cache = KVCache(loaded().kv_layout, PAGES + padding_pages(4), page_tokens=4)
    for tensor in itertools.chain(*cache.layers):
        tensor.zero_()
    runner = Runner(loaded().model, cache, CPU, loaded().vocab_size, kernels)
    runner.capture_steps(64, captures, max_sequences=2)
    assert captures.num_captured == 4
    feeds = [Feed([5], 20, table, 1) for table in TABLES]
    runner.run(feeds)
    assert (captures.num_captured, captures.num_replayed) == (4, cuda_graphs.REPEATS)


@pytest.mark.usefixtures("_instant")
def test_a_graph_that_keeps_old_inputs_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    first: list[torch.Tensor] = []

    def stale(output: torch.Tensor) -> torch.Tensor:
        return first[0]

    def capture(run: Replay) -> Replay:
        first.append(run().clone())
        return captures(run)

    captures = Captures(stale)
    with caplog.at_level(logging.WARNING):
        decode(capture, range(20, 27))
    assert captures.num_replayed == 1
    assert "graph for steps of (2 sequences, 2 rows, at most 1 each) refused" in caplog.text


@pytest.mark.usefixtures("_instant")
def test_a_graph_that_stores_keys_in_old_places_ends_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fill = StepGraphs._fill

    def forgets_the_slots(
        graphs: StepGraphs, graph: cuda_graphs._Graph, rows: RowLists, bucket: Bucket
    ) -> torch.Tensor | None:
        slots = slice(2 * bucket.rows, 3 * bucket.rows)  # behind ids and positions
        before = graph.inputs[slots].clone()
        filled = fill(graphs, graph, rows, bucket)
        graph.inputs[slots] = before
        return filled

    monkeypatch.setattr(StepGraphs, "_fill", forgets_the_slots)
    with pytest.raises(EngineFailed, match=r"2 rows, at most 1 each\) stored keys in wrong places"):
        decode(Captures(), range(20, 24))


def test_a_graph_that_is_not_faster_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "_time", lambda run: (run(), 1.0))
    captures = Captures()
    decode(captures, range(20, 26))
    assert captures.num_replayed == 1


@pytest.mark.usefixtures("_instant")
def test_a_capture_that_fails_leaves_the_steps_ordinary(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails(run: Replay) -> Replay:
        raise RuntimeError("operation not permitted when stream is capturing")

    with caplog.at_level(logging.WARNING):
        decode(fails, range(20, 26))
    assert (
        caplog.text.count(
            "no graph for steps of (2 sequences, 2 rows, at most 1 each), nor others: "
        )
        == 1
    )


def test_after_a_capture_that_failed_there_is_no_other() -> None:
    num_tried = 0

    def fails(run: Replay) -> Replay:
        nonlocal num_tried
        num_tried += 1
        raise RuntimeError("operation not permitted when stream is capturing")

    def forward(batch: Batch) -> torch.Tensor:
        return torch.ones(len(batch.wanted), 3)

    kernels = Kernels(attend_by_runs, attend_by_runs, BlockAttention())
    cache = KVCache(loaded().kv_layout, PAGES + padding_pages(4), page_tokens=4)
    graphs = StepGraphs(forward, cache, CPU, kernels, 64, fails)
    for rows in (1, 2):
        for _ in range(4):
            graphs.run([Feed(PROMPTS[0][:rows], 20, TABLES[0], 1)])
    assert num_tried == 1


def test_a_graph_that_cannot_be_run_leaves_the_steps_ordinary(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def capture(run: Replay) -> Replay:
        def replay() -> torch.Tensor:
            raise RuntimeError("CUDA out of memory")

        return replay

    with caplog.at_level(logging.WARNING):
        decode(capture, range(20, 26))
    assert caplog.text.count("cannot be run: CUDA out of memory") == 1


@pytest.mark.usefixtures("_instant")
def test_a_graph_that_rounds_otherwise_is_refused_but_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stored = cuda_graphs._read_stored
    factors = iter([1.0, 1.05] * 10)
    monkeypatch.setattr(cuda_graphs, "_read_stored", lambda batch: stored(batch) * next(factors))
    captures = Captures()
    with caplog.at_level(logging.WARNING):
        decode(captures, range(20, 26))
    assert captures.num_replayed == 1
    assert "graph for steps of (2 sequences, 2 rows, at most 1 each) refused" in caplog.text


def test_a_capture_is_on_one_stream_of_its_own_which_it_leaves_when_it_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Stream:
        def wait_stream(self, other: Stream) -> None:
            pass

    current = Stream()
    now, ran_on = [current], []
    is_broken = False

    @contextmanager
    def stream(one: Stream) -> Iterator[None]:
        now.append(one)
        yield
        now.append(current)

    @contextmanager
    def graph(_: object, *, stream: Stream, **settings: str) -> Iterator[None]:
        assert settings == {"pool": "pool", "capture_error_mode": "thread_local"}
        now.append(stream)
        yield
        if is_broken:  # torch then leaves the stream as it is
            raise RuntimeError("capture invalidated")
        now.append(current)

    def run() -> torch.Tensor:
        ran_on.append(now[-1])
        return torch.zeros(1)

    fake = SimpleNamespace(
        Stream=Stream, stream=stream, graph=graph, current_stream=lambda: now[-1],
        set_stream=now.append, graph_pool_handle=lambda: "pool",
        CUDAGraph=lambda: SimpleNamespace(replay=lambda: None),
    )  # fmt: skip
    monkeypatch.setattr(cuda_graphs.torch, "cuda", fake)
    capture = cuda_graphs.GraphCapture()
    capture(run)
    capture(run)
    assert len(ran_on) == 6
    assert len(set(ran_on)) == 1
    assert current not in ran_on
    is_broken = True
    with pytest.raises(RuntimeError, match="capture invalidated"):
        capture(run)
    assert now[-1] is current
    assert not cuda_graphs.CAPTURING.locked()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("rows", [1, 2])
def test_a_real_graph_gives_the_logits_of_every_step(
    rows: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        steps = range(20, 20 + 8 * rows, rows)
        decode(cuda_graphs.GraphCapture(), steps, rows, torch.device("cuda:0"))
    assert f"graph for steps of (2 sequences, {2 if rows == 1 else 5} rows" in caplog.text
    assert "refused" not in caplog.text
    assert "no graph" not in caplog.text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_answers_on_a_device_are_those_of_the_cpu() -> None:
    def answer(device: str, *, is_lossless: bool) -> tuple[int, ...]:
        target = load_model(engine_config(device=device))
        drafter, lossless = target if is_lossless else None, SpeculationConfig(eta=0)
        made = generate(
            target,
            drafter,
            *PROMPTS,
            max_tokens=24,
            sampling=SamplingConfig(seed=7),
            speculation=lossless,
        )
        return tuple(made.token_ids)

    plain = answer("cpu", is_lossless=False)
    assert answer("cuda", is_lossless=False) == plain
    assert answer("cuda", is_lossless=True) == plain


@pytest.mark.usefixtures("_instant")
def test_steps_of_a_model_with_rings_are_replayed_as_well() -> None:
    """Beyond its window, where the slots of a ring are used anew."""
    path = family_checkpoint("gemma3_text")
    model = family_model(path)
    plan = RingPlan(window=24, page_tokens=4, max_rows=16, num_rings=2, num_kept=1)
    num_extra = padding_pages(4)
    num_ring_slots = plan.num_tokens + 4 * num_extra
    cache = KVCache(model.kv_layout, 60 + num_extra, 4, num_ring_slots=num_ring_slots)
    for tensor in itertools.chain(*cache.layers):
        tensor.zero_()
    captures, pool = Captures(), RingPool(plan)
    kernels = Kernels(attend_by_runs, attend_by_runs, BlockAttention())
    runner = Runner(model.model, cache, CPU, model.vocab_size, kernels)
    runner.capture_steps(128, captures)
    prompts = [random_prompt(100, seed).tolist() for seed in (1, 2)]
    tables = [PageTable([PageRun(30 * i, 30 * i + 30)], 4) for i in range(2)]
    places = [*zip(prompts, tables, [pool.take(), pool.take()], strict=True)]
    for start in range(0, 80, 16):
        runner.run([Feed(ids[start : start + 16], start, t, 0, ring=r) for ids, t, r in places])
    with torch.no_grad():
        expected = [
            reference_of(path)(torch.tensor([ids]), use_cache=False).logits[0, :, :VOCAB]
            for ids in prompts
        ]
    for position in range(80, 88):
        feeds = [Feed(ids[position : position + 1], position, t, 1, ring=r) for ids, t, r in places]
        for got, want in zip(runner.run(feeds), expected, strict=True):
            torch.testing.assert_close(got[0], want[position], atol=1e-4, rtol=0)
    assert captures.num_replayed == 1 + 4


class CopiesToDevice(TorchDispatchMode):
    """Counts what writes to a tensor that was there before."""

    num_copies = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        self.num_copies += func.overloadpacket in (torch.ops.aten.copy_, torch.ops.aten._to_copy)
        return func(*args, **kwargs or {})


@pytest.mark.usefixtures("_instant")
def test_a_replayed_step_sends_its_inputs_at_once() -> None:
    """Rows, work tables and wanted rows; also of a model whose layers have two windows."""

    def forward(batch: Batch) -> torch.Tensor:
        for window in (None, 8):
            batch.rows.once("key tables", KeyTables).of(batch.rows, CPU, window)
        return torch.ones(len(batch.wanted), 3)

    def capture(run: Replay) -> Replay:
        output = run()
        return lambda: output

    kernels = Kernels(attend_by_runs, attend_by_runs, BlockAttention())
    cache = KVCache(loaded().kv_layout, PAGES + padding_pages(4), page_tokens=4)
    for tensor in itertools.chain(*cache.layers):
        tensor.fill_(1.0)
    graphs = StepGraphs(forward, cache, CPU, kernels, 64, capture)
    counts = []
    for position in range(20, 26):
        feeds = [Feed([5], position, table, 1) for table in TABLES]
        with CopiesToDevice() as counted:
            graphs.run(feeds)
        counts.append(counted.num_copies)
    assert counts[-2:] == [1, 1]


def test_memory_that_is_on_its_way_is_not_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    names = iter("abcd")

    def record_event() -> SimpleNamespace:
        name = next(names)
        return SimpleNamespace(synchronize=lambda: done.append(name))

    stream = SimpleNamespace(record_event=record_event)
    monkeypatch.setattr(cuda_graphs.torch, "cuda", SimpleNamespace(current_stream=lambda _: stream))
    staging, target = cuda_graphs.Staging(CPU), torch.zeros(3, dtype=torch.int32)
    staging._is_pinned = True
    monkeypatch.setattr(
        cuda_graphs.torch, "empty", lambda size, dtype, **_: torch.zeros(size, dtype=dtype)
    )
    taken = []
    for number in range(4):
        taken.append(staging.take(4))
        taken[-1][:] = number
        assert done == ["a", "b"][: max(0, number - 1)]
        staging.send(target)
        assert target.tolist() == [number] * 3
    assert taken[0] is not taken[1]
    assert taken[1][0] == 3
    assert taken[0][0] == 2

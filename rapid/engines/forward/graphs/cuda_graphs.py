"""CUDA graphs of steps, which save the launches of a small model's kernels.

Whatever changes between steps lies in tensors that stay, padded to a bucket's shape
(`buckets` beside it). A bucket's graph is captured when the engine opens or at its third step, and
used if, at the next, it returns the ordinary forward's logits and keys, and is faster.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import numpy as np
import torch

from rapid.engines.attention.batch import Batch, Feed, RowLists, rows_of
from rapid.engines.attention.cuda import CAPTURING
from rapid.engines.attention.kernel_inputs import Kernels
from rapid.engines.attention.key_tables import KeyTables, TableSpace
from rapid.engines.forward.graphs.buckets import (
    CHUNK_ROWS,
    Bucket,
    bucket_of,
    common_buckets,
    example,
    pad_rows,
)
from rapid.engines.kv.cache import KVCache
from rapid.errors import EngineFailed

logger = logging.getLogger(__name__)

STEPS_BEFORE = 2  # ordinary steps of a bucket before its graph is captured
MAX_SHAPES = 40  # buckets that have a graph or were refused one
TOLERANCE = 0.03  # error of logits and stored keys, as a share of their norm
ELSEWHERE = 0.3  # keys that differ by more are those of other rows, which differ by about 1.4
REPEATS = 3  # runs of a graph and of the ordinary forward when they are compared

Forward = Callable[["Batch"], torch.Tensor]
# Runs a function once or more, and returns a function that replays it on the same memory.
Capture = Callable[[Callable[[], torch.Tensor]], Callable[[], torch.Tensor]]


class Staging:
    """Memory on the host from which the inputs of a step go to the device in one copy.

    A copy from pinned memory does not keep the host waiting, so there are two such buffers, and one
    is filled again only after its copy has ended.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_pinned = device.type == "cuda"
        self._buffers = [torch.empty(0, dtype=torch.int32)] * 2
        self._copied: list[Any] = [None, None]  # events
        self._turn = 0

    def take(self, num_ints: int) -> np.ndarray:
        """Return memory for at least so many numbers, int32, to be sent next."""
        self._turn = 1 - self._turn
        if self._copied[self._turn] is not None:
            self._copied[self._turn].synchronize()
        if len(self._buffers[self._turn]) < num_ints:
            made = torch.empty(num_ints, dtype=torch.int32, pin_memory=self._is_pinned)
            self._buffers[self._turn] = made
        return self._buffers[self._turn].numpy()

    def send(self, target: torch.Tensor) -> None:
        """Copy the beginning of the memory that was taken last to a tensor of the device."""
        target.copy_(self._buffers[self._turn][: len(target)], non_blocking=self._is_pinned)
        if self._is_pinned:
            cuda: Any = torch.cuda
            self._copied[self._turn] = cuda.current_stream(self._device).record_event()


class _Graph:
    """A captured step, and the tensor on the device that holds all that changes between steps.

    The tensor begins with the ids, positions, slots and wanted rows of the padded step, in int64,
    and the places of its own wanted rows among those; the work tables follow.
    """

    replay: Callable[[], torch.Tensor]  # runs the captured step and returns the logits of all rows

    def __init__(self, rows: RowLists, space: TableSpace, device: torch.device) -> None:
        self._space = space
        self._num_rows = len(rows.wanted)
        memory = torch.zeros(space.num_ints, dtype=torch.int32, device=device)
        packed = rows.pack()
        own = memory[: 2 * (len(packed) + self._num_rows)].view(torch.int64)
        self.inputs, self._wanted = own[: len(packed)], own[len(packed) :]
        self.inputs.copy_(packed)
        self.memory = memory
        self.tables = space.tables(memory)
        # Whether the graph was found correct and faster than the ordinary forward.
        self.is_trusted = False

    def fill(self, rows: RowLists, wanted: list[int], staging: Staging) -> torch.Tensor | None:
        """Take a padded step's inputs; return its own wanted rows, None if its tables are long."""
        memory = staging.take(len(self.memory))
        stop = self._space.fill(memory[: len(self.memory)], [rows.segments, rows.ring_segments])
        if stop is None:
            return None
        packed = [*rows.list_all(), *wanted]
        memory[: 2 * len(packed)].view(np.int64)[:] = packed
        staging.send(self.memory[:stop])
        return self._wanted[: len(wanted)]


class StepGraphs:
    """Runner of steps that replays a graph where one was found correct and faster."""

    def __init__(
        self,
        forward: Forward,
        cache: KVCache,
        device: torch.device,
        kernels: Kernels,
        max_context: int,
        capture: Capture,
        agreed: Callable[[bool], bool] = bool,
    ) -> None:
        """Start without any graph.

        Args:
            forward: function that returns the logits of a batch's wanted rows, [num_wanted, vocab].
            cache: KV cache, whose last `CHUNK_ROWS` slots are padding's, also those of rings.
            kernels: attention kernels, with one that can be captured.
            max_context: tokens of the longest sequence.
            capture: a `GraphCapture`, or a stand-in where there is no CUDA.
            agreed: returns whether all ranks of the model claim what this one does; every rank
                calls it at the same steps.
        """
        assert kernels.captured is not None
        self._forward = forward
        self._cache = cache
        self._device = device
        self._ordinary = kernels
        self._kernels = Kernels(kernels.captured, kernels.captured, kernels.captured)
        has_rings = cache.num_ring_slots > 0
        self._padding = (
            cache.num_slots - CHUNK_ROWS,
            cache.num_ring_slots - CHUNK_ROWS if has_rings else None,
        )
        self._max_context = max_context
        self._capture = capture
        self._staging = Staging(device)
        self._agreed = agreed  # a graph holds all ranks' collectives, so all replay it or none does
        self._num_seen: dict[Bucket, int] = {}
        self._graphs: dict[Bucket, _Graph | None] = {}
        self._may_capture = True

    def capture_common(self, max_sequences: int) -> None:
        """Capture the graphs of steps that are likely to be asked for."""
        for bucket in common_buckets(max_sequences):
            if self._may_capture:
                self._capture_bucket(bucket)

    def run(self, feeds: Sequence[Feed]) -> torch.Tensor:
        """Return the logits of the wanted rows, as `forward` does, [num_wanted, vocab]."""
        rows = rows_of(feeds)
        # Rows that are computed for a ring alone share one slot, where nothing can be compared.
        is_ordinary = bool(rows.wanted) and all(feed.scratch is None for feed in feeds)
        bucket = bucket_of(rows.segments) if is_ordinary else None
        if bucket is None or (bucket not in self._graphs and len(self._graphs) == MAX_SHAPES):
            return self._forward(self._batch(rows))
        if bucket not in self._graphs:
            self._num_seen[bucket] = self._num_seen.get(bucket, 0) + 1
            if self._may_capture and self._num_seen[bucket] > STEPS_BEFORE:
                self._capture_bucket(bucket)
            return self._forward(self._batch(rows))
        graph = self._graphs[bucket]
        wanted = None if graph is None else self._fill(graph, rows, bucket)
        if graph is None or wanted is None:
            return self._forward(self._batch(rows))
        if not graph.is_trusted:
            return self._try(graph, wanted, self._batch(rows), bucket)
        return graph.replay()[wanted]

    def _batch(self, rows: RowLists) -> Batch:
        return rows.batch(rows.pack().to(self._device), self._cache, self._ordinary)

    def _capture_bucket(self, bucket: Bucket) -> None:
        """Capture a graph; after a capture that failed, on any rank, no other is tried."""
        graph = self._build_graph(bucket)
        self._may_capture = self._agreed(graph is not None)
        self._graphs[bucket] = graph if self._may_capture else None

    def _build_graph(self, bucket: Bucket) -> _Graph | None:
        rows = example(bucket, *self._padding)
        packed = rows.pack().to(self._device)
        try:
            with on_device_of(packed):
                found = [KeyTables(is_example=True), KeyTables(is_example=True)]
                # Every layer asks for its table.
                self._forward(self._batch_with(rows, packed, found))
                start = 2 * (len(packed) + len(rows.wanted))
                space = TableSpace(found, bucket.sequences, start, self._max_context)
                graph = _Graph(rows, space, self._device)
                batch = self._batch_with(rows, graph.inputs, graph.tables)
                graph.replay = self._capture(lambda: self._forward(batch))
                return graph
        except Exception as cause:  # would stop all captures: a sync in the model, no memory
            logger.warning("no graph for steps of %s, nor others: %s", bucket, cause)
            return None

    def _batch_with(
        self, rows: RowLists, packed: torch.Tensor, tables: Sequence[KeyTables]
    ) -> Batch:
        """Return a batch whose layers find their work tables in those of the pages and rings."""
        batch = rows.batch(packed, self._cache, self._kernels)
        for part, own in zip((batch.rows, batch.rows.rings), tables, strict=False):
            if part is not None:
                part.memo["key tables"] = own
        return batch

    def _fill(self, graph: _Graph, rows: RowLists, bucket: Bucket) -> torch.Tensor | None:
        """Copy a step's padded inputs to the graph's; return its wanted rows, None if too long."""
        there = graph.fill(*pad_rows(rows, bucket, *self._padding), self._staging)
        if there is not None and rows.drawn:  # each is a wanted row, and ids come first
            graph.inputs[there] = torch.cat(rows.drawn)
        return there

    def _try(
        self, graph: _Graph, wanted: torch.Tensor, batch: Batch, bucket: Bucket
    ) -> torch.Tensor:
        """Compare a graph with the ordinary forward on a step; trust it if correct and faster.

        Raises:
            EngineFailed: the graph stored keys in wrong slots, so the KV cannot be relied on.
        """
        self._graphs[bucket] = None
        try:
            replayed, replay_s = _time(lambda: graph.replay()[wanted])
        except Exception as cause:  # for instance, no memory to upload it
            logger.warning("graph for steps of %s cannot be run: %s", bucket, cause)
            self._agreed(False)
            return self._forward(batch)
        stored = _read_stored(batch)
        logits, ordinary_s = _time(lambda: self._forward(batch))
        error = _difference(replayed, logits)
        found = f"{error:.1e} from the ordinary step, {1e3 * replay_s:.2f} ms against "
        found += f"{1e3 * ordinary_s:.2f} ms"
        misplaced = _difference(stored, _read_stored(batch))
        if not misplaced <= ELSEWHERE:
            raise EngineFailed(f"a graph for steps of {bucket} stored keys in wrong places")
        is_correct = max(error, misplaced) <= TOLERANCE
        if not is_correct:
            logger.warning("graph for steps of %s refused: %s", bucket, found)
        elif replay_s >= ordinary_s:
            logger.info("graph for steps of %s does not pay: %s", bucket, found)
        else:
            logger.info("graph for steps of %s: %s", bucket, found)
        if self._agreed(is_correct and replay_s < ordinary_s):
            graph.is_trusted = True
            self._graphs[bucket] = graph
        return logits


def _time(run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, float]:
    """Call `run` several times; return the last result and the seconds of the fastest call."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        result = run()
        float(result[-1, -1])  # waits for the device
        times.append(time.perf_counter() - start)
    return result, min(times)


def _read_stored(batch: Batch) -> torch.Tensor:
    """Return the keys and values of the last layer in the slots of the batch's rows."""
    layers = batch.rows.cache.layers
    slots = batch.rows.of_layer(len(layers) - 1).slots
    return torch.stack([tensor[:, slots] for tensor in layers[-1]])


def _difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the relative error of `found`, ``|found - wanted| / |wanted|``; NaN if any is NaN."""
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


def on_device_of(tensor: torch.Tensor) -> AbstractContextManager[None]:
    """Return a context in which a tensor's CUDA device is current; off CUDA it does nothing."""
    cuda: Any = torch.cuda
    return cast(AbstractContextManager[None], cuda.device_of(tensor))


class GraphCapture:
    """A `Capture` on the current CUDA device, during which other threads may keep computing."""

    # Graphs run one at a time, and the result of one is read before the next runs, so they share
    # one pool of memory. A pool belongs to the stream it was captured on, and libraries keep a
    # workspace for each stream that they see, so every capture uses the same separate stream.
    def __init__(self) -> None:
        self._pool: Any = None
        self._side: Any = None

    def __call__(self, run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Capture a function and return one that replays it."""
        cuda: Any = torch.cuda
        with CAPTURING:
            self._pool = self._pool or cuda.graph_pool_handle()
            side = self._side = self._side or cuda.Stream()
            current = cuda.current_stream()
            side.wait_stream(current)
            graph = cuda.CUDAGraph()
            settings = {"pool": self._pool, "stream": side, "capture_error_mode": "thread_local"}
            try:
                with cuda.stream(side):  # compiles kernels and lets libraries allocate before
                    run()
                    run()
                current.wait_stream(side)
                with cuda.graph(graph, **settings):
                    output = run()
            finally:  # a capture that fails leaves its stream as the current one
                cuda.set_stream(current)

        def replay() -> torch.Tensor:
            graph.replay()
            return output

        return replay

"""CUDA graphs of steps of a recurring shape: one launch instead of some hundred.

A step of a small model is bound by launching its kernels, not by the bytes it reads. A graph
launches them at once, but with the addresses and shapes it was captured with. So what changes
between steps lies in tensors that stay (ids, positions, slots, the table of keys), and the
attention kernel must read nothing else (`Kernels.captured`).

The ordinary forward is the specification. A graph is captured from the third step of its shape and
tried on the next one, whose inputs differ from those it was captured with: it must return that
step's logits, store its keys, and be faster. Otherwise the shape stays with the ordinary forward
for good, and the log says why; after a capture that failed, no other shape is captured either.
Nothing is padded: a shape is (sequences, rows of each).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch

from rapid.engines.attention.cuda import CAPTURING
from rapid.engines.attention.key_tables import KeyTables
from rapid.engines.attention.rows import Kernels, RaggedRows
from rapid.errors import EngineFailed

if TYPE_CHECKING:
    from rapid.engines.attention.batch import Batch

logger = logging.getLogger(__name__)

STEPS_BEFORE = 2  # ordinary steps of a shape before its graph is captured
MAX_SHAPES = 32  # shapes that have a graph or were refused one
TOLERANCE = 0.03  # error of logits and stored keys, as a share of their norm
ELSEWHERE = 0.3  # keys that differ by more are those of other rows, which differ by about 1.4
REPEATS = 3  # runs of a graph and of the ordinary forward when they are compared


Shape = tuple[int, int]  # sequences, rows of each
Forward = Callable[["Batch"], torch.Tensor]
# Runs a function once or more, and returns a function that replays it on the same memory.
Capture = Callable[[Callable[[], torch.Tensor]], Callable[[], torch.Tensor]]


@dataclass(slots=True)
class _Graph:
    """A captured step.

    Attributes:
        inputs: batch in the memory that the graph reads.
        tables: tables of keys in the memory that the graph reads.
        replay: function that runs the graph and returns the logits of all rows.
        is_trusted: whether the graph was found correct and faster than the ordinary forward.
    """

    inputs: Batch
    tables: KeyTables
    replay: Callable[[], torch.Tensor]
    is_trusted: bool = False


class StepGraphs:
    """Runner of steps that replays a graph where one was found correct and faster."""

    def __init__(
        self,
        forward: Forward,
        kernels: Kernels,
        max_context: int,
        capture: Capture,
        agreed: Callable[[bool], bool] = bool,
    ) -> None:
        """Start without any graph.

        Args:
            forward: function that returns the logits of a batch's wanted rows, [num_wanted, vocab].
            kernels: attention kernels, with one that can be captured.
            max_context: tokens of the longest sequence.
            capture: a `GraphCapture`, or a stand-in where there is no CUDA.
            agreed: returns whether all ranks of the model claim what this one does; every rank
                calls it at the same steps. A graph holds their collectives, so all replay it or
                none does.
        """
        assert kernels.captured is not None
        self._forward = forward
        self._kernels = Kernels(kernels.captured, kernels.captured, kernels.captured)
        self._max_context = max_context
        self._capture = capture
        self._agreed = agreed
        self._num_seen: dict[Shape, int] = {}
        self._graphs: dict[Shape, _Graph | None] = {}
        self._may_capture = True

    def run(self, batch: Batch) -> torch.Tensor:
        """Return the logits of the wanted rows, as `forward` does, [num_wanted, vocab]."""
        shape = shape_of(batch)
        if shape is None or (shape not in self._graphs and len(self._graphs) == MAX_SHAPES):
            return self._forward(batch)
        if shape not in self._graphs:
            self._num_seen[shape] = self._num_seen.get(shape, 0) + 1
            if self._may_capture and self._num_seen[shape] > STEPS_BEFORE:
                self._capture_shape(batch, shape)
            return self._forward(batch)
        graph = self._graphs[shape]
        if graph is None or not self._fill(graph, batch):
            return self._forward(batch)
        if not graph.is_trusted:
            return self._try(graph, batch, shape)
        return graph.replay()[batch.wanted]

    def _capture_shape(self, batch: Batch, shape: Shape) -> None:
        """Capture a graph; after a capture that failed, on any rank, no other is tried."""
        graph = self._captured(batch, shape)
        self._may_capture = self._agreed(graph is not None)
        self._graphs[shape] = graph if self._may_capture else None

    def _captured(self, batch: Batch, shape: Shape) -> _Graph | None:
        rows = batch.rows
        tables = KeyTables(self._max_context)
        inputs = replace(
            batch,
            input_ids=batch.input_ids.clone(),
            position_ids=batch.position_ids.clone(),
            wanted=torch.arange(batch.input_ids.shape[1], device=batch.input_ids.device),
            rows=RaggedRows(
                rows.cache,
                rows.segments,
                rows.slots.clone(),
                self._kernels,
                {"key tables": tables},
            ),
        )
        try:
            with on_device_of(batch.input_ids):
                return _Graph(inputs, tables, self._capture(lambda: self._forward(inputs)))
        except Exception as cause:  # would stop all captures: a sync in the model, no memory
            logger.warning("no graph for steps of shape %s, nor others: %s", shape, cause)
            return None

    def _fill(self, graph: _Graph, batch: Batch) -> bool:
        """Copy a step's inputs to the graph's; return False if its keys are in too many blocks."""
        if not graph.tables.refill(batch.rows.segments):
            return False
        graph.inputs.input_ids.copy_(batch.input_ids)
        graph.inputs.position_ids.copy_(batch.position_ids)
        graph.inputs.rows.slots.copy_(batch.rows.slots)
        return True

    def _try(self, graph: _Graph, batch: Batch, shape: Shape) -> torch.Tensor:
        """Compare the graph with the ordinary forward on a step it was not captured with.

        The graph is trusted if it is correct and faster, else dropped.

        Returns:
            The logits of the ordinary forward, [num_wanted, vocab].

        Raises:
            EngineFailed: the graph stored keys in wrong slots, so the KV cannot be relied on.
        """
        self._graphs[shape] = None
        try:
            replayed, replay_s = _timed(lambda: graph.replay()[batch.wanted])
        except Exception as cause:  # for instance, no memory to upload it
            logger.warning("graph for steps of shape %s cannot be run: %s", shape, cause)
            self._agreed(False)
            return self._forward(batch)
        stored = _stored(batch)
        logits, ordinary_s = _timed(lambda: self._forward(batch))
        error = _difference(replayed, logits)
        found = f"{error:.1e} from the ordinary step, {1e3 * replay_s:.2f} ms against "
        found += f"{1e3 * ordinary_s:.2f} ms"
        misplaced = _difference(stored, _stored(batch))
        if not misplaced <= ELSEWHERE:
            raise EngineFailed(f"a graph for steps of shape {shape} stored keys in wrong places")
        is_correct = max(error, misplaced) <= TOLERANCE
        if not is_correct:
            logger.warning("graph for steps of shape %s refused: %s", shape, found)
        elif replay_s >= ordinary_s:
            logger.info("graph for steps of shape %s does not pay: %s", shape, found)
        else:
            logger.info("graph for steps of shape %s: %s", shape, found)
        if self._agreed(is_correct and replay_s < ordinary_s):
            graph.is_trusted = True
            self._graphs[shape] = graph
        return logits


def _timed(run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, float]:
    """Call `run` several times; return the last result and the seconds of the fastest call."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        result = run()
        float(result[-1, -1])  # waits for the device
        times.append(time.perf_counter() - start)
    return result, min(times)


def _stored(batch: Batch) -> torch.Tensor:
    """Return the keys and values of the last layer in the slots of the batch's rows."""
    return torch.stack([tensor[:, batch.rows.slots] for tensor in batch.rows.cache.layers[-1]])


def _difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the relative error of `found`, ``|found - wanted| / |wanted|``; NaN if any is NaN."""
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


def on_device_of(tensor: torch.Tensor) -> AbstractContextManager[None]:
    """Return a context in which a tensor's CUDA device is current; off CUDA it does nothing."""
    cuda: Any = torch.cuda
    return cast(AbstractContextManager[None], cuda.device_of(tensor))


def shape_of(batch: Batch) -> Shape | None:
    """Return the number of sequences and the rows of each.

    Return None if the sequences differ in rows, are prefill chunks, or want no logits.
    """
    segments = batch.rows.segments
    lengths = {segment.stop - segment.start for segment in segments}
    if len(lengths) > 1 or not segments[0].is_step or not len(batch.wanted):
        return None
    return len(segments), lengths.pop()


class GraphCapture:
    """A `Capture` on the current CUDA device, during which other threads may keep computing.

    Its graphs share one pool of memory: they run one at a time, and the result of one is read
    before the next runs.
    """

    def __init__(self) -> None:
        self._pool: Any = None
        self._side: Any = None

    def __call__(self, run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Capture a function and return one that replays it.

        Every capture uses the same separate stream: libraries keep a workspace for each stream that
        they see, and a pool belongs to the stream it was captured on.
        """
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

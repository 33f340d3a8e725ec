"""Steps of a recurring shape as captured CUDA graphs: one launch instead of some hundred.

A small model's step is bound by launching its kernels, not by its bytes. A graph launches them at
once, but with the addresses and shapes it was captured with. So what changes between steps lies in
tensors that stay (ids, positions, slots, the table of keys) and attention must be one that reads
nothing else (`Kernels.captured`).

The ordinary forward stays the specification. A graph is captured from the third step of its shape
and tried on the next one, with inputs other than those it was captured with: it must give that
step's logits and store its keys, and be faster. Else its shape stays ordinary, for good (no
other shape is captured either, after a capture that failed), and the
log says why. Nothing is padded: a shape is (sequences, rows of each).
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
from rapid.engines.attention.rows import Kernels, RaggedRows
from rapid.errors import EngineFailed

if TYPE_CHECKING:
    from rapid.engines.attention.batch import Batch

logger = logging.getLogger(__name__)

STEPS_BEFORE = 2  # ordinary steps of a shape before it is worth a graph
MAX_SHAPES = 32  # that have a graph or were refused one
TOLERANCE = 0.03  # of logits and stored keys, as a share of their norm
ELSEWHERE = 0.3  # stored keys that differ by more were not stored there: others' cost about 1.4
REPEATS = 3  # of both, when they are compared


Shape = tuple[int, int]  # sequences, rows of each
Forward = Callable[["Batch"], torch.Tensor]
# Runs a function once or more, and returns what runs it again: same memory, new content.
Capture = Callable[[Callable[[], torch.Tensor]], Callable[[], torch.Tensor]]


@dataclass(slots=True)
class _Graph:
    """A captured step: inputs that stay, and what replays it."""

    inputs: Batch
    table: torch.Tensor
    replay: Callable[[], torch.Tensor]
    is_trusted: bool = False


class StepGraphs:
    """Runs steps, by a graph where one was found right and fast."""

    def __init__(
        self,
        forward: Forward,
        kernels: Kernels,
        max_context: int,
        capture: Capture,
    ) -> None:
        """Remember how to run a step.

        Args:
            forward: logits of the wanted rows of a batch [num_wanted, vocab].
            kernels: with an attention that can be captured.
            max_context: longest sequence.
            capture: a `GraphCapture`, or a stand-in where there is no CUDA.
        """
        assert kernels.captured is not None
        self._forward = forward
        self._kernels = Kernels(kernels.captured, kernels.captured, kernels.captured)
        self._max_context = max_context
        self._capture = capture
        self._num_seen: dict[Shape, int] = {}
        self._graphs: dict[Shape, _Graph | None] = {}
        self._may_capture = True

    def run(self, batch: Batch) -> torch.Tensor:
        """Logits of the wanted rows, as `forward` gives them [num_wanted, vocab]."""
        shape = shape_of(batch)
        if shape is None or (shape not in self._graphs and len(self._graphs) == MAX_SHAPES):
            return self._forward(batch)
        if shape not in self._graphs:
            self._num_seen[shape] = self._num_seen.get(shape, 0) + 1
            if self._may_capture and self._num_seen[shape] > STEPS_BEFORE:
                self._graphs[shape] = self._captured(batch, shape)
            return self._forward(batch)
        graph = self._graphs[shape]
        if graph is None or not self._fill(graph, batch):
            return self._forward(batch)
        if not graph.is_trusted:
            return self._try(graph, batch, shape)
        return graph.replay()[batch.wanted]

    def _captured(self, batch: Batch, shape: Shape) -> _Graph | None:
        rows = batch.rows
        table = self._table(rows)
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
                {("key table", table.device): table},
            ),
        )
        try:
            with on_device_of(batch.input_ids):
                return _Graph(inputs, table, self._capture(lambda: self._forward(inputs)))
        except Exception as cause:  # what stops one stops all: a sync in the model, no memory
            logger.warning("no graph for steps of shape %s, nor others: %s", shape, cause)
            self._may_capture = False
            return None

    def _fill(self, graph: _Graph, batch: Batch) -> bool:
        """Put a step in the place of the last one; False when its keys are in too many pieces."""
        try:
            table = self._table(batch.rows)
        except ValueError:
            return False
        graph.table.copy_(table)
        graph.inputs.input_ids.copy_(batch.input_ids)
        graph.inputs.position_ids.copy_(batch.position_ids)
        graph.inputs.rows.slots.copy_(batch.rows.slots)
        return True

    def _table(self, rows: RaggedRows) -> torch.Tensor:
        from rapid.engines.attention.triton_kernel import BLOCK_KEYS, key_table

        room = self._max_context // BLOCK_KEYS * 5 // 4 + 64  # the ends of runs are blocks, too
        keys, _ = rows.cache.layers[0]
        return torch.from_numpy(key_table(rows.segments, room)).to(keys.device)

    def _try(self, graph: _Graph, batch: Batch, shape: Shape) -> torch.Tensor:
        """Compare with the specification on a step that the graph was not captured with.

        Raises:
            EngineFailed: the graph wrote elsewhere than it should; the KV is in doubt.
        """
        self._graphs[shape] = None
        try:
            replayed, replay_s = _timed(lambda: graph.replay()[batch.wanted])
        except Exception as cause:  # no memory to upload it, say
            logger.warning("graph for steps of shape %s cannot be run: %s", shape, cause)
            return self._forward(batch)
        stored = _stored(batch)
        logits, ordinary_s = _timed(lambda: self._forward(batch))
        error = _difference(replayed, logits)
        found = f"{error:.1e} from the ordinary step, {1e3 * replay_s:.2f} ms against "
        found += f"{1e3 * ordinary_s:.2f} ms"
        misplaced = _difference(stored, _stored(batch))
        if not misplaced <= ELSEWHERE:
            raise EngineFailed(f"a graph for steps of shape {shape} stored keys in wrong places")
        if not max(error, misplaced) <= TOLERANCE:
            logger.warning("graph for steps of shape %s refused: %s", shape, found)
        elif replay_s >= ordinary_s:
            logger.info("graph for steps of shape %s does not pay: %s", shape, found)
        else:
            logger.info("graph for steps of shape %s: %s", shape, found)
            graph.is_trusted = True
            self._graphs[shape] = graph
        return logits


def _timed(run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, float]:
    """The result of the last run, and the seconds of the fastest; a step may be repeated."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        result = run()
        float(result[-1, -1])  # waits for the device
        times.append(time.perf_counter() - start)
    return result, min(times)


def _stored(batch: Batch) -> torch.Tensor:
    """Keys and values of the rows in the last layer, where the batch has its slots."""
    return torch.stack([tensor[:, batch.rows.slots] for tensor in batch.rows.cache.layers[-1]])


def _difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """As a share of what is wanted; NaN where either is."""
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


def on_device_of(tensor: torch.Tensor) -> AbstractContextManager[None]:
    """The CUDA device of a tensor as the current one; elsewhere nothing."""
    cuda: Any = torch.cuda
    return cast(AbstractContextManager[None], cuda.device_of(tensor))


def shape_of(batch: Batch) -> Shape | None:
    """Sequences and rows of each; None when they differ, are no steps or want no logits."""
    segments = batch.rows.segments
    lengths = {segment.stop - segment.start for segment in segments}
    if len(lengths) > 1 or not segments[0].is_step or not len(batch.wanted):
        return None
    return len(segments), lengths.pop()


class GraphCapture:
    """`Capture` on the current CUDA device; other threads may go on computing meanwhile.

    Its graphs share one pool of memory: they run one at a time, and what one returns is taken
    before the next.
    """

    def __init__(self) -> None:
        self._pool: Any = None
        self._side: Any = None

    def __call__(self, run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Capture.

        On a stream of its own, always the same: libraries keep a workspace for each that they see,
        and a pool belongs to the stream it was captured on.
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
                with cuda.stream(side):  # kernels compile, libraries allocate before the capture
                    run()
                    run()
                current.wait_stream(side)
                with cuda.graph(graph, **settings):
                    output = run()
            finally:  # a capture that fails leaves its stream the current one
                cuda.set_stream(current)

        def replay() -> torch.Tensor:
            graph.replay()
            return output

        return replay

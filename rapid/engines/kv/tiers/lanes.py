"""Copies of pages between the tiers: in the compute thread, or on a CUDA stream of their own.

A copy is **launched** first and has **landed** later: until then only the lane writes to its ends.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from typing_extensions import override

from rapid.checkpoints.memory import STAGED_BYTES

logger = logging.getLogger(__name__)

Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""What to read and to write, both [pages, layers, 2, kv_heads, page_tokens, head_dim]."""


class Mark(Protocol):
    """A point in the lane's order of copies."""

    def is_reached(self) -> bool:
        """Return whether everything before it has landed, without waiting for it."""

    @property
    def seconds(self) -> float:
        """Duration of the launch's copies, once it is reached."""

    def hold_back(self) -> None:
        """Let what is launched on the device from now on begin after it."""


class Lane:
    """Copies in the calling thread, which have landed when `launch` returns."""

    def launch(self, pairs: Pairs) -> Mark:
        """Begin to copy the first block of each pair into the second."""
        began = time.perf_counter()
        for source, destination in pairs:
            destination.copy_(source)
        return Landed(time.perf_counter() - began)

    def wait(self) -> None:
        """Wait until everything launched has landed, also what `launch` could not finish."""


@dataclass(eq=False, slots=True)
class Landed:
    """The mark of copies that are made."""

    seconds: float = 0.0

    def is_reached(self) -> bool:
        """Return True."""
        return True

    def hold_back(self) -> None:
        """Do nothing."""


class StreamLane(Lane):
    """Copies on a CUDA stream of their own, beside the forwards."""

    def __init__(self, device: torch.device, block: torch.Tensor) -> None:
        """Allocate the buffer for blocks like that of one page in host memory."""
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # A page's layers, keys and values lie together in host memory, and apart in the pool.
        self._num_staged = max(STAGED_BYTES // block.nbytes, 1)
        shape = (self._num_staged, *block.shape[1:])
        self._staged = torch.empty(shape, dtype=block.dtype, device=device)

    @override
    def launch(self, pairs: Pairs) -> Mark:
        mark = _StreamMark(self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))  # forwards so far
        with torch.cuda.stream(self._stream):
            mark.began.record()
            for source, destination in pairs:
                for start in range(0, len(source), self._num_staged):
                    part = slice(start, min(start + self._num_staged, len(source)))
                    staged = self._staged[: part.stop - part.start]
                    staged.copy_(source[part], non_blocking=True)
                    destination[part].copy_(staged, non_blocking=True)
            mark.ended.record()
        return mark

    @override
    def wait(self) -> None:
        self._stream.synchronize()


class _StreamMark:
    """A mark on a CUDA stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.began: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self.ended: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def is_reached(self) -> bool:
        return bool(self.ended.query())

    @property
    def seconds(self) -> float:
        return float(self.began.elapsed_time(self.ended)) / 1e3

    def hold_back(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self.ended)


def lane_for(devices: set[torch.device], block: torch.Tensor) -> Lane:
    """Return the lane between a pool's devices and host memory, of which one page is `block`."""
    (device, *others) = devices
    return Lane() if others or device.type != "cuda" else StreamLane(device, block)


def pin(tensor: torch.Tensor, owner: object) -> None:
    """Lock a tensor's memory, while its owner lives, so that a device copies it by itself."""
    # torch's own pinned memory takes the next power of two: too much of a host's memory.
    cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    error = int(cudart.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0))
    if error:
        logger.warning(
            "host_cache_tokens: the memory could not be pinned (CUDA error %d), so copies from and "
            "to it are slow and delay the engine's steps: raise the limit on locked memory "
            "(ulimit -l), or lower host_cache_tokens",
            error,
        )
        return
    ending = weakref.finalize(owner, cudart.cudaHostUnregister, tensor.data_ptr())
    ending.atexit = False  # the end of the process frees it as well

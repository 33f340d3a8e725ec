"""Collectives between the processes that compute one model together (tensor parallelism).

A layer has two sums over all ranks, after attention and after the MLP (Shoeybi et al.,
"Megatron-LM", arXiv 1909.08053, section 3).
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from rapid.engines.forward.sharding.meeting import Meeting, distributed
from rapid.errors import EngineFailed

TIMEOUT_S = 120.0  # for a rank that does not come; with gloo, one that dies is noticed at once
_TIMEOUT = timedelta(seconds=TIMEOUT_S)


class Group:
    """The processes of one replica, connected; every call must be made by all of them, in order."""

    def __init__(self, meeting: Meeting, rank: int, size: int, device: torch.device) -> None:
        """Meet the other ranks, through NCCL on CUDA and gloo on a CPU.

        Raises:
            RuntimeError: Not all ranks came in time.
        """
        self.rank, self.size = rank, size  # rank 0 schedules, samples and answers
        self._num_launched = 0
        store = meeting.store(size, _TIMEOUT)
        agreements = distributed.PrefixStore("agreements", store)
        sums = distributed.PrefixStore("sums", store)
        self._beside = _gloo(agreements, rank, size, meeting)
        if device.type == "cuda":
            self._backend = _nccl(sums, rank, size)
        else:
            self._backend = _gloo(sums, rank, size, meeting)
        self.sum(torch.zeros(1, device=device)).item()  # NCCL connects at the first collective

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Replace a tensor by its sum over all ranks, and return it."""
        self._num_launched += 1
        self._backend.allreduce([tensor]).wait()
        return tensor

    def gather(self, columns: torch.Tensor) -> torch.Tensor:
        """Return the columns of all ranks side by side, [rows, size * columns]."""
        columns = columns.contiguous()
        num_rows, num_columns = columns.shape
        parts = columns.new_empty(self.size * num_rows, num_columns)
        if num_rows:
            self._num_launched += 1
            self._backend._allgather_base(parts, columns).wait()
        by_row = parts.view(self.size, num_rows, num_columns).transpose(0, 1)
        return by_row.reshape(num_rows, self.size * num_columns)

    def share_first(self, tensor: torch.Tensor) -> torch.Tensor:
        """Replace a tensor by that of the first rank, and return it."""
        self._num_launched += 1
        options = distributed.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self._backend.broadcast([tensor], options).wait()
        return tensor

    def all(self, claim: bool) -> bool:
        """Return whether every rank claims it, such as that a graph is correct and faster.

        Raises:
            EngineFailed: The ranks are out of step: one has failed alone.
        """
        # What is found by timing may differ between ranks, and those that then take different ways
        # would wait for each other for ever.
        launched = self._num_launched
        said = torch.tensor([not claim, launched, -launched], dtype=torch.int64)
        options = distributed.AllreduceOptions()
        options.reduceOp = distributed.ReduceOp.MAX
        self._beside.allreduce([said], options).wait()
        is_denied, most, least = said.tolist()
        if most != -least:
            raise EngineFailed("a part of the model failed alone: its ranks are out of step")
        return not is_denied


# Backends of torch that belong to nobody else, unlike its process-wide groups.


def _nccl(store: Any, rank: int, size: int) -> Any:
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = _TIMEOUT
    return distributed.ProcessGroupNCCL(store, rank, size, options)


def _gloo(store: Any, rank: int, size: int, meeting: Meeting) -> Any:
    gloo = distributed.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = _TIMEOUT
    options._devices = [meeting.device()]
    return gloo(store, rank, size, options)

"""Failures that an engine cannot survive."""

from __future__ import annotations

import re

import torch

# Messages of errors of CUDA, its driver, Triton, cuBLAS, cuDNN and NCCL, raised as RuntimeError.
_OF_THE_DEVICE = re.compile(
    r"CUDA (driver )?error|Triton Error \[CUDA\]|CUBLAS_|CUDNN_|cuDNN error|NCCL error"
)


def is_of_the_device(error: BaseException | None) -> bool:
    """Return whether an error, or one that caused it, leaves its device unusable."""
    # After an illegal memory access, for example, every later call on the same context fails.
    # Running out of memory leaves the device as it was.
    while error is not None and not isinstance(error, torch.OutOfMemoryError):
        if isinstance(error, torch.AcceleratorError):
            return True
        if isinstance(error, RuntimeError) and _OF_THE_DEVICE.search(str(error)):
            return True
        error = error.__cause__
    return False

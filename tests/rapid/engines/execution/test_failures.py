"""Which errors of a step are the device's, after which nothing runs on it."""

from __future__ import annotations

import pytest
import torch

from rapid.engines.execution.failures import is_of_the_device

ILLEGAL = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


def caused_by(cause: Exception) -> Exception:
    error = ValueError("the copy failed")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "is_the_devices"),
    [
        (ILLEGAL, True),
        (caused_by(ILLEGAL), True),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling"),
            True,
        ),
        (RuntimeError("CUDA driver error: unspecified launch failure"), True),
        (RuntimeError("Triton Error [CUDA]: device-side assert triggered"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), True),
        (RuntimeError("NCCL error in: ProcessGroupNCCL.cpp:3356, unhandled cuda error"), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), False),
        (torch.OutOfMemoryError("CUDA error: out of memory"), False),
        (RuntimeError("Expected all tensors to be on the same device, but found cuda:0"), False),
        (ValueError("CUDA error"), False),
        (KeyError(7), False),
    ],
)
def test_an_error_is_told_from_that_of_its_device(error: Exception, is_the_devices: bool) -> None:
    assert is_of_the_device(error) == is_the_devices

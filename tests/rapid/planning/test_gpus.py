"""GPUs by the names that people write, and what their numbers may be."""

from __future__ import annotations

import pytest

from rapid.errors import ConfigurationError
from rapid.planning.gpus import GPUS, find_gpu


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("h100", "h100-sxm"),
        ("H100-SXM", "h100-sxm"),
        ("h100 pcie", "h100-pcie"),
        ("nvidia l40s", "l40s"),
        ("a100", "a100-80gb"),
        ("rtx4090", "rtx-4090"),
        ("RTX 6000", "rtx-6000-ada"),
        ("b200", "b200"),
    ],
)
def test_a_gpu_is_found_as_people_write_it(written, name):
    assert find_gpu(written).name == name


@pytest.mark.parametrize(
    ("written", "near"), [("h20", "did you mean h200"), ("tpu", "take one of")]
)
def test_one_that_is_not_known_is_refused_with_those_alike(written, near):
    with pytest.raises(ConfigurationError, match=near):
        find_gpu(written)


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
def test_the_numbers_are_of_a_gpu(gpu):
    """A mistaken unit or a peak with sparsity would leave these ranges."""
    assert 24e9 <= gpu.memory <= 192e9
    assert 0.3e12 <= gpu.bandwidth <= 8e12
    assert 100 <= gpu.flops / gpu.bandwidth <= 450
    assert gpu.source.startswith("NVIDIA ")

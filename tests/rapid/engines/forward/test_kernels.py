"""Which attention kernels an engine starts with."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig

from rapid.engines.attention.kernel_inputs import Kernels
from rapid.engines.attention.ragged import attend_by_runs
from rapid.engines.forward import kernels as kernels_module
from rapid.engines.forward.kernels import kernels_of
from rapid.engines.kv.cache import KVLayout
from tests.rapid.tiny_models import engine_config


def kernels_for(device: str, max_context: int, **settings: object) -> Kernels | None:
    """The kernels of an engine on a device that need not be there."""
    layout = KVLayout(2, 16, torch.bfloat16, (torch.device(device),) * 2)
    attention = SimpleNamespace()  # without sinks
    model = SimpleNamespace(
        config=LlamaConfig(num_attention_heads=4), get_submodule=lambda _: attention
    )
    loaded = SimpleNamespace(kv_layout=layout, model=model)
    return kernels_of(loaded, None, max_context, engine_config(**settings))  # type: ignore[arg-type]


def test_on_cuda_one_attention_is_taken_untimed_and_never_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def timed(*_: object) -> None:
        raise AssertionError("timed")

    monkeypatch.setattr(kernels_module, "choose_kernels", timed)
    kernels = kernels_for("cuda", 256, deterministic=True)
    assert kernels is not None
    assert kernels.steps is kernels.chunks
    assert kernels.captured is None


def test_off_cuda_only_a_deterministic_engine_has_kernels() -> None:
    assert kernels_for("cpu", 256) is None
    assert kernels_for("cpu", 256, deterministic=True) is not None


def test_engines_of_one_shape_and_about_one_size_choose_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen: list[int] = []

    def choose(
        cache: None,
        heads: int,
        page_tokens: int,
        max_context: int,
        _: int,
        *,
        window: int | None,
        has_sinks: bool,
    ) -> Kernels:
        assert not has_sinks
        assert kernels_module.CAPTURING.locked()  # no graph is captured meanwhile
        assert window is None
        chosen.append(max_context)
        return Kernels(attend_by_runs, attend_by_runs)

    monkeypatch.setattr(kernels_module, "_chosen", {})
    monkeypatch.setattr(kernels_module, "choose_kernels", choose)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    first = kernels_for("cuda", 260)
    assert kernels_for("cuda", 500) is first
    assert kernels_for("cuda", 520) is not first
    assert chosen == [260, 520]

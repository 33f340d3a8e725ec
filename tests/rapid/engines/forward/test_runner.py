"""From feeds to logits: which rows reach the LM head, and on which devices."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from accelerate import dispatch_model
from accelerate.hooks import AlignDevicesHook, add_hook_to_module

from rapid.engines.attention.batch import Feed
from rapid.engines.forward.runner import Runner
from rapid.engines.forward.weights.loading import load_model
from rapid.engines.kv.cache import KVCache, KVLayout, PageRun, PageTable
from tests.rapid.tiny_models import engine_config, loaded, random_prompt, reference_logits

CPU = torch.device("cpu")


def cache_of() -> KVCache:
    return KVCache(loaded().kv_layout, 32, page_tokens=4)


def test_only_wanted_rows_reach_the_lm_head() -> None:
    rows_seen: list[int] = []
    model = loaded().model
    hook = model.lm_head.register_forward_pre_hook(
        lambda _, args: rows_seen.append(args[0].shape[1])
    )
    runner = Runner(model, cache_of(), CPU, loaded().vocab_size)
    prompt = random_prompt(30).tolist()
    logits = runner.run(
        [
            Feed(prompt, 0, PageTable([PageRun(0, 8)], 4), num_wanted=0),
            Feed(prompt[:9], 0, PageTable([PageRun(8, 11)], 4), num_wanted=3),
        ]
    )
    hook.remove()
    assert rows_seen == [3]
    assert [len(rows) for rows in logits] == [0, 3]
    torch.testing.assert_close(logits[1], reference_logits(prompt[:9])[-3:], atol=2e-5, rtol=0)


def test_logits_are_cut_to_the_shared_vocabulary() -> None:
    runner = Runner(loaded().model, cache_of(), CPU, vocab_size=50)
    (logits,) = runner.run([Feed([5, 6], 0, PageTable([PageRun(0, 1)], 4), num_wanted=2)])
    assert logits.shape == (2, 50)
    assert logits.dtype == torch.float32


def spread(first: torch.device, last: torch.device) -> torch.nn.Module:
    """The tiny model, its first layer on one device and its last on another, as accelerate does."""
    model = load_model(engine_config()).model
    layers = model.get_submodule("model")
    places = {layers.embed_tokens: first, layers.rotary_emb: first, layers.layers[0]: first}
    for module in (*layers.layers[1:], layers.norm, model.lm_head):
        places[module] = last
    for module, device in places.items():
        hook = AlignDevicesHook(execution_device=device, place_submodules=True)
        add_hook_to_module(module, hook)
    return model


def run_a_prompt(model: torch.nn.Module, first: torch.device, last: torch.device) -> None:
    layout = loaded().kv_layout
    layout = KVLayout(layout.num_kv_heads, layout.head_dim, layout.dtype, (first, last))
    runner = Runner(model, KVCache(layout, 8, page_tokens=4), first, loaded().vocab_size)
    prompt = random_prompt(30).tolist()
    table = PageTable([PageRun(0, 8)], 4)
    runner.run([Feed(prompt[:20], 0, table, num_wanted=0)])
    (logits,) = runner.run([Feed(prompt[20:], 20, table, num_wanted=4)])
    assert logits.device == first
    want = reference_logits(prompt)[-4:]
    torch.testing.assert_close(logits.cpu(), want, atol=1e-4, rtol=0)


def test_weights_that_accelerate_keeps_on_disk_are_fetched_by_its_hooks(tmp_path: Path) -> None:
    names = ["model.embed_tokens", "model.rotary_emb", "model.layers.0"]
    away = ["model.layers.1", "model.norm", "lm_head"]
    places = dict.fromkeys(names, "cpu") | dict.fromkeys(away, "disk")
    model = dispatch_model(
        load_model(engine_config()).model, places, CPU, offload_dir=tmp_path, force_hooks=True
    )
    assert model.lm_head.weight.device.type == "meta"
    run_a_prompt(model, CPU, CPU)


NEEDS_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize(
    ("first", "last"),
    [
        ("cpu", "cpu"),
        pytest.param("cuda:0", "cpu", marks=NEEDS_GPU),
        pytest.param("cpu", "cuda:0", marks=NEEDS_GPU),
    ],
)
def test_the_last_layer_may_lie_on_another_device_than_the_first(first: str, last: str) -> None:
    devices = torch.device(first), torch.device(last)
    run_a_prompt(spread(*devices), *devices)

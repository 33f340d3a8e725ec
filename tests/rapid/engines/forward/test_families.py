"""Every family against transformers' own forward and `generate`, beyond its window."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

import rapid
from rapid.config import SamplingConfig
from rapid.engines.attention.batch import Feed, assemble
from rapid.engines.forward import opening
from rapid.engines.forward.layers.decoder import decoder_of
from rapid.engines.forward.opening import page_context
from rapid.engines.forward.runner import Runner
from rapid.engines.forward.sharding.shards import RankPart, Shard
from rapid.engines.forward.tiles import TiledRunner
from rapid.engines.forward.weights.loading import LoadedModel, load_model
from rapid.engines.kv.cache import KVCache, PageRun, PageTable
from rapid.errors import ConfigurationError
from tests.rapid.engines.forward.sharding.test_shards import on_ranks, steps
from tests.rapid.tiny_families import (
    MORE_FAMILIES,
    family_checkpoint,
    family_config,
    family_model,
    reference_of,
)
from tests.rapid.tiny_models import VOCAB, random_prompt

CPU = torch.device("cpu")
GREEDY = SamplingConfig(temperature=0)
PAGE = 4
PROMPT = random_prompt(90).tolist()
TABLE = PageTable([PageRun(3, 20), PageRun(31, 45)], PAGE)
OTHER_TABLE = PageTable([PageRun(20, 31)], PAGE)


def runner_of(loaded: LoadedModel, runner_class: type[Runner] = Runner) -> Runner:
    return runner_class(loaded.model, KVCache(loaded.kv_layout, 46, PAGE), CPU, VOCAB)


def logits_in_blocks(runner: Runner, ids: list[int], stops: list[int]) -> torch.Tensor:
    """Logits of all rows, in chunks that end at `stops`; after each, a block is rolled back."""
    found = []
    for start, stop in pairwise([0, *stops]):
        rows = [Feed(ids[start:stop], start, TABLE, stop - start)]
        if start == 0:
            rows.append(Feed(ids[7:40], 0, OTHER_TABLE, 0))
        found.append(runner.run(rows)[0])
        runner.run([Feed([5, 6, 7], stop, TABLE, 3), Feed([9], 33, OTHER_TABLE, 1)])
    return torch.cat(found)


@pytest.mark.parametrize("family", MORE_FAMILIES)
def test_logits_of_chunks_blocks_and_rolled_back_rows_are_those_of_one_forward(family: str) -> None:
    path = family_checkpoint(family)
    loaded = family_model(path)
    assert decoder_of(loaded.model) is not None
    got = logits_in_blocks(runner_of(loaded), PROMPT, [31, 64, 65, 73, 74, 90])
    with torch.no_grad():
        want = reference_of(path)(torch.tensor([PROMPT]), use_cache=False).logits[0]
    torch.testing.assert_close(got, want, atol=5e-5, rtol=0)


@pytest.mark.parametrize("family", MORE_FAMILIES)
def test_greedy_answers_are_those_of_generate(family: str) -> None:
    path = family_checkpoint(family)
    model = rapid.load(str(path), device="cpu", dtype="float32", max_context=200, step_tokens=33)
    got = rapid.generate(model, None, PROMPT[:50], max_tokens=40, sampling=GREEDY).token_ids
    ids = torch.tensor([PROMPT[:50]])
    want = reference_of(path).generate(ids, max_new_tokens=40, do_sample=False)
    assert list(got) == want[0, 50:].tolist()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", MORE_FAMILIES)
def test_fused_layers_compute_what_transformers_layers_do_bit_for_bit(
    family: str, dtype: str
) -> None:
    loaded = family_model(family_checkpoint(family), dtype=dtype)
    decoder = decoder_of(loaded.model)
    assert decoder is not None
    caches = [KVCache(loaded.kv_layout, 46, PAGE) for _ in range(2)]
    for start, stop in ((0, 40), (40, 51), (51, 52)):
        feeds = [Feed(PROMPT[start:stop], start, TABLE, 1)]
        ours, theirs = (assemble(feeds, cache, CPU) for cache in caches)
        with torch.inference_mode():
            got = decoder(ours.input_ids, ours.position_ids, ours.rows)
            want = loaded.model.get_submodule("model")(
                input_ids=theirs.input_ids,
                position_ids=theirs.position_ids,
                use_cache=False,
                ragged=theirs.rows,
            ).last_hidden_state
        assert torch.equal(got, want)


def test_of_a_gemma_that_reads_images_the_text_model_answers(tmp_path: Path) -> None:
    """Its file leaves most settings of the text model to defaults, and names weights otherwise."""
    settings = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "sliding_window_pattern": 2, "sliding_window": 24, "eos_token_id": 3,
        "initializer_range": 0.3,
    }  # fmt: skip
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    whole = Gemma3ForConditionalGeneration(
        Gemma3Config(
            text_config=settings,
            vision_config=vision | {"intermediate_size": 16, "image_size": 28, "patch_size": 14},
            image_token_index=90,
        )
    ).eval()
    whole.save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((family_checkpoint("mistral") / name).read_bytes())
    file = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(file | {"text_config": settings}))
    ids = [token_id % 90 for token_id in PROMPT]
    got = logits_in_blocks(runner_of(family_model(tmp_path)), ids, [31, 64, 65, 90])
    with torch.no_grad():
        want = whole(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(got, want, atol=5e-5, rtol=0)
    with pytest.raises(ConfigurationError, match="reads images as well, which tensor_parallel"):
        load_model(family_config(tmp_path, tensor_parallel=2))


# --- rope -----------------------------------------------------------------------------------------

FACTORS = {
    "short_factor": [1.0 + i / 8 for i in range(8)],
    "long_factor": [2.0 + i for i in range(8)],
}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.5},
    "yarn": {"factor": 8.0, "original_max_position_embeddings": 64},
    "llama3": {
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
    "longrope": FACTORS | {"original_max_position_embeddings": 64},
}


def with_rope(family: str, rope: dict[str, Any]) -> Path:
    if family == "gemma3_text":
        local = {"rope_type": "default", "rope_theta": 100.0}
        return family_checkpoint(
            family, rope_parameters={"full_attention": rope, "sliding_attention": local}
        )
    if family == "phi3":
        halves = {name: rope[name][:2] for name in FACTORS}
        rope = rope | halves | {"partial_rotary_factor": 0.5}
        return family_checkpoint(family, rope_parameters=rope, original_max_position_embeddings=64)
    return family_checkpoint(family, rope_parameters=rope)


@pytest.mark.parametrize(
    ("family", "scaling"),
    [
        *((family, scaling) for family in ("mistral", "gemma3_text") for scaling in SCALINGS),
        ("qwen3_moe", "yarn"),
        ("gpt_oss", "linear"),
        ("phi3", "longrope"),
    ],
)
@pytest.mark.parametrize("max_context", [None, 60])
def test_every_rope_scaling_gives_the_logits_of_transformers(
    family: str, scaling: str, max_context: int | None
) -> None:
    """Of `longrope`, a context within the original length takes the other factors."""
    path = with_rope(family, {"rope_type": scaling, "rope_theta": 10000.0} | SCALINGS[scaling])
    ids = PROMPT[:max_context]
    loaded = family_model(path, max_context=max_context)
    got = logits_in_blocks(runner_of(loaded), ids, [40, 45, len(ids)])
    with torch.no_grad():
        want = reference_of(path)(torch.tensor([ids]), use_cache=False).logits[0]
    torch.testing.assert_close(got, want, atol=5e-5, rtol=0)


def test_pages_on_disk_are_of_the_factors_that_were_used(tmp_path: Path) -> None:
    path = with_rope("phi3", {"rope_type": "longrope", "rope_theta": 1e4} | SCALINGS["longrope"])
    on_disk = {"host_cache_tokens": 1024, "disk_cache_folder": str(tmp_path), "disk_cache_gib": 1}
    contexts = []
    for max_context in (50, 60, 200):
        config = family_config(path, max_context=max_context, **on_disk)
        contexts.append(page_context(load_model(config), config))
    assert contexts[0] == contexts[1] != contexts[2]


def test_pages_on_disk_are_of_the_code_that_computed_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel changes without the version of the package; other code does not matter."""
    on_disk = {"host_cache_tokens": 1024, "disk_cache_folder": str(tmp_path), "disk_cache_gib": 1}
    config = family_config(family_checkpoint("phi3"), **on_disk)
    model = load_model(config)
    kernel, other = "engines/attention/triton_kernel.py", "engines/execution/scheduling.py"
    copy = shutil.copytree(opening._ROOT, tmp_path / "rapid")
    same = page_context(model, config)
    monkeypatch.setattr(opening, "_ROOT", copy)
    for path, is_same in ((other, True), (kernel, False)):
        with (copy / path).open("a") as file:
            file.write("# another line\n")
        assert (page_context(model, config) == same) == is_same


def test_a_scaling_of_the_settings_keeps_the_rope_of_sliding_layers_and_the_rotated_share() -> None:
    linear = {"rope_type": "linear", "factor": 4.0}
    rope = family_model(family_checkpoint("gemma3_text"), rope_scaling=linear).model.config
    assert rope.rope_parameters["full_attention"]["factor"] == 4.0
    assert rope.rope_parameters["full_attention"]["rope_theta"] == 1_000_000.0
    assert rope.rope_parameters["sliding_attention"]["rope_type"] == "default"
    phi = family_model(with_rope("phi3", {"rope_type": "longrope"} | SCALINGS["longrope"]))
    assert phi.model.config.rope_parameters["partial_rotary_factor"] == 0.5


# --- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["mistral", "gemma3_text"])
def test_deterministic_logits_are_the_same_bits_however_rows_are_split(family: str) -> None:
    path = family_checkpoint(family)
    loaded = family_model(path, dtype="bfloat16")
    ways = [[90], [31, 64, 65, 73, 90], [17, 18, 19, 50, 90]]
    first, *others = (
        logits_in_blocks(runner_of(loaded, TiledRunner), PROMPT, stops) for stops in ways
    )
    assert all(torch.equal(first, other) for other in others)
    exact = logits_in_blocks(runner_of(family_model(path), TiledRunner), PROMPT, [90])
    with torch.no_grad():
        want = reference_of(path)(torch.tensor([PROMPT]), use_cache=False).logits[0]
    torch.testing.assert_close(exact, want, atol=5e-5, rtol=0)


def test_deterministic_needs_windows_of_a_tile() -> None:
    loaded = family_model(family_checkpoint("mistral", sliding_window=15))
    with pytest.raises(ConfigurationError, match="windows of at least 16 tokens, not 15"):
        runner_of(loaded, TiledRunner)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", ["mistral", "gemma3_text", "phi3", "qwen3_moe", "gpt_oss"])
def test_ranks_compute_together_what_one_does(family: str, size: int) -> None:
    """Four ranks share two heads of keys and values."""
    settings = {"moe_intermediate_size": 32} if family == "qwen3_moe" else {}
    config = family_config(family_checkpoint(family, **settings))
    whole = steps(load_model(config), config)
    shards = [Shard(rank, size) for rank in range(size)]
    parts = [load_model(config, shard=shard) for shard in shards]
    assert {part.kv_layout.num_kv_heads for part in parts} == {1}

    def part(group: Any) -> list[torch.Tensor]:
        place = RankPart(shards[group.rank], group)
        return steps(replace(parts[group.rank], place=place), config)

    for of_rank in on_ranks(size, part):
        for logits, expected in zip(of_rank, whole, strict=True):
            torch.testing.assert_close(logits, expected, atol=3e-5, rtol=0)


@pytest.mark.parametrize(
    ("family", "setting", "sentence"),
    [
        ("qwen3_moe", {"tensor_parallel": 3}, "4 attention heads, which tensor_parallel: 3"),
        (
            "qwen3_moe",
            {"deterministic": True},
            "mixture of experts, which is not built for deterministic",
        ),
        ("gpt_oss", {"deterministic": True}, "which is not built for deterministic"),
        ("qwen3_moe", {"quantization": "int8"}, "which is not built for quantization: int8"),
        (
            "qwen3_moe",
            {"tensor_parallel": 2},
            "24 columns of each expert, which tensor_parallel: 2",
        ),
        ("phi3", {"tensor_parallel": 8}, "4 attention heads, which tensor_parallel: 8"),
    ],
)
def test_what_is_not_built_is_refused_in_a_sentence(
    family: str, setting: dict[str, Any], sentence: str
) -> None:
    config = family_config(family_checkpoint(family), **setting)
    with pytest.raises(ConfigurationError, match=sentence):
        load_model(config)


def test_only_the_experts_that_a_token_chose_are_computed() -> None:
    """Weights of the others may be anything: here, no numbers."""
    loaded = family_model(family_checkpoint("qwen3_moe"))
    block = loaded.model.get_submodule("model.layers.0.mlp")
    chosen: set[int] = set()
    hook = block.gate.register_forward_hook(
        lambda *call: chosen.update(call[2][2].flatten().tolist())
    )
    (want,) = runner_of(loaded).run([Feed(PROMPT[:1], 0, TABLE, 1)])
    hook.remove()
    assert len(chosen) == 2
    for expert in set(range(8)) - chosen:
        block.experts.gate_up_proj[expert] = float("nan")
    (got,) = runner_of(loaded).run([Feed(PROMPT[:1], 0, TABLE, 1)])
    assert torch.equal(got, want)

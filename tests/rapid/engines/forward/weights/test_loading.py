"""Checkpoints that load, and sentences for those that do not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from transformers import AutoModelForCausalLM

import rapid
from rapid.checkpoints.files import load_tokenizer
from rapid.config import EngineConfig, SamplingConfig
from rapid.engines.engine import Engine
from rapid.engines.forward.sharding.shards import Shard
from rapid.engines.forward.weights import loading
from rapid.engines.forward.weights.loading import load_model
from rapid.errors import ConfigurationError, PromptTooLong
from tests.rapid.checkpoints.test_facts import LAYERS, WINDOW_64
from tests.rapid.tiny_models import (
    EOS,
    checkpoint,
    copied,
    engine_config,
    loaded,
    random_prompt,
    reference_greedy,
)

GREEDY = SamplingConfig(temperature=0)


def test_device_and_dtype_are_decided_here() -> None:
    model = load_model(EngineConfig(model=str(checkpoint())))
    expected = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    assert (model.dtype, next(model.model.parameters()).dtype) == (expected, expected)
    assert model.kv_layout.devices == (model.device,) * 2
    half = load_model(EngineConfig(model=str(checkpoint()), dtype="bfloat16", device="cpu"))
    assert half.kv_layout.bytes_per_token == 2 * 2 * 2 * 16 * 2


def test_balanced_puts_each_layers_kv_where_the_layer_computes() -> None:
    model = load_model(EngineConfig(model=str(checkpoint()), device="balanced"))
    assert len(model.kv_layout.devices) == 2
    assert model.kv_layout.devices[0].type == model.device.type


@pytest.mark.parametrize("place", ["cpu", "disk", torch.device("cpu")])
def test_a_layer_that_accelerate_leaves_off_the_gpus_is_refused(
    monkeypatch: pytest.MonkeyPatch, place: object
) -> None:
    class Offloaded(torch.nn.Module):
        hf_device_map: ClassVar[dict[str, object]] = {"model.layers.0": 0, "model.layers.1": place}

    def load(*_: object, device_map: str, **__: object) -> object:
        assert device_map == "auto"
        return Offloaded(), {}

    monkeypatch.setattr(loading, "_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(loading, "check_memory", lambda config, **_: None)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", load)
    with pytest.raises(ConfigurationError, match=r"from model.layers.1 on, would not be on a GPU"):
        load_model(EngineConfig(model=str(checkpoint()), device="balanced"))


@pytest.mark.parametrize(("rank", "index"), [(0, 0), (1, 1), (2, 0), (3, 1)])
def test_a_rank_s_device_is_the_current_one_before_anything_touches_cuda(
    monkeypatch: pytest.MonkeyPatch, rank: int, index: int
) -> None:
    did: list[object] = []

    def touch(*_: object) -> None:
        did.append("memory or weights")
        raise ZeroDivisionError

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)  # of each of two machines
    monkeypatch.setattr(torch.cuda, "set_device", did.append)
    monkeypatch.setattr(torch.cuda, "mem_get_info", touch)
    monkeypatch.setattr(loading, "_load_weights", touch)
    config = engine_config("qwen3", tensor_parallel=4, device="cuda")
    with pytest.raises(ZeroDivisionError):
        load_model(config, shard=Shard(rank, 4), num_machines=2)
    assert did == [torch.device("cuda", index), "memory or weights"]


def test_end_of_sequence_is_the_union_of_the_generation_config(tmp_path: Path) -> None:
    path = copied(tmp_path)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS, 9]}))
    assert load_model(EngineConfig(model=str(path))).eos_ids == {EOS, 9}
    (path / "generation_config.json").unlink()
    assert load_model(EngineConfig(model=str(path))).eos_ids == {EOS}


def test_the_tokenizer_loads_without_weights(tmp_path: Path) -> None:
    path = copied(tmp_path)
    (path / "model.safetensors").unlink()
    assert load_tokenizer(str(path)).get_vocab()["w7"] == 7
    (path / "tokenizer.json").unlink()
    with pytest.raises(ConfigurationError, match="no usable tokenizer"):
        load_tokenizer(str(path))


def test_rope_scaling_is_overridden_and_lengthens_the_context() -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    config = EngineConfig(
        model=str(checkpoint("qwen2")), rope_scaling=yarn, device="cpu", dtype="float32"
    )
    scaled, plain = load_model(config), loaded("qwen2")
    assert (scaled.max_context, plain.max_context) == (4096, 1024)
    frequencies = [model.model.model.rotary_emb.inv_freq for model in (scaled, plain)]
    assert not torch.equal(*frequencies)
    assert scaled.model.config.rope_parameters["rope_theta"] == 10000.0


@pytest.mark.parametrize(
    ("rope", "max_context"),
    [
        # Of Qwen's model cards: beside the positions that the model was first trained for.
        ({"factor": 4.0, "original_max_position_embeddings": 1024}, 4096),
        # Of other checkpoints: beside the positions that it has now.
        ({"factor": 4.0, "original_max_position_embeddings": 256}, 1024),
        ({"factor": 4.0}, 1024),
    ],
)
@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_yarn_of_a_checkpoints_own_reaches_as_far_as_it_says(
    tmp_path: Path, rope: dict[str, object], max_context: int, key: str
) -> None:
    path = copied(tmp_path, rope_parameters=None, rope_scaling={key: "yarn"} | rope)
    model = load_model(EngineConfig(model=str(path), device="cpu", dtype="float32"))
    assert model.max_context == max_context
    assert model.model.config.rope_parameters["rope_type"] == "yarn"


def test_positions_beyond_those_before_yarn_are_computed_as_transformers_does(
    tmp_path: Path,
) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    path = copied(tmp_path, rope_parameters=None, rope_scaling=yarn, max_position_embeddings=64)
    prompt = random_prompt(150).tolist()
    model = rapid.load(str(path), device="cpu", dtype="float32")
    got = rapid.generate(model, None, prompt, max_tokens=8, sampling=GREEDY).token_ids
    theirs = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    want = theirs.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)
    assert list(got) == want[0, 150:].tolist()
    with pytest.raises(PromptTooLong):
        rapid.generate(model, None, prompt, max_tokens=107, sampling=GREEDY)


def test_within_its_window_a_model_answers_as_transformers_does(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    shutil.copytree(checkpoint("qwen2"), path)
    config = json.loads((path / "config.json").read_text())
    del config["layer_types"]
    (path / "config.json").write_text(json.dumps(config | WINDOW_64))
    model = rapid.load(str(path), device="cpu", dtype="float32", max_context=64)
    assert model.model.config.layer_types == LAYERS
    prompt = random_prompt(50).tolist()
    got = rapid.generate(model, None, prompt, max_tokens=14, sampling=GREEDY).token_ids
    assert list(got) == reference_greedy(prompt, 14, "qwen2")
    with pytest.raises(PromptTooLong):
        rapid.generate(model, None, prompt, max_tokens=15, sampling=GREEDY)


def test_loading_again_leaves_other_models_attention_alone() -> None:
    ours = loaded().model.config
    assert ours._attn_implementation == "rapid_ragged"
    other = load_model(engine_config())
    other.model.set_attn_implementation("eager")
    assert ours._attn_implementation == "rapid_ragged"


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"model": "/no/such/place"}, "no such checkpoint directory"),
        ({"model": "./nor/here"}, "no such checkpoint directory"),
        ({"model": "embedded:judge"}, "embedded models are embedded:target"),
        ({"rope_scaling": {"type": "spiral"}}, "rope_type 'spiral' is unknown"),
        ({"rope_scaling": {"factor": 2.0}}, "rope_type None is unknown"),
        ({"rope_scaling": {"type": ["yarn"]}}, "is unknown"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling"),
        ({"rope_scaling": {"type": "linear", "factor": "abc"}}, "factor must be a number"),
        ({"rope_scaling": {"type": "linear", "factor": float("inf")}}, "factor must be a number"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "angles of stored keys"),
    ],
)
def test_a_setting_that_cannot_work_is_one_sentence(
    settings: dict[str, object], sentence: str
) -> None:
    config = EngineConfig(**({"model": str(checkpoint())} | settings))
    with pytest.raises(ConfigurationError, match=sentence) as caught:
        load_model(config)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model_type": "gpt2"}, "supported are llama, mistral, qwen2, qwen3"),
        ({"model_type": "no-such-type"}, "supported are llama, mistral, qwen2, qwen3"),
        ({"max_position_embeddings": None}, "no max_position_embeddings"),
        ({"hidden_size": "wide"}, "describes no model: .*hidden"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "short_factor must be a list"),
        (
            {"model_type": "qwen2", "layer_types": ["sliding_attention"] * 2},
            "names sliding windows",
        ),
        ({"model_type": "qwen3", "layer_types": ["linear_attention"] * 2}, "linear_attention"),
    ],
)  # fmt: skip
def test_a_checkpoint_of_another_kind_is_refused(
    tmp_path: Path, changes: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        load_model(EngineConfig(model=str(copied(tmp_path, **changes))))


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    path = copied(tmp_path)
    (path / "model.safetensors").unlink()
    torch.save({}, path / "pytorch_model.bin")
    with pytest.raises(ConfigurationError, match="no safetensors weights"):
        load_model(EngineConfig(model=str(path)))


def test_an_empty_directory_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"no config\.json"):
        load_model(EngineConfig(model=str(tmp_path)))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"kv_cache_tokens": 128, "max_context": 256}, "KV pool too small for one sequence"),
        ({"max_context": None, "kv_cache_tokens": 512}, "max_context is 1024"),
        (
            {"max_context": 260, "kv_cache_tokens": 263, "page_tokens": 16},
            "gives 16 pages of 16 tokens, max_context is 260",
        ),
        ({"max_context": 2048}, "beyond the 1024 positions"),
    ],
)
def test_a_pool_that_cannot_hold_one_sequence_is_refused(
    settings: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        Engine(loaded(), engine_config(**settings))

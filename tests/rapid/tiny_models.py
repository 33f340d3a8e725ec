"""Tiny random checkpoints of each family, and plain transformers forwards to compare with."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import torch
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rapid.config import EngineConfig, SamplingConfig, SpeculationConfig
from rapid.engines.engine import Engine
from rapid.engines.forward.weights.loading import LoadedModel, load_model
from rapid.messages import Int32Array, LeaseRequest, Terms, as_prompt

VOCAB = 96
EOS = 3
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM, 2),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, 1),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, 4),
}


@cache
def checkpoint(family: str = "llama", seed: int = 0, eos: int = EOS) -> Path:
    """A checkpoint directory; heads 4, KV heads by family, logits wider than the vocabulary."""
    config_class, model_class, kv_heads = FAMILIES[family]
    torch.manual_seed(seed)
    config = config_class(
        vocab_size=VOCAB + 8,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        head_dim=16,
        max_position_embeddings=1024,
        eos_token_id=eos,
        initializer_range=0.3,
    )
    directory = Path(mkdtemp(prefix=f"tiny-{family}-"))
    model_class(config).save_pretrained(directory)
    vocabulary = {f"w{i}": i for i in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=f"w{eos}", unk_token="w0"
    ).save_pretrained(directory)
    return directory


def copied(tmp_path: Path, **changes: object) -> Path:
    """A checkpoint with some fields of its config changed."""
    path = tmp_path / "checkpoint"
    shutil.copytree(checkpoint(), path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))
    return path


@cache
def loaded(family: str = "llama", seed: int = 0, eos: int = EOS) -> LoadedModel:
    torch.set_num_threads(1)
    return load_model(engine_config(family, seed, eos))


@contextmanager
def out_of_memory(model: torch.nn.Module, forward: int) -> Iterator[None]:
    """Let one forward of `model`, counted from here and from 1, find no memory for its logits."""
    count = itertools.count(1)

    def check(*_: object) -> None:
        if next(count) == forward:
            raise torch.OutOfMemoryError("CUDA out of memory")

    hook = model.get_submodule("lm_head").register_forward_pre_hook(check)
    try:
        yield
    finally:
        hook.remove()


@cache
def reference(family: str = "llama", seed: int = 0, eos: int = EOS) -> torch.nn.Module:
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint(family, seed, eos), attn_implementation="eager", dtype=torch.float32
    )
    return model.eval()


def engine_config(
    family: str = "llama", seed: int = 0, eos: int = EOS, **settings: object
) -> EngineConfig:
    defaults: dict[str, object] = {
        "device": "cpu",
        "dtype": "float32",
        "max_context": 256,
        "kv_cache_tokens": 1024,
        "page_tokens": 8,
        "step_tokens": 64,
        "threads": 1,
    }
    return EngineConfig(model=str(checkpoint(family, seed, eos)), **(defaults | settings))


def tiny_engine(family: str = "llama", seed: int = 0, eos: int = EOS, **settings: object) -> Engine:
    return Engine(loaded(family, seed, eos), engine_config(family, seed, eos, **settings))


@torch.no_grad()
def reference_logits(token_ids: list[int], family: str = "llama", seed: int = 0) -> torch.Tensor:
    """Logits after every token, by one full forward [len, vocab]."""
    ids = torch.tensor([token_ids])
    logits = reference(family, seed)(input_ids=ids, use_cache=False).logits
    return logits[0, :, : loaded(family, seed).vocab_size]


def reference_greedy(
    prompt: list[int], num_tokens: int, family: str = "llama", seed: int = 0
) -> list[int]:
    """Greedy answer, recomputing everything for each token; stops after EOS."""
    ids = list(prompt)
    while len(ids) < len(prompt) + num_tokens:
        ids.append(int(reference_logits(ids, family, seed)[-1].argmax()))
        if ids[-1] == EOS:
            break
    return ids[len(prompt) :]


def random_prompt(length: int, seed: int = 0) -> Int32Array:
    return as_prompt(np.random.default_rng(seed).integers(4, VOCAB, length).tolist())


def lease_request(
    lease_id: str = "a",
    prompt: Int32Array | None = None,
    *,
    max_tokens: int = 32,
    temperature: float = 0.0,
    seed: int = 7,
    speculation: SpeculationConfig | None = None,
    tenant: str = "local",
    **settings: object,
) -> LeaseRequest:
    """Return a request for a lease; `settings` are of the lease or of its terms."""
    of_lease = {each.name for each in fields(LeaseRequest)}
    terms = Terms(
        tenant,
        SamplingConfig(temperature=temperature, seed=seed),
        speculation or SpeculationConfig(eta=0.0),
        max_tokens,
        **{name: value for name, value in settings.items() if name not in of_lease},
    )
    prompt = random_prompt(20) if prompt is None else prompt
    own = {name: value for name, value in settings.items() if name in of_lease}
    return LeaseRequest(lease_id, terms, prompt, **own)

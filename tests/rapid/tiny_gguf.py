"""Tiny random GGUF files, written by the package of llama.cpp."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tests.rapid.tiny_models import FAMILIES

END = "<|im_end|>"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MERGES = ["Ġ Ġ", "h e", "Ġ t"]
TOKENS = [
    "<|endoftext|>",
    "<|im_start|>",
    END,
    *bytes_to_unicode().values(),
    *(merge.replace(" ", "") for merge in MERGES),
]
PADDING = ["[PAD262]", "[PAD263]"]
HIDDEN, HEADS, HEAD_DIM, LAYERS, POSITIONS = 64, 4, 16, 2, 512


@cache
def model(family: str = "llama") -> Any:
    """The model whose weights the files hold."""
    config_class, model_class, kv_heads = FAMILIES[family]
    torch.manual_seed(0)
    return model_class(
        config_class(
            vocab_size=len(TOKENS + PADDING),
            hidden_size=HIDDEN,
            intermediate_size=2 * HIDDEN,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=kv_heads,
            head_dim=HEAD_DIM,
            max_position_embeddings=POSITIONS,
            eos_token_id=TOKENS.index(END),
            initializer_range=0.3,
            rms_norm_eps=1e-5,
        )
    ).eval()


def write(
    path: Path,
    family: str = "llama",
    kind: Kind = Kind.F32,
    *,
    tokens: list[str] | None = None,
    without: str = "nothing",
    extra: dict[str, Any] | None = None,
    more: dict[str, Any] | None = None,
) -> Path:
    """Write a file.

    Args:
        path: where to write it.
        family: the model of `model` to write.
        kind: how matrices are stored; norms are always F32, as llama.cpp's converter has them.
        tokens: another vocabulary.
        without: the beginning of the names of tensors and entries to leave out.
        extra: further tensors.
        more: further entries of the metadata, or other values of those that there are.
    """
    writer = gguf.GGUFWriter(path, family)
    for name, value in (_entries(family, tokens or TOKENS) | (more or {})).items():
        if not name.startswith(without):
            _add(writer, name, value)
    for name, tensor in _tensors(family).items():
        if name.startswith(without):
            continue
        stored = kind if tensor.ndim > 1 else Kind.F32
        writer.add_tensor(name, gguf.quantize(tensor, stored), raw_dtype=stored)
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _entries(family: str, tokens: list[str]) -> dict[str, Any]:
    config = model(family).config
    is_control = [token.startswith("<|") for token in tokens]
    return {
        f"{family}.block_count": LAYERS,
        f"{family}.context_length": POSITIONS,
        f"{family}.embedding_length": HIDDEN,
        f"{family}.feed_forward_length": 2 * HIDDEN,
        f"{family}.attention.head_count": HEADS,
        f"{family}.attention.head_count_kv": config.num_key_value_heads,
        f"{family}.attention.key_length": HEAD_DIM,
        f"{family}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{family}.rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens + PADDING,
        "tokenizer.ggml.token_type": [3 if each else 1 for each in is_control] + [5] * len(PADDING),
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": tokens.index(END),
        "tokenizer.chat_template": TEMPLATE,
    }


def _add(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    if isinstance(value, str):
        writer.add_string(name, value)
    elif isinstance(value, list):
        writer.add_array(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    else:
        writer.add_uint32(name, value)


def _tensors(family: str) -> dict[str, np.ndarray]:
    """The model's weights under llama.cpp's names, in its order of a head's rows."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[family.upper()], LAYERS)
    config = model(family).config
    heads = {"q_proj": HEADS, "k_proj": config.num_key_value_heads}
    tensors = {}
    for name, weight in model(family).state_dict().items():
        stem, _, kind = name.rpartition(".")
        numbers = weight.numpy().astype(np.float32)
        if family == "llama" and (count := heads.get(stem.rpartition(".")[2])):
            halves = numbers.reshape(count, 2, -1, *numbers.shape[1:])  # llama.cpp's `permute`
            numbers = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(numbers.shape))
        tensors[f"{names.get_name(stem)}.{kind}"] = numbers
    return tensors

"""Readers of GGUF files: header, configuration and tokenizer, without torch and without weights.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

from rapid.errors import ConfigurationError

SUFFIX = ".gguf"
ARCHITECTURES = ("llama", "qwen2", "qwen3")
FREQUENCIES = "rope_freqs.weight"

_VERSIONS = (2, 3)  # those with 64-bit sizes (docs/gguf.md of ggml)
_ALIGNMENT = 32  # of the data, where the metadata name no other
_MOST_DIMENSIONS = 4  # of a tensor: GGML_MAX_DIMS
_MOST_NESTED = 2  # arrays within each other
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q",
            11: "<q", 12: "<d"}  # fmt: skip
_STRING, _ARRAY = 8, 9
_LEAST_BYTES = {_STRING: 8, _ARRAY: 12}  # what an empty one takes
_UNUSED = 5  # the type of a token that only pads the vocabulary
# Vocabularies whose digits are split from each other before the words of GPT-2 are
# (`LLAMA_VOCAB_PRE_TYPE_SMOLLM` and its neighbours in llama.cpp).
_SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell")
_WORDS_OF_GPT2 = ("gpt-2", "default", *_SINGLE_DIGITS)


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """The place of a tensor in its file."""

    shape: tuple[int, ...]  # its shape in torch's order, the rows first
    type_id: int
    start: int  # the offset of its first byte from the start of the file
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """The metadata of a GGUF file and the places of its tensors, by name."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorPlace]

    @property
    def architecture(self) -> str:
        """The model's family, as llama.cpp names it."""
        return str(self.metadata["general.architecture"])


def is_gguf(source: str) -> bool:
    """Return whether a checkpoint's source is a GGUF file."""
    return source.endswith(SUFFIX)


def read_header(source: str) -> GGUFHeader:
    """Read the header of a file; a file that has not changed is read once.

    Raises:
        ConfigurationError: the file is no GGUF, not complete, one part of several, or its
            architecture is not supported.
    """
    path = Path(source)
    state = path.stat()
    return _read(path, state.st_size, state.st_mtime_ns)


def has_own_frequencies(source: str) -> bool:
    """Return whether a GGUF file stores RoPE frequencies, as those of Llama 3.1 and later do."""
    return is_gguf(source) and FREQUENCIES in read_header(source).tensors


def read_settings(source: str) -> dict[str, Any]:
    """Return what the ``config.json`` of the same model would say.

    Raises:
        ConfigurationError: as `read_header`; or a required entry is missing or no such number; or a
            tensor has another shape than the metadata say.
    """
    header = read_header(source)
    family, tensors = header.architecture, header.tensors

    def entry(name: str, *default: Any) -> Any:
        value = header.metadata.get(f"{family}.{name}", *default)
        if value is None and not default:
            raise ConfigurationError(f"{source}: its metadata have no {family}.{name}")
        return value

    def count(name: str, *default: int) -> int:
        value = entry(name, *default)
        if type(value) is not int or value < 1:
            raise _not_a(f"{family}.{name}", "a whole number from 1", value, source)
        return value

    def number(name: str, *default: float) -> float:
        value = entry(name, *default)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise _not_a(f"{family}.{name}", "a number above 0", value, source)
        return float(value)

    if "token_embd.weight" not in tensors:
        raise ConfigurationError(f"{source} holds no token embeddings: it is no whole model")
    hidden, heads = count("embedding_length"), count("attention.head_count")
    settings = {
        "model_type": family,
        "hidden_size": hidden,
        "intermediate_size": count("feed_forward_length"),
        "num_hidden_layers": count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": count("attention.head_count_kv", heads),
        "head_dim": count("attention.key_length", hidden // heads),
        "max_position_embeddings": count("context_length"),
        "rms_norm_eps": number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(entry, number),
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_output.bias" in tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in tensors,
        "eos_token_id": _ends(header),
        "bos_token_id": header.metadata.get("tokenizer.ggml.bos_token_id"),
    }
    _check_shapes(header, settings)
    return settings


def read_tokenizer(source: str) -> Any:
    """Return the file's tokenizer with its chat template, as a `PreTrainedTokenizerFast`.

    Raises:
        ConfigurationError: as `read_header`.
        ValueError: the file holds no tokenizer, or one of a kind that cannot be built.
    """
    from tokenizers import pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf import convert_gguf_tokenizer
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    header = read_header(source)
    prefix = "tokenizer.ggml."
    own = {
        key.removeprefix(prefix): value
        for key, value in header.metadata.items()
        if key.startswith(prefix)
    }
    if "model" not in own or "tokens" not in own:
        raise ValueError("the file holds no tokenizer")
    kind, splits = own["model"], own.get("pre", "default")
    if (needed := {"gpt2": "merges", "llama": "scores"}.get(kind)) and needed not in own:
        raise ValueError(f"the file holds no {needed} of its tokens")
    if kind == "gpt2" and splits not in (*GGUF_PRE_TOKENIZER_SPLITS, *_WORDS_OF_GPT2):
        raise ValueError(f"text is split in the way of {splits!r}, which is not supported")
    tokens, types = own["tokens"], own.get("token_type") or [1] * len(own["tokens"])
    while types and types[-1] == _UNUSED:
        tokens, types = tokens[:-1], types[:-1]
    described = own | {
        "tokenizer_type": kind,
        "pre_tokenizer_type": splits,
        "tokens": tokens,
        "token_type": types,
    }
    backend, _ = convert_gguf_tokenizer(header.architecture, described)
    if splits in _SINGLE_DIGITS:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    special = {}
    for name, key in names.items():
        id_ = own.get(f"{key}_token_id")
        if id_ is not None and id_ not in range(len(tokens)):
            raise ValueError(f"its {key}_token_id is {id_!r}, and it has {len(tokens)} tokens")
        if id_ is not None:
            special[name] = tokens[id_]
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=header.metadata.get("tokenizer.chat_template"),
        **({"bos_token": None, "eos_token": None} | special),
    )


@lru_cache(maxsize=4)
def _read(path: Path, size: int, _changed_ns: int) -> GGUFHeader:
    try:
        with path.open("rb") as stream:
            header = _HeaderReader(stream.read, size).header(path)
    except (EOFError, UnicodeDecodeError, MemoryError, OverflowError):
        raise ConfigurationError(f"{path} is cut off or damaged: fetch it again") from None
    if header.architecture not in ARCHITECTURES:
        raise ConfigurationError(
            f"{path} is a GGUF file of the architecture {header.architecture!r}; "
            f"supported are {', '.join(ARCHITECTURES)}"
        )
    if header.metadata.get("split.count", 1) not in (0, 1):
        raise ConfigurationError(f"{path} is one part of several: join them (gguf-split --merge)")
    end = max((each.start + each.num_bytes for each in header.tensors.values()), default=0)
    if end > size:
        raise ConfigurationError(
            f"{path} is cut off: it has {size:,} bytes of {end:,}; fetch it again"
        )
    return header


class _HeaderReader:
    """A reader of the values of a header, one after the other."""

    def __init__(self, read: Any, size: int) -> None:
        self._read, self._size = read, size
        self._position = 0

    def header(self, path: Path) -> GGUFHeader:
        """Read the whole header, up to where the data begin."""
        if self._size < 4 or self._bytes(4) != b"GGUF":
            raise ConfigurationError(f"{path} is no GGUF file")
        version, num_tensors, num_entries = self._unpack("<IQQ")
        if version not in _VERSIONS:
            raise ConfigurationError(
                f"{path} is of GGUF version {version}; supported are versions 2 and 3"
            )
        metadata: dict[str, Any] = {}
        for _ in range(num_entries):
            key = self._string()
            metadata[key] = self._value(self._unpack("<I")[0])
        if not isinstance(metadata.get("general.architecture"), str):
            raise ConfigurationError(f"{path} names no architecture in its metadata")
        table = [self._tensor() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        if type(alignment) is not int or alignment < 1:
            raise _not_a("general.alignment", "a whole number from 1", alignment, path)
        data = -(-self._position // alignment) * alignment
        return GGUFHeader(
            path,
            metadata,
            {name: _place(path, name, shape, type_id, data + offset)
             for name, shape, type_id, offset in table},
        )  # fmt: skip

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        (num_dimensions,) = self._unpack("<I")
        if not (name.isprintable() and 1 <= num_dimensions <= _MOST_DIMENSIONS):
            raise EOFError
        dimensions = self._unpack(f"<{num_dimensions}Q")  # the fastest-moving first
        type_id, offset = self._unpack("<IQ")
        return name, tuple(reversed(dimensions)), type_id, offset

    def _value(self, type_id: int, depth: int = 0) -> Any:
        if type_id == _STRING:
            return self._string()
        if type_id != _ARRAY:
            return self._unpack(self._scalar(type_id))[0]
        element, count = self._unpack("<IQ")
        least = _LEAST_BYTES.get(element) or struct.calcsize(self._scalar(element))
        if depth == _MOST_NESTED or count * least > self._size - self._position:
            raise EOFError
        if element in (_STRING, _ARRAY):
            return [self._value(element, depth + 1) for _ in range(count)]
        return list(self._unpack(f"<{count}{self._scalar(element)[1]}"))

    def _scalar(self, type_id: int) -> str:
        if type_id not in _SCALARS:
            raise EOFError  # the file is damaged before this place
        return _SCALARS[type_id]

    def _string(self) -> str:
        return self._bytes(self._unpack("<Q")[0]).decode()

    def _unpack(self, form: str) -> tuple[Any, ...]:
        return struct.unpack(form, self._bytes(struct.calcsize(form)))

    def _bytes(self, count: int) -> bytes:
        self._position += count
        if self._position > self._size:
            raise EOFError
        data: bytes = self._read(count)
        return data


def _place(path: Path, name: str, shape: tuple[int, ...], type_id: int, start: int) -> TensorPlace:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(type_id)]
    except (KeyError, ValueError):
        raise ConfigurationError(
            f"{path}: the tensor {name} is of the unknown type {type_id}"
        ) from None
    return TensorPlace(shape, type_id, start, prod(shape) // block * block_bytes)


def _not_a(name: str, what: str, value: object, source: object) -> ConfigurationError:
    return ConfigurationError(f"{source}: its {name} must be {what}, not {str(value)[:40]!r}")


def _check_shapes(header: GGUFHeader, settings: Mapping[str, Any]) -> None:
    """Raise ConfigurationError unless the tensors have the shapes that the settings give them."""
    vocabulary, hidden = settings["vocab_size"], settings["hidden_size"]
    inner, width = settings["intermediate_size"], settings["head_dim"]
    queries = width * settings["num_attention_heads"]
    keys = width * settings["num_key_value_heads"]
    if width % 2 or queries % keys:
        raise ConfigurationError(
            f"{header.path}: {settings['num_attention_heads']} heads of {width} numbers, and "
            f"{settings['num_key_value_heads']} for keys, cannot be: the file contradicts itself"
        )
    shapes = {
        "token_embd": (vocabulary, hidden),
        "output_norm": (hidden,),
        "output": (vocabulary, hidden),
        "attn_norm": (hidden,),
        "attn_q": (queries, hidden),
        "attn_k": (keys, hidden),
        "attn_v": (keys, hidden),
        "attn_q_norm": (width,),
        "attn_k_norm": (width,),
        "attn_output": (hidden, queries),
        "ffn_norm": (hidden,),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
    }
    for name, place in header.tensors.items():
        stem, _, kind = name.rpartition(".")
        in_layer = re.fullmatch(r"blk\.(\d{1,9})\.(.*)", stem)
        layer, part = in_layer.groups() if in_layer else (None, stem)
        shape = shapes.get(part, place.shape)
        shape = shape[:1] if kind == "bias" else shape
        if place.shape != shape:
            raise ConfigurationError(
                f"{header.path}: its tensor {name} has the shape {_by(place.shape)}, and its "
                f"metadata say {_by(shape)}: the file contradicts itself"
            )
        if layer is not None and int(layer) >= settings["num_hidden_layers"]:
            raise ConfigurationError(
                f"{header.path}: its tensor {name} is of a layer that its metadata do not count: "
                "the file is damaged"
            )
    tokens = header.metadata.get("tokenizer.ggml.tokens", [])
    if not isinstance(tokens, list):
        raise _not_a("tokenizer.ggml.tokens", "a list", tokens, header.path)
    if (num_tokens := len(tokens)) > vocabulary:
        raise ConfigurationError(
            f"{header.path}: its tokenizer has {num_tokens:,} tokens, and its embeddings have "
            f"{vocabulary:,} rows: the file contradicts itself"
        )


def _by(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def _rope(entry: Any, number: Any) -> dict[str, Any]:
    """Return the RoPE parameters as a `config.json` names them."""
    rope = {"rope_theta": number("rope.freq_base", 10000.0), "rope_type": "default"}
    scaling = entry("rope.scaling.type", "none")
    if scaling == "none":
        return rope
    original = entry("rope.scaling.original_context_length", None)
    return rope | {
        "rope_type": scaling,
        "factor": entry("rope.scaling.factor", 1.0),
        **({} if original is None else {"original_max_position_embeddings": original}),
    }


def _ends(header: GGUFHeader) -> list[int]:
    """Return the ids of the tokens that end an answer: end of sequence and end of turn."""
    ids = set()
    for name in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"):
        id_ = header.metadata.get(name)
        if id_ is None:
            continue
        if type(id_) is not int:
            raise _not_a(name, "a whole number", id_, header.path)
        ids.add(id_)
    return sorted(ids)

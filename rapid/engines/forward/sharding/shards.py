"""One rank's part of a checkpoint, of which nothing else is read from disk.

A rank has whole heads and whole columns of the MLP, and a part of the vocabulary.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rapid.checkpoints.digests import digest_of_samples
from rapid.checkpoints.files import read_json
from rapid.engines.forward.linear.four_bits import MXFP4_GROUP, numbers_of_mxfp4
from rapid.errors import ConfigurationError

if TYPE_CHECKING:
    from rapid.engines.forward.sharding.group import Group

_BY_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "qkv_proj", "gate_up_proj")
_BY_COLUMNS = ("o_proj", "down_proj")
_BY_VOCABULARY = ("embed_tokens", "lm_head")
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Shard:
    """Which part of a model a process holds: `rank` of `size`.

    Where there are more processes than key and value heads, several hold the same ones.
    """

    rank: int
    size: int

    def settings(self, model_config: Any, head_dim: int) -> Any:
        """Return transformers' configuration of this part; the counts of heads are divisible."""
        own = copy.deepcopy(model_config)
        own.head_dim = head_dim
        own.num_attention_heads //= self.size
        own.num_key_value_heads = max(own.num_key_value_heads // self.size, 1)
        own.intermediate_size //= self.size
        if hasattr(own, "moe_intermediate_size"):
            own.moe_intermediate_size //= self.size
        own.vocab_size = self.num_ids(model_config.vocab_size)
        own.pad_token_id = None  # may lie in another part
        return own

    def num_ids(self, vocab_size: int) -> int:
        """Return the rows of the vocabulary that each part has; the last one's may be padding."""
        return -(-vocab_size // self.size)

    def part(self, name: str, tensor: Any, model_config: Any) -> torch.Tensor:
        """Return this rank's part of a weight by its name in the checkpoint.

        `tensor` may be a slice of a safetensors file, of which only this part is read, and
        `model_config` is transformers' configuration of the whole model.
        """
        module, kind = name.split(".")[-2:]
        shape = _shape(tensor)
        if module == "experts":
            return self._part_of_experts(kind, tensor, shape)
        if module in _BY_VOCABULARY:
            return self._pad(tensor, shape[0])
        if module in _BY_ROWS:
            rows = [tensor[each] for each in self._rows(module, shape[0], model_config)]
            return _whole(rows[0] if len(rows) == 1 else torch.cat(rows))
        if kind == "sinks":
            return _whole(tensor[self._range(shape[0])])
        if module in _BY_COLUMNS and kind == "weight":
            return _whole(tensor[:, self._range(shape[1])])
        whole = _whole(tensor[:])
        if module in _BY_COLUMNS and self.rank:  # a bias is added once, by the first rank
            return torch.zeros_like(whole)
        return whole

    def _part_of_experts(self, kind: str, tensor: Any, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the part of all experts' weights [experts, in, out] or biases [experts, out].

        So gpt-oss stores them; the columns of gate and up take turns.
        """
        if kind.startswith("gate_up_proj"):
            everything = [slice(None)] * (len(shape) - 1)
            return _whole(tensor[(*everything, self._range(shape[-1]))])
        if kind == "down_proj":
            return _whole(tensor[:, self._range(shape[1])])
        whole = _whole(tensor[:])
        return torch.zeros_like(whole) if self.rank else whole

    def read_mxfp4(self, kind: str, blocks: Any, scales: Any, dtype: torch.dtype) -> torch.Tensor:
        """Return the same of weights in MXFP4, as `numbers_of_mxfp4` takes them."""
        if kind == "gate_up_proj":
            rows = self._range(_shape(blocks)[1])
            return numbers_of_mxfp4(blocks[:, rows], scales[:, rows], dtype)
        columns = self._range(MXFP4_GROUP * _shape(blocks)[2])
        groups = slice(columns.start // MXFP4_GROUP, -(-columns.stop // MXFP4_GROUP))
        numbers = numbers_of_mxfp4(blocks[:, :, groups], scales[:, :, groups], dtype)
        first = columns.start % MXFP4_GROUP
        return _whole(numbers[:, first : first + columns.stop - columns.start])

    def block(
        self, module: str, num_out: int, num_in: int, model_config: Any
    ) -> tuple[list[slice], slice]:
        """Return the rows and columns that this rank has of a projection's weight [out, in]."""
        kind = module.rpartition(".")[2]
        rows = self._rows(kind, num_out, model_config) if kind in _BY_ROWS else [slice(0, num_out)]
        return rows, self._range(num_in) if kind in _BY_COLUMNS else slice(0, num_in)

    def _rows(self, module: str, length: int, model_config: Any) -> list[slice]:
        """Return this rank's rows of a projection, which may be several that are stored as one."""
        heads, kv_heads = model_config.num_attention_heads, model_config.num_key_value_heads
        copies = max(self.size // kv_heads, 1)  # processes that hold the same KV heads
        if module in ("k_proj", "v_proj"):
            return [self._range(length, copies=copies)]
        if module == "qkv_proj":
            head_dim = length // (heads + 2 * kv_heads)
            keys, values = heads * head_dim, (heads + kv_heads) * head_dim
            return [
                self._range(keys),
                self._range(values - keys, keys, copies),
                self._range(length - values, values, copies),
            ]
        if module == "gate_up_proj":
            return [self._range(length // 2), self._range(length // 2, length // 2)]
        return [self._range(length)]

    def _range(self, length: int, first: int = 0, copies: int = 1) -> slice:
        """Return this rank's share of `length` rows from `first` on, which `copies` ranks have."""
        share = length * copies // self.size
        start = first + self.rank // copies * share
        return slice(start, start + share)

    def _pad(self, table: Any, vocab_size: int) -> torch.Tensor:
        share = self.num_ids(vocab_size)
        start = min(self.rank * share, vocab_size)
        rows = _whole(table[start : min(start + share, vocab_size)])
        padding = rows.new_zeros(share - len(rows), *rows.shape[1:])
        return torch.cat((rows, padding))


@dataclass(frozen=True, slots=True)
class RankPart:
    """A rank's part of a model, and its connection to the others."""

    shard: Shard
    group: Group


def read_shard(
    source: str, shard: Shard, dtype: torch.dtype, model_config: Any
) -> dict[str, torch.Tensor]:
    """Read one rank's part of a checkpoint's safetensors files, by transformers' names.

    Weights in MXFP4 are read as the numbers that they stand for, one tensor at a time.
    `model_config` is that of the whole model, as in `Shard.part`.
    """
    from safetensors import safe_open

    places: dict[str, Any] = {}
    for path in weight_files(source):
        file: Any = safe_open(path, framework="pt")
        places |= dict.fromkeys(file.keys(), file)
    weights = {}
    for name, file in places.items():
        own = file.get_slice(name)
        stem, _, kind = name.rpartition("_")
        scales = f"{stem}_scales"
        if kind == "blocks" and scales in places:
            codes = own, places[scales].get_slice(scales)
            weights[stem] = shard.read_mxfp4(stem.rpartition(".")[2], *codes, dtype)
        elif name != scales or f"{stem}_blocks" not in places:
            weights[name] = shard.part(name, own, model_config).to(dtype)
    return weights


def shard_weights(
    weights: Mapping[str, torch.Tensor], shard: Shard, model_config: Any
) -> dict[str, torch.Tensor]:
    """Return one rank's part of weights that are in memory; see `read_shard`."""
    return {
        name: shard.part(name, tensor, model_config).clone() for name, tensor in weights.items()
    }


def weight_files(source: str) -> list[Path]:
    """Return a checkpoint's safetensors files in order, or raise ConfigurationError."""
    from transformers.utils.hub import cached_file

    index = read_json(source, _INDEX)
    names = sorted(set(index["weight_map"].values())) if index else ["model.safetensors"]
    try:
        return [Path(str(cached_file(source, name))) for name in names]
    except OSError as error:
        raise ConfigurationError(
            f"model {source!r}: no safetensors weights could be read"
        ) from error


def fingerprint(source: str) -> str:
    """Return a digest of a checkpoint's settings and of a sample of its weights."""
    # Ranks that have read different files would compute nonsense together, also those of one model
    # that was trained further in two ways.
    digest = blake2b(json.dumps(read_json(source, "config.json"), sort_keys=True).encode())
    for path in [Path(source)] if Path(source).is_file() else weight_files(source):
        digest.update(digest_of_samples(path).encode())
    return digest.hexdigest()


def _shape(tensor: Any) -> tuple[int, ...]:
    return tuple(tensor.get_shape() if hasattr(tensor, "get_shape") else tensor.shape)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous()

"""A decoder with fused operations for the supported model families.

Llama, Qwen2 and Qwen3 differ in a bias and in a norm of queries and keys. transformers' own forward
of them is the specification, but it spends more time on a small model's many small operations than
on its weights. Here projections that read the same input are one product, a norm is one call, and
queries and keys are rotated together.

The fused weights replace the model's own, which become views of them: nothing is held twice, and
transformers' forward keeps working on the same numbers. So do weights in eight bits, whose products
are our own (`rapid.engines.forward.products`). transformers' forward computes where a projection is
anything else (weights that its own methods quantize, layers that accelerate moves).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import embedding, rms_norm, silu

from rapid.engines.attention.ragged import ragged_attention
from rapid.engines.attention.rows import RaggedRows
from rapid.engines.forward.products import Product, QuantizedLinear
from rapid.engines.forward.shards import Place

NUM_PROJECTIONS = 7  # linear projections of a layer


@dataclass(frozen=True, slots=True)
class _Layer:
    """The weights of one layer.

    Attributes:
        module: attention module of the model; its `layer_idx` selects the layer of the cache.
        before_attention: weight of the norm before attention.
        qkv: projection to queries, keys and values, [(heads + 2 kv_heads) * head_dim, hidden].
        qk_norm: copy of the norm weights of all heads, [heads + kv_heads, head_dim], or None.
        output: projection of attention's output.
        before_mlp: weight of the norm before the MLP.
        gate_up: gate and up projections of the MLP, [2 * intermediate, hidden].
        down: down projection of the MLP.
    """

    module: torch.nn.Module
    before_attention: torch.Tensor
    qkv: Product
    qk_norm: torch.Tensor | None
    output: Product
    before_mlp: torch.Tensor
    gate_up: Product
    down: Product


def decoder_of(model: Any, place: Place | None = None) -> Decoder | None:
    """Return a decoder of a transformers model of a supported family and fuse its weights in place.

    With a place, the model is one rank's part of it, and the decoder computes with the other ranks.

    The decoder is None where transformers' forward must compute. A second decoder of the same model
    uses the weights as the first one fused them.
    """
    modules = list(model.model.modules())
    kinds = (torch.nn.Linear, QuantizedLinear)
    projections = [module for module in modules if isinstance(module, kinds)]
    is_plain = (
        len({type(projection) for projection in projections}) == 1
        and type(projections[0]) in kinds
        and len(projections) == NUM_PROJECTIONS * len(model.model.layers)
        and not any(hasattr(module, "_hf_hook") for module in modules)
        and getattr(model.config, "quantization_config", None) is None
        and all(layer.mlp.gate_proj.bias is None for layer in model.model.layers)
        and model.config.hidden_act == "silu"
    )
    return Decoder(model, place) if is_plain else None


class Decoder:
    """A decoder over ragged rows whose hidden states are those of transformers' ``model.model``."""

    def __init__(self, model: Any, place: Place | None = None) -> None:
        config = model.config
        self._place = place
        self._num_heads = config.num_attention_heads
        self._num_kv_heads = config.num_key_value_heads
        self._head_dim = model.model.layers[0].self_attn.head_dim
        self._epsilon = config.rms_norm_eps
        self._tokens = model.model.embed_tokens.weight
        self._rotary = model.model.rotary_emb
        self._last_norm = model.model.norm.weight
        self._layers = [self._fused(layer) for layer in model.model.layers]

    def __call__(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, rows: RaggedRows
    ) -> torch.Tensor:
        """Run all layers and the last norm.

        Args:
            input_ids: [1, rows].
            position_ids: [1, rows].
            rows: the same rows with the cache slots that attention reads and writes.

        Returns:
            [1, rows, hidden].
        """
        hidden = self._embedded(input_ids[0])
        angles = self._angles(position_ids[0], hidden.dtype)
        for layer in self._layers:
            hidden = hidden + self._summed(self._attention(layer, hidden, *angles, rows))
            hidden = hidden + self._summed(self._mlp(layer, hidden))
        return self._norm(hidden, self._last_norm)[None]

    def _embedded(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of tokens [rows, hidden], each from the rank that has its row."""
        if self._place is None:
            return embedding(token_ids, self._tokens)
        own_ids = token_ids - self._place.shard.rank * len(self._tokens)
        is_elsewhere = (own_ids < 0) | (own_ids >= len(self._tokens))
        found = embedding(own_ids.masked_fill(is_elsewhere, 0), self._tokens)
        return self._summed(found.masked_fill(is_elsewhere[:, None], 0))

    def _summed(self, partial: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks of what each computed with its part of the weights."""
        return partial if self._place is None else self._place.group.sum(partial)

    def _attention(
        self,
        layer: _Layer,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        rows: RaggedRows,
    ) -> torch.Tensor:
        mixed = layer.qkv(self._norm(hidden, layer.before_attention))
        heads = mixed.view(len(mixed), -1, self._head_dim)
        num_rotated = self._num_heads + self._num_kv_heads
        rotated = heads[:, :num_rotated]
        if layer.qk_norm is not None:
            rotated = self._norm(rotated, layer.qk_norm)
        rotated = rotated * cos + rotated.roll(self._head_dim // 2, -1) * sin
        rotated = rotated.transpose(0, 1)[None]
        attended, _ = ragged_attention(
            layer.module,
            rotated[:, : self._num_heads],
            rotated[:, self._num_heads :],
            heads[:, num_rotated:].transpose(0, 1)[None],
            None,
            ragged=rows,
        )
        return layer.output(attended.reshape(len(mixed), -1))

    def _mlp(self, layer: _Layer, hidden: torch.Tensor) -> torch.Tensor:
        gate, up = layer.gate_up(self._norm(hidden, layer.before_mlp)).chunk(2, dim=-1)
        return layer.down(silu(gate) * up)

    def _norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return weight * rms_norm(hidden, hidden.shape[-1:], None, self._epsilon)

    def _angles(
        self, positions: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines [rows, 1, head_dim]; the first half of the sines is negated.

        With that sign, rotating half of the head is a roll multiplied by the sines.
        """
        angles = positions[:, None, None] * self._rotary.inv_freq
        cos, sin = angles.cos(), angles.sin()
        scaling = self._rotary.attention_scaling
        cos, sin = torch.cat((cos, cos), -1) * scaling, torch.cat((-sin, sin), -1) * scaling
        return cos.to(dtype), sin.to(dtype)

    def _fused(self, layer: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        qk_norm = None
        if hasattr(attention, "q_norm"):
            qk_norm = torch.cat(
                (
                    attention.q_norm.weight.expand(self._num_heads, -1),
                    attention.k_norm.weight.expand(self._num_kv_heads, -1),
                )
            )
        return _Layer(
            module=attention,
            before_attention=layer.input_layernorm.weight,
            qkv=_product(attention.q_proj, attention.k_proj, attention.v_proj),
            qk_norm=qk_norm,
            output=_product(attention.o_proj),
            before_mlp=layer.post_attention_layernorm.weight,
            gate_up=_product(mlp.gate_proj, mlp.up_proj),
            down=_product(mlp.down_proj),
        )


def _product(*projections: torch.nn.Module) -> Product:
    """Return the product with the weights of projections of the same rows, one below the other."""
    first = projections[0]
    scale = _fuse("scale", *projections) if isinstance(first, QuantizedLinear) else None
    bias = None if first.bias is None else _fuse("bias", *projections)
    return Product(_fuse("weight", *projections), scale, bias)


def _fuse(name: str, *projections: torch.nn.Module) -> torch.Tensor:
    """Return the projections' weights (or scales, or biases) as one tensor that they share.

    It has the rows of all, [sum of rows, ...]. Weights that already lie one after the other in
    memory are not copied.
    """
    own: list[torch.Tensor] = [getattr(projection, name).detach() for projection in projections]
    num_rows = [len(tensor) for tensor in own]
    storages = {tensor.untyped_storage().data_ptr() for tensor in own}
    starts = [tensor.storage_offset() for tensor in own]
    stops = [start + tensor.numel() for start, tensor in zip(starts, own, strict=True)]
    if len(storages) == 1 and starts[1:] == stops[:-1]:
        return own[0].as_strided((sum(num_rows), *own[0].shape[1:]), own[0].stride())
    fused = torch.cat(own)
    own.clear()
    for projection, rows in zip(projections, torch.split(fused, num_rows), strict=True):
        getattr(projection, name).data = rows
    if fused.is_cuda:  # the freed parts are too small for the next fused tensor: release them
        torch.cuda.empty_cache()
    return fused

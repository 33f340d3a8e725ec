"""A decoder with fused operations for the supported model families.

Projections that read the same input are one product, and the fused weights replace the model's own.
transformers' forward is the specification, and computes where a projection is anything else:
weights that it quantizes, layers that accelerate moves.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import torch
from torch.nn.functional import embedding

from rapid.engines.attention.kernel_inputs import RaggedRows
from rapid.engines.attention.ragged import attend_to_cache
from rapid.engines.forward.layers.layer_operations import (
    Activation,
    Angles,
    LayerOperations,
    try_out,
)
from rapid.engines.forward.linear.half_products import HalfLinear
from rapid.engines.forward.linear.products import AnyProduct, Product, QuantizedLinear, Rows
from rapid.engines.forward.sharding.shards import RankPart

logger = logging.getLogger(__name__)

# Of numbers of size 1, by torch and by kernels; a number of fp8 may be rounded to its neighbour.
_NEAR = 1 / 8
# Projections that are one product; a checkpoint's own fused ones stand in place of their parts.
_OF_ATTENTION = (("q_proj", "k_proj", "v_proj"), ("qkv_proj",), ("o_proj",))
_OF_MLP = (("gate_proj", "up_proj"), ("gate_up_proj",), ("down_proj",))

Experts = Callable[[torch.Tensor], torch.Tensor]  # a mixture of experts, over rows [rows, hidden]


@dataclass(frozen=True, slots=True)
class _Layer:
    """The weights of one layer."""

    module: Any  # attention module of the model; its `layer_idx` selects the layer of the cache
    rope: str  # name of the layer's rope; see `Decoder._angles`
    window: int | None  # number of last keys that a row attends to; None for all
    sinks: torch.Tensor | None  # see `AttentionInputs`
    before_attention: torch.Tensor
    # Projection to queries, keys and values, [(heads + 2 kv_heads) * head_dim, hidden].
    qkv: AnyProduct
    # Copy of the norm weights of all heads, [heads + kv_heads, head_dim], or None.
    qk_norm: torch.Tensor | None
    output: AnyProduct
    after_attention: torch.Tensor | None  # weight of the norm of attention's output, or None
    before_mlp: torch.Tensor
    mlp: _GatedMLP | Experts
    after_mlp: torch.Tensor | None  # weight of the norm of the MLP's output, or None


@dataclass(frozen=True, slots=True)
class _GatedMLP:
    """The weights of one layer's gated MLP."""

    gate_up: AnyProduct  # gate and up projections, [2 * intermediate, hidden]
    down: AnyProduct
    activation: Activation


def decoder_of(model: Any, place: RankPart | None = None) -> Decoder | None:
    """Return a decoder of a transformers model of a supported family and fuse its weights in place.

    With a place, the model is one rank's part of it, and the decoder computes with the other ranks.
    """
    modules = list(model.model.modules())
    kinds = (torch.nn.Linear, QuantizedLinear, HalfLinear)
    projections = [module for module in modules if isinstance(module, kinds)]
    fused = [each for layer in model.model.layers for each in _projections(layer)]
    is_plain = (
        all(len({*map(type, each)}) == 1 and type(each[0]) in kinds for each in fused)
        and len(projections) == sum(map(len, fused))
        and not any(hasattr(module, "_hf_hook") for module in modules)
        and getattr(model.config, "quantization_config", None) is None
        and all(
            getattr(layer.mlp, name).bias is None
            for layer in model.model.layers
            for names in _OF_MLP
            for name in names
            if hasattr(layer.mlp, name)
        )
    )
    return Decoder(model, place) if is_plain else None


@cache
def layer_kernels_of(plain: LayerOperations, *model: Any) -> LayerOperations | None:
    """Return kernels that do what `plain` does, as `try_out` tries them out, or log why not."""
    try:
        # Needs Triton, which there is beside CUDA.
        from rapid.engines.forward.layers.layer_kernels import LayerKernels

        kernels = LayerKernels(**asdict(plain))
        pairs = zip(try_out(plain, *model), try_out(kernels, *model), strict=True)
        if all(torch.allclose(ours, own, rtol=_NEAR, atol=_NEAR) for own, ours in pairs):
            return kernels
        logger.warning("kernels of layers disagree with torch's operations, which compute instead")
    except Exception:
        logger.warning("kernels of layers fail; torch's operations compute", exc_info=True)
    return None


def _projections(layer: Any) -> list[list[torch.nn.Module]]:
    """Return the projections that a decoder computes, by product; of experts there are none."""
    products = (_OF_ATTENTION, layer.self_attn), (_OF_MLP, layer.mlp)
    return [
        [getattr(of, name) for name in names]
        for each, of in products
        for names in each
        if hasattr(of, names[0])
    ]


class Decoder:
    """A decoder over ragged rows whose hidden states are those of transformers' ``model.model``."""

    def __init__(self, model: Any, place: RankPart | None = None) -> None:
        config = model.config
        self._config = config
        self._place = place
        self._num_heads = config.num_attention_heads
        self._num_kv_heads = config.num_key_value_heads
        self._tokens = model.model.embed_tokens.weight
        self._scale = getattr(model.model.embed_tokens, "embed_scale", None)
        self._rotary = model.model.rotary_emb
        self._last_norm = self._norm_weight(model.model.norm)
        self._layers = [self._fuse(layer) for layer in model.model.layers]
        self._ropes = {layer.rope for layer in self._layers}
        self._operations = self._choose_operations(model.model.layers[0].self_attn.head_dim)

    @property
    def windows(self) -> list[int | None]:
        """Number of last keys that a row attends to, by layer; None for all."""
        return [layer.window for layer in self._layers]

    @property
    def frequencies(self) -> torch.Tensor | None:
        """Radians by which keys turn in a position, [rotated / 2]; None if layers differ."""
        if len(self._ropes) > 1:
            return None
        (rope,) = self._ropes
        frequencies: torch.Tensor = getattr(self._rotary, f"{rope}inv_freq")
        return frequencies

    def __call__(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, rows: RaggedRows
    ) -> torch.Tensor:
        """Run all layers and the last norm.

        Ids and positions are [1, rows], the hidden states [1, rows, hidden].
        """
        hidden = self._embed(input_ids[0])
        if self._scale is not None:
            hidden = hidden * self._scale.to(hidden.dtype)
        angles = {rope: self._angles(position_ids[0], hidden.dtype, rope) for rope in self._ropes}
        added, after = None, None  # what the last part of a layer adds, and the weight of its norm
        for layer in self._layers:
            hidden, rows_in = self._operations.add_norm(
                hidden, added, after, layer.before_attention, layer.qkv
            )
            attended = self._attention(layer, layer.qkv(rows_in), angles[layer.rope], rows)
            attended = self._sum_ranks(attended)
            into = layer.mlp.gate_up if isinstance(layer.mlp, _GatedMLP) else None
            hidden, rows_in = self._operations.add_norm(
                hidden, attended, layer.after_attention, layer.before_mlp, into
            )
            added, after = self._sum_ranks(self._mlp(layer.mlp, rows_in)), layer.after_mlp
        _, normed = self._operations.add_norm(hidden, added, after, self._last_norm)
        assert isinstance(normed, torch.Tensor)
        return normed[None]

    def _choose_operations(self, head_dim: int) -> LayerOperations:
        """Return the operations by torch, or on CUDA by kernels where those do the same."""
        plain = LayerOperations(
            self._num_heads, self._num_kv_heads, head_dim, self._config.rms_norm_eps
        )
        weight, norm = self._tokens, self._last_norm
        if not weight.is_cuda:
            return plain
        rope = self._layers[0].rope
        rotated = 2 * len(getattr(self._rotary, f"{rope}inv_freq"))
        kernels = layer_kernels_of(
            plain, weight.device, weight.dtype, norm.dtype, weight.shape[1], rotated
        )
        has_kernels = kernels is not None
        if self._place is not None:  # all ranks round in the same places
            has_kernels = self._place.group.all(has_kernels)
        return kernels if kernels is not None and has_kernels else plain

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of tokens [rows, hidden], each from the rank that has its row."""
        if self._place is None:
            return embedding(token_ids, self._tokens)
        own_ids = token_ids - self._place.shard.rank * len(self._tokens)
        is_elsewhere = (own_ids < 0) | (own_ids >= len(self._tokens))
        found = embedding(own_ids.masked_fill(is_elsewhere, 0), self._tokens)
        return self._sum_ranks(found.masked_fill(is_elsewhere[:, None], 0))

    def _sum_ranks(self, partial: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks of what each computed with its part of the weights."""
        return partial if self._place is None else self._place.group.sum(partial)

    def _attention(
        self, layer: _Layer, mixed: torch.Tensor, angles: Angles, rows: RaggedRows
    ) -> torch.Tensor:
        """Return what attention adds, [rows, hidden], of queries, keys and values in one tensor."""
        index = int(layer.module.layer_idx)
        rows = rows.of_layer(index)
        stored = self._operations.store_heads(
            mixed, angles, layer.qk_norm, rows.cache, index, rows.slots_on(mixed.device)
        )
        attended = attend_to_cache(
            index, *stored, rows, layer.module.scaling, layer.window, layer.sinks
        )
        flat = attended.reshape(len(mixed), -1)
        return layer.output(self._operations.prepare(flat, layer.output))

    def _mlp(self, mlp: _GatedMLP | Experts, rows_in: Rows) -> torch.Tensor:
        if isinstance(mlp, _GatedMLP):
            return mlp.down(self._operations.gate(mlp.gate_up(rows_in), mlp.activation, mlp.down))
        assert isinstance(rows_in, torch.Tensor)
        return mlp(rows_in)

    def _norm_weight(self, norm: Any) -> torch.Tensor:
        """Return the factors of a norm, in float32 where the family multiplies in it."""
        weight: torch.Tensor = norm.weight
        if self._config.model_type == "gemma3_text":  # which stores them less one
            return 1 + weight.float()
        return weight.float() if self._config.model_type == "gpt_oss" else weight

    def _angles(self, positions: torch.Tensor, dtype: torch.dtype, rope: str) -> Angles:
        """Return cosines and sines [rows, 1, rotated]; the first half of the sines is negated."""
        angles = positions[:, None, None] * getattr(self._rotary, f"{rope}inv_freq")
        cos, sin = angles.cos(), angles.sin()
        scaling = getattr(self._rotary, f"{rope}attention_scaling")
        # With the negated half, rotating half of the head is a roll multiplied by the sines.
        cos, sin = torch.cat((cos, cos), -1) * scaling, torch.cat((-sin, sin), -1) * scaling
        return cos.to(dtype), sin.to(dtype)

    def _fuse(self, layer: Any) -> _Layer:
        attention = layer.self_attn
        qk_norm = None
        if hasattr(attention, "q_norm"):
            qk_norm = torch.cat(
                (
                    self._norm_weight(attention.q_norm).expand(self._num_heads, -1),
                    self._norm_weight(attention.k_norm).expand(self._num_kv_heads, -1),
                )
            )
        after_attention, before_mlp, after_mlp = None, layer.post_attention_layernorm, None
        if hasattr(layer, "pre_feedforward_layernorm"):
            after_attention = self._norm_weight(layer.post_attention_layernorm)
            before_mlp = layer.pre_feedforward_layernorm
            after_mlp = self._norm_weight(layer.post_feedforward_layernorm)
        layer_types = getattr(self._config, "layer_types", None)
        layer_type = layer_types[attention.layer_idx] if layer_types else None
        slides = layer_type in (None, "sliding_attention")
        return _Layer(
            module=attention,
            rope=f"{layer_type}_" if hasattr(self._rotary, f"{layer_type}_inv_freq") else "",
            window=getattr(self._config, "sliding_window", None) if slides else None,
            sinks=attention.sinks.float() if hasattr(attention, "sinks") else None,
            before_attention=self._norm_weight(layer.input_layernorm),
            qkv=_product(attention, "qkv_proj", "q_proj", "k_proj", "v_proj"),
            qk_norm=qk_norm,
            output=_product(attention, "o_proj"),
            after_attention=after_attention,
            before_mlp=self._norm_weight(before_mlp),
            mlp=_mlp_of(layer.mlp),
            after_mlp=after_mlp,
        )


def _mlp_of(mlp: Any) -> _GatedMLP | Experts:
    if hasattr(mlp, "experts"):
        # That of gpt-oss returns the scores of its router as well.
        return lambda hidden: mlp(hidden[None])[0].view(hidden.shape)
    activation = mlp.act_fn if hasattr(mlp, "act_fn") else mlp.activation_fn
    gate_up = _product(mlp, "gate_up_proj", "gate_proj", "up_proj")
    return _GatedMLP(gate_up, _product(mlp, "down_proj"), activation)


def _product(module: Any, own: str, *parts: str) -> AnyProduct:
    """Return the product with a projection of the checkpoint's own, or else with its parts'."""
    names = (own,) if hasattr(module, own) else parts
    projections = [getattr(module, name) for name in names]
    if isinstance(projections[0], HalfLinear):
        return projections[0].product
    is_quantized = isinstance(projections[0], QuantizedLinear)
    return Product(
        _fuse("weight", *projections),
        _fuse("scale", *projections) if is_quantized else None,
        None if projections[0].bias is None else _fuse("bias", *projections),
    )


def _fuse(name: str, *projections: torch.nn.Module) -> torch.Tensor:
    """Return the projections' weights (or scales, or biases) as one tensor that they share.

    It has the rows of all, [sum of rows, ...], or those of scales of groups, [groups, sum of rows,
    2]. Weights that already lie one after the other in memory are not copied.
    """
    own: list[torch.Tensor] = [getattr(projection, name).detach() for projection in projections]
    dim = 1 if name == "scale" and own[0].dim() == 3 else 0
    num_rows = [tensor.shape[dim] for tensor in own]
    storages = {tensor.untyped_storage().data_ptr() for tensor in own}
    stride = own[0].stride()
    starts = [tensor.storage_offset() for tensor in own]
    stops = [start + rows * stride[dim] for start, rows in zip(starts, num_rows, strict=True)]
    if len(storages) == 1 and starts[1:] == stops[:-1]:
        shape = list(own[0].shape)
        shape[dim] = sum(num_rows)
        return own[0].as_strided(shape, stride)
    fused = torch.cat(own, dim)
    own.clear()
    for projection, rows in zip(projections, torch.split(fused, num_rows, dim), strict=True):
        getattr(projection, name).data = rows
    if fused.is_cuda:  # the freed parts are too small for the next fused tensor: release them
        torch.cuda.empty_cache()
    return fused

"""Validation of transformers' `quantization_config`, and weights that are published quantized.

transformers drops keywords that it does not know, so a misspelt key would load another precision.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AutoQuantizationConfig

from rapid.engines.forward.linear.four_bits import pack_codes, scales_of
from rapid.engines.forward.linear.products import QuantizedLinear
from rapid.engines.forward.sharding.shards import Shard, weight_files
from rapid.errors import ConfigurationError
from rapid.planning.packed_bits import BITS, StoredBits, StoredMethod

# Names of the text model's weights in Gemma 3 checkpoints that read images as well.
TEXT_NAMES = {r"^(model\.)?language_model\.(model\.)?": "model."}
_CODES = 8  # of four bits in an integer of 32
_ZERO = 8  # the code that stands for zero where none is stored
_PROJECTION = r"model\.layers\.\d+\.(self_attn|mlp)\.\w+_proj"


@dataclass(frozen=True, slots=True)
class _PackedLayout:
    """How a method stores the codes of four bits of a weight [out, in], eight in an integer."""

    codes: str  # the name of their tensor
    scales: str  # of the scales [out, groups]
    zeros: str  # of the zeros [out, groups], eight of a column in an integer
    order: tuple[int, ...] = tuple(range(_CODES))  # place in the integer of each of eight codes
    is_transposed: bool = True  # whether the tensors are [in, out] and [groups, out]
    packs_rows: bool = False  # whether eight codes are of a column; else of a row


# As AutoAWQ ("gemm"), AutoGPTQ and compressed-tensors ("pack-quantized") write them.
_LAYOUTS: dict[StoredMethod, _PackedLayout] = {
    "awq": _PackedLayout("qweight", "scales", "qzeros", (0, 4, 1, 5, 2, 6, 3, 7), packs_rows=True),
    "gptq": _PackedLayout("qweight", "scales", "qzeros"),
    "compressed-tensors": _PackedLayout(
        "weight_packed", "weight_scale", "weight_zero_point", is_transposed=False
    ),
}


class StoredWeights:
    """The weights of a checkpoint that is published quantized, or one rank's part of them."""

    def __init__(
        self, source: str, stored: StoredBits, shard: Shard | None, model_config: Any
    ) -> None:
        """Open the files of a checkpoint; their tensors are read as they are asked for.

        `model_config` is transformers' configuration of the whole model.

        Raises:
            ConfigurationError: more is quantized than the projections of layers.
        """
        self._source = source
        self._stored = stored
        self._layout = _LAYOUTS[stored.method]
        self._shard = shard or Shard(0, 1)
        self._config = model_config
        self._places: dict[str, tuple[Any, str]] = {}  # by transformers' names: file, own name
        ((pattern, base),) = TEXT_NAMES.items()
        for path in weight_files(source):
            file: Any = safe_open(path, framework="pt")
            for name in file.offset_keys():
                self._places[re.sub(pattern, base, name)] = file, name
        of_scales = f".{self._layout.scales}"
        modules = [n.removesuffix(of_scales) for n in self._places if n.endswith(of_scales)]
        if others := [each for each in modules if not re.fullmatch(_PROJECTION, each)]:
            raise ConfigurationError(
                f"model {source!r} stores {others[0]} quantized ({stored}), and only projections "
                "of layers are read so: take another checkpoint of it"
            )
        self._shapes = {module: self._shape(module) for module in modules}

    def read_others(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Return what is not quantized, and zeros that take no memory in place of the rest."""
        weights = {}
        for name in self._places:
            module, _, kind = name.rpartition(".")
            is_ours = name.startswith(("model.", "lm_head.")) and kind in ("weight", "bias")
            if is_ours and (module not in self._shapes or kind == "bias"):
                weights[name] = self._shard.part(name, self._tensor(name), self._config).to(dtype)
        for module in self._shapes:
            rows, columns = self._block(module)
            num_out = sum(each.stop - each.start for each in rows)
            zero = torch.zeros((), dtype=dtype)
            weights[f"{module}.weight"] = zero.expand(num_out, columns.stop - columns.start)
        return weights

    def pack(self, model: torch.nn.Module, device: torch.device) -> None:
        """Replace the layers whose weights are zeros by quantized ones on a device, one by one."""
        layers = dict(model.named_modules())
        read = self._read_codes if self._stored.bits == BITS else self._read_fp8
        for module in self._shapes:
            if module not in layers:
                raise ConfigurationError(
                    f"model {self._source!r} stores {module}, which its config.json does not have"
                )
            parent, _, name = module.rpartition(".")
            bias: torch.Tensor | None = layers[module].bias
            # AutoGPTQ stores one of each layer, of zeros where the model has none.
            stored_bias = f"{module}.bias" if bias is None else None
            if stored_bias in self._places and self._tensor(stored_bias)[:].any():
                raise ConfigurationError(
                    f"model {self._source!r} has a bias of {module}, which its family does not have"
                )
            own_bias = None if bias is None else bias.detach().to(device)
            quantized = QuantizedLinear(*read(module, device), own_bias)
            setattr(layers[parent], name, quantized)

    def _read_fp8(self, module: str, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        rows, columns = self._block(module)
        file, name = self._places[f"{module}.{self._layout.scales}"]
        scale = file.get_tensor(name).float().flatten().expand(self._shapes[module][0])
        scale = torch.cat([scale[each] for each in rows]).to(device)
        return self._read(f"{module}.weight", rows, columns).to(device), scale

    def _read_codes(self, module: str, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        layout, num_in = self._layout, self._shapes[module][1]
        rows, columns = self._block(module)
        group = self._stored.group or num_in
        self._check_groups(module, group)
        num_columns = columns.stop - columns.start
        groups = slice(columns.start // group, -(-columns.stop // group))
        scale = self._read(f"{module}.{layout.scales}", rows, groups).to(device)
        zero: torch.Tensor | int = _ZERO
        if f"{module}.{layout.zeros}" in self._places:
            zeros = self._read_eights(f"{module}.{layout.zeros}", rows, groups, 0, device)
            zero = zeros.to(torch.int32) + self._stored.zero_offset
        # A part of a group, or of a longer one than torch takes, is a group with its scale.
        own = self._stored.group_for(num_columns)
        scales = scales_of(scale, zero).transpose(0, 1).repeat_interleave(group // own, 0)
        first = columns.start % group // own
        scales = scales[first : first + num_columns // own].contiguous()
        dim = 0 if layout.packs_rows else 1
        codes = self._read_eights(f"{module}.{layout.codes}", rows, columns, dim, device)
        return pack_codes(codes, len(scales)), scales

    def _check_groups(self, module: str, group: int) -> None:
        """Check that the groups in the file are what the settings say."""
        num_out, num_in = self._shapes[module]
        shape = [num_out, num_in // group]
        shape = shape[::-1] if self._layout.is_transposed else shape
        index = f"{module}.g_idx"
        is_right = list(self._tensor(f"{module}.{self._layout.scales}").get_shape()) == shape
        if is_right and index in self._places:
            is_right = torch.equal(self._tensor(index)[:].long(), torch.arange(num_in) // group)
        if not is_right:
            raise ConfigurationError(
                f"model {self._source!r}: {module} has other groups than its config.json says, or "
                "columns in the order of activations: take another checkpoint of it"
            )

    def _block(self, module: str) -> tuple[list[slice], slice]:
        """Return the rows and columns of a weight that this rank has."""
        return self._shard.block(module, *self._shapes[module], self._config)

    def _read_eights(
        self, name: str, rows: list[slice], columns: slice, dim: int, device: torch.device
    ) -> torch.Tensor:
        """Return codes [out, in] of which eight along a dimension are stored as an integer."""
        if dim == 0:
            rows = [_eighth(each) for each in rows]
        else:
            columns = _eighth(columns)
        packed = self._read(name, rows, columns).to(device)
        shifts = [BITS * place for place in self._layout.order]
        codes = [(packed >> shift & 15).to(torch.uint8) for shift in shifts]
        return torch.stack(codes, dim + 1).flatten(dim, dim + 1)

    def _read(self, name: str, rows: list[slice], columns: slice) -> torch.Tensor:
        """Return rows and columns of a tensor, [out, in] or [out, groups] however it is stored."""
        tensor = self._tensor(name)
        if self._layout.is_transposed:
            return torch.cat([tensor[columns, each].t() for each in rows])
        return torch.cat([tensor[each, columns] for each in rows])

    def _shape(self, module: str) -> tuple[int, int]:
        """Return the rows and columns of a whole weight."""
        if self._stored.bits != BITS:
            num_out, num_in = self._tensor(f"{module}.weight").get_shape()
            return num_out, num_in
        shape = self._tensor(f"{module}.{self._layout.codes}").get_shape()
        num_out, num_in = shape[::-1] if self._layout.is_transposed else shape
        return (num_out * _CODES, num_in) if self._layout.packs_rows else (num_out, num_in * _CODES)

    def _tensor(self, name: str) -> Any:
        """Return a tensor of the files as a slice that is yet to be read."""
        if name not in self._places:
            raise ConfigurationError(f"model {self._source!r}: the file does not hold {name}")
        file, own_name = self._places[name]
        return file.get_slice(own_name)


def _eighth(codes: slice) -> slice:
    return slice(codes.start // _CODES, codes.stop // _CODES)


def quantization_config(settings: Mapping[str, object]) -> Any:
    """Return transformers' quantization configuration for these settings.

    Raises:
        ConfigurationError: the settings name no known method, have an unknown key, or have a value
            that the method refuses.
    """
    kind = AUTO_QUANTIZATION_CONFIG_MAPPING.get(_method(settings))
    if kind is None:
        methods = ", ".join(sorted(AUTO_QUANTIZATION_CONFIG_MAPPING))
        raise ConfigurationError(
            "quantization names no method that transformers knows: set load_in_4bit or "
            f"load_in_8bit (bitsandbytes), or quant_method to one of {methods}"
        )
    parameters = inspect.signature(kind.__init__).parameters.values()
    named = {each.name for each in parameters if each.kind != each.VAR_KEYWORD}
    known = (named | {"quant_method"}) - {"self"}
    for key in settings:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            meant = f"did you mean {near[0]}?" if near else f"known are {', '.join(sorted(known))}"
            raise ConfigurationError(
                f"quantization.{key}: {kind.__name__} has no such key; {meant}"
            )
    try:
        return AutoQuantizationConfig.from_dict(dict(settings))
    except (ValueError, TypeError, AttributeError, ImportError) as error:
        raise ConfigurationError(f"quantization: {' '.join(str(error).split())}") from error


def _method(settings: Mapping[str, object]) -> str:
    for bits in ("4bit", "8bit"):
        if settings.get(f"load_in_{bits}"):
            return f"bitsandbytes_{bits}"
    return str(settings.get("quant_method"))

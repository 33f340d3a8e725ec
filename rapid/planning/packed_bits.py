"""What is packed in few bits, by `quantization: int4` or as published, and the bits of a weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from rapid.planning.shapes import ModelShape

BITS = 4  # of a weight, beside its group's scale and middle
GROUPS = (128, 64)  # columns of a group; the larger where it divides them
LEAST_GROUP = 32  # that torch packs; a process's share of a published group may be as small
PACKED_ROWS = 64  # torch packs as many rows together on a CPU; on a GPU 8
# Weights that a product with many rows has in bfloat16 at once; on a CPU they stay in its caches.
CONVERTED = {"cpu": 2**19, "cuda": 2**26}
_GROUP_BITS = 32  # scale and middle in bfloat16
_SCALE_BITS = 32  # of a row in fp8: float32

StoredMethod = Literal["awq", "gptq", "compressed-tensors"]
STORED_METHODS = ("awq", "gptq", "compressed-tensors")
MXFP4 = "mxfp4"  # as gpt-oss stores its experts, which are read as the numbers that they stand for


@dataclass(frozen=True, slots=True)
class StoredBits:
    """How a published checkpoint stores the weights of its layers, of those ways that are packed.

    A number in four bits is (code - zero) * scale, one in eight (fp8) the code times the scale.
    """

    method: StoredMethod
    bits: int  # of a code: 4 or 8
    group: int | None  # columns of a row with one scale; None for all
    zero_offset: int = 0  # what is added to the stored zero

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> StoredBits | str:
        """Return what a `quantization_config` of a `StoredMethod` says, or why it is not packed."""
        if settings["quant_method"] == "compressed-tensors":
            return _of_compressed(settings)
        bits, group = settings.get("bits"), settings.get("group_size", 128)
        if bits != BITS:
            return f"its weights have {bits} bits, and 4 are packed"
        if settings["quant_method"] == "awq":
            version = str(settings.get("version", "gemm")).lower()
            if version != "gemm" or not settings.get("zero_point", True):
                return (
                    f"it has AWQ's version {version!r} or no zero points; 'gemm' with them is read"
                )
            return _in_groups("awq", group, 0)
        version = settings.get("checkpoint_format", "gptq")
        if version not in ("gptq", "gptq_v2"):
            return f"its checkpoint_format is {version!r}; gptq and gptq_v2 are read"
        if settings.get("desc_act"):
            return "its columns are in the order of activations (desc_act); others are read"
        if settings.get("dynamic"):
            return "its layers are quantized differently (dynamic)"
        return _in_groups("gptq", group, int(version == "gptq"))  # the first stores zeros less one

    def group_for(self, num_columns: int) -> int:
        """Return the columns of a group where a process packs so many, a multiple of 64."""
        whole = gcd(self.group or num_columns, num_columns)
        return next((group for group in GROUPS if whole % group == 0), LEAST_GROUP)

    def __str__(self) -> str:
        """Say what it is in a few words, such as ``gptq, 4 bits in groups of 128``."""
        kind = "fp8" if self.bits != BITS else f"{self.bits} bits"
        scale = f"in groups of {self.group}" if self.group else "with a scale for each row"
        return f"{self.method}, {kind} {scale}"


def _in_groups(method: StoredMethod, group: object, zero_offset: int = 0) -> StoredBits | str:
    if group in (-1, None):
        return StoredBits(method, BITS, None, zero_offset)
    if not isinstance(group, int) or group % LEAST_GROUP or group <= 0:
        return f"its groups have {group} columns, and multiples of {LEAST_GROUP} are packed"
    return StoredBits(method, BITS, group, zero_offset)


def _of_compressed(settings: Mapping[str, Any]) -> StoredBits | str:
    stored_as, schemes = settings.get("format"), list(settings["config_groups"].values())
    if len(schemes) != 1:
        return f"it has {len(schemes)} kinds of quantized layers (config_groups), and one is read"
    weights, rows = schemes[0]["weights"], schemes[0].get("input_activations")
    strategy, bits = weights["strategy"], weights["num_bits"]
    if stored_as == "float-quantized":
        if bits != 8 or strategy not in ("channel", "tensor"):
            return f"its fp8 weights have scales by {strategy!r}; by 'channel' or 'tensor' is read"
        if rows and not rows.get("dynamic"):
            return "its activations have fixed scales; those of a checkpoint 'FP8-dynamic' have not"
        return StoredBits("compressed-tensors", 8, None)
    if stored_as != "pack-quantized":
        return f"its format is {stored_as!r}; float-quantized and pack-quantized are read"
    if bits != BITS or rows or strategy not in ("group", "channel"):
        return f"its weights have {bits} bits by {strategy!r}; 4 by 'group' or 'channel' are packed"
    if weights.get("actorder") in ("group", True):
        return "its columns are in the order of activations (actorder: group); others are read"
    return _in_groups("compressed-tensors", weights.get("group_size"))


def group_of(num_columns: int) -> int:
    """Return the columns of a group of rows that have so many, a multiple of 64."""
    return next((group for group in GROUPS if num_columns % group == 0), GROUPS[-1])


def unpackable(shape: ModelShape) -> str | None:
    """Return what of a model, or of its part, is not a multiple of 64, such as ``80 columns``."""
    counts = {
        "columns": shape.hidden,
        "rows of queries": shape.heads * shape.head_dim,
        "rows of keys": shape.kv_heads * shape.head_dim,
        "rows of the MLP": shape.intermediate,
    }
    return next((f"{n} {name}" for name, n in counts.items() if n % PACKED_ROWS), None)


def find_ungrouped(shape: ModelShape, stored: StoredBits) -> str | None:
    """Return the columns of a whole model that are no whole groups, such as ``80 columns``."""
    counts = {
        "columns": shape.hidden,
        "columns of attention's output": shape.heads * shape.head_dim,
        "columns of the MLP's output": shape.intermediate,
    }
    return next((f"{n} {name}" for name, n in counts.items() if n % (stored.group or 1)), None)


def layer_bits(shape: ModelShape) -> float:
    """Return the bits of a weight in the matrices of the layers, which are no mixtures."""
    return BITS + _GROUP_BITS * _groups_per_weight(shape, group_of)


def layer_bits_of(shape: ModelShape, stored: StoredBits) -> float:
    """Return the same of a published checkpoint as it is packed."""
    if stored.bits == BITS:
        return BITS + _GROUP_BITS * _groups_per_weight(shape, stored.group_for)
    return stored.bits + _SCALE_BITS * _groups_per_weight(shape, lambda num_columns: num_columns)


def _groups_per_weight(shape: ModelShape, group_of: Callable[[int], int]) -> float:
    """Return the groups over the weights, by the columns of a group in a row of so many."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    matrices = (  # columns and rows
        (shape.hidden, queries + 2 * keys + 2 * shape.intermediate),
        (queries, shape.hidden),
        (shape.intermediate, shape.hidden),
    )
    num_groups = sum(rows * columns / group_of(columns) for columns, rows in matrices)
    return shape.layers * num_groups / shape.layer_weights


def unpacking_bytes(shape: ModelShape) -> float:
    """Return the bytes that a product with many rows holds of weights in bfloat16 on a GPU."""
    # Those that it multiplies, and the next ones as they come and as they are put in order.
    return 3 * 2 * min(CONVERTED["cuda"], shape.hidden * 2 * shape.intermediate)

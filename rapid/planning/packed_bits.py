"""What `quantization: int4` packs, and how many bits a weight then takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rapid.planning.shapes import ModelShape

BITS = 4  # of a weight, beside its group's scale and middle
GROUPS = (128, 64)  # columns of a group; the larger where it divides them
PACKED_ROWS = 64  # torch packs as many rows together on a CPU; on a GPU 8
# Weights that a product with many rows has in bfloat16 at once; on a CPU they stay in its caches.
CONVERTED = {"cpu": 2**19, "cuda": 2**26}
_GROUP_BITS = 32  # scale and middle


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


def layer_bits(shape: ModelShape) -> float:
    """Return the bits of a weight in the matrices of the layers, which are no mixtures."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    matrices = (  # columns and rows
        (shape.hidden, queries + 2 * keys + 2 * shape.intermediate),
        (queries, shape.hidden),
        (shape.intermediate, shape.hidden),
    )
    num_groups = shape.layers * sum(
        rows * columns / group_of(columns) for columns, rows in matrices
    )
    return BITS + _GROUP_BITS * num_groups / shape.layer_weights


def unpacking_bytes(shape: ModelShape) -> float:
    """Return the bytes that a product with many rows holds of weights in bfloat16 on a GPU."""
    # Those that it multiplies, and the next ones as they come and as they are put in order.
    return 3 * 2 * min(CONVERTED["cuda"], shape.hidden * 2 * shape.intermediate)

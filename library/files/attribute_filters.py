"""Filters over the attributes of files, in OpenAI's form.

``{"type": "eq", "key": "year", "value": 2025}`` with ``eq, ne, gt, gte, lt, lte, in, nin``, and
``{"type": "and", "filters": [...]}`` with ``and`` and ``or``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from rapid.config import Frozen

Scalar = bool | int | float | str
_COMPARE: Mapping[str, Callable[[Any, Any], bool]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "gt": operator.gt,
    "gte": operator.ge,
    "lt": operator.lt,
    "lte": operator.le,
}


class Comparison(Frozen):
    """A comparison of one attribute with a value, or with the members of a list."""

    type: Literal["eq", "ne", "gt", "gte", "lt", "lte", "in", "nin"]
    key: str = Field(min_length=1, max_length=64)
    value: Scalar | list[Scalar]

    def holds(self, attributes: Mapping[str, Any]) -> bool:
        """Return whether it holds; of an attribute that is not there, only ``ne`` and ``nin`` do.

        Values of different kinds are different, and in no order.
        """
        found = attributes.get(self.key)
        if self.type in ("in", "nin"):
            values = self.value if isinstance(self.value, list) else [self.value]
            is_in = any(_are_alike(found, each) and found == each for each in values)
            return is_in == (self.type == "in")
        if not _are_alike(found, self.value):
            return self.type == "ne"
        return _COMPARE[self.type](found, self.value)


class Combination(Frozen):
    """Filters of which all must hold, or any."""

    type: Literal["and", "or"]
    filters: list[AttributeFilter] = Field(max_length=32)

    def holds(self, attributes: Mapping[str, Any]) -> bool:
        """Return whether they hold together."""
        combine = all if self.type == "and" else any
        return combine(each.holds(attributes) for each in self.filters)


def _kind(data: object) -> str:
    kind = data.get("type") if isinstance(data, dict) else getattr(data, "type", None)
    return "several" if kind in ("and", "or") else "one"


AttributeFilter = Annotated[
    Annotated[Comparison, Tag("one")] | Annotated[Combination, Tag("several")],
    Discriminator(_kind),
]
Combination.model_rebuild()


def _are_alike(one: object, other: object) -> bool:
    """Return whether two values are of one kind: booleans, numbers or strings."""
    if isinstance(one, bool) or isinstance(other, bool):
        return isinstance(one, bool) and isinstance(other, bool)
    numbers = (int, float)
    if isinstance(one, numbers):
        return isinstance(other, numbers)
    return isinstance(one, str) and isinstance(other, str)

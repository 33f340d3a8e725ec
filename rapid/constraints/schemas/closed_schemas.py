"""JSON schemas with closed objects: none has other properties than those that the schema names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import accumulate
from operator import or_
from typing import Any, TypeAlias

from rapid.constraints.schemas.schema_parts import list_in_place, map_parts, walk_schema

_MOST_PASSES = 32  # over a schema, until its references have told what they lead to
_MOST_OTHERS = 64  # names that a part gets of others, which each of many parts may
_OPEN_BY = ("additionalProperties", "patternProperties", "unevaluatedProperties")
_OF_ITEMS = ("items", "prefixItems")
_ANY, _ITEMS = 1, 2  # bits: other properties than named ones, and the items of a list

Part: TypeAlias = dict[str, Any]


def close_schema(schema: Any) -> Any:
    """Return a schema whose objects have no properties but those that it names.

    What is left is valid by the schema as it was given, and a model that rambles ends its answer
    (xgrammar, vLLM's default, does so too). An object that says what else it may have keeps that.
    Where one is told in parts, as by ``allOf``, each part gets the names of the others, whose
    values are theirs to tell: closed by its own, it would forbid them.
    """
    names = _Names(schema)

    def close(part: Any) -> Any:
        if not isinstance(part, dict):
            return part
        closed = map_parts(part, close)
        if isinstance(part.get("properties"), dict):
            others = names.list_others(part)
            if others is not None:
                closed["properties"] |= {name: {} for name in others}
                closed["additionalProperties"] = False
        return closed

    return close(schema)


@dataclass
class _Told:
    """The names of properties that a schema's part, and those beside it, tell of: sets, as bits.

    Attributes:
        known: The names that the part itself has as properties.
        own: The names of which it says anything.
        below: Those, and what the parts say of which it consists.
        beside: What other parts say of the same value.
    """

    known: int = 0
    own: int = 0
    below: int = 0
    beside: int = 0


@dataclass
class _Names:
    """The names of properties that each part of a schema, and those beside it, tell of."""

    root: Any
    _bits: dict[str, int] = field(default_factory=dict)
    _told: dict[int, _Told] = field(default_factory=dict)

    def __post_init__(self) -> None:
        parts = [part for part, _ in walk_schema(self.root)]
        self._told = {id(part): self._read(part) for part in parts}
        # A reference may lead to what is no part, as to an unknown keyword's value.
        groups = {id(part): self._list_groups(part) for part in parts}
        for _ in range(_MOST_PASSES):
            before = [(each.below, each.beside) for each in self._told.values()]
            for part in reversed(parts):
                told = self._told[id(part)]
                told.below |= told.own | self._join(groups[id(part)])
            for part in parts:
                self._spread(part, groups[id(part)])
            self._spread_by_name(parts, groups)
            if before == [(each.below, each.beside) for each in self._told.values()]:
                return
        for told in self._told.values():  # references lead on and on, which is refused elsewhere
            told.beside |= _ANY

    def list_others(self, part: Part) -> list[str] | None:
        """Return the properties of a part's object that other parts tell of; None for any."""
        told = self._told[id(part)]
        others = (told.below | told.beside) & ~(told.known | _ITEMS)
        if others & _ANY or others.bit_count() > _MOST_OTHERS:
            return None
        return [name for name, bit in self._bits.items() if others & bit] if others else []

    def _read(self, part: Part) -> _Told:
        properties, required = part.get("properties"), part.get("required")
        known = self._as_bits(properties if isinstance(properties, dict) else ())
        own = known | self._as_bits(required if isinstance(required, list) else ())
        own |= _ANY * any(part.get(key, False) is not False for key in _OPEN_BY)
        own |= _ITEMS * any(key in part for key in _OF_ITEMS)
        return _Told(known, own, own)

    def _as_bits(self, names: Sequence[Any] | Mapping[str, Any]) -> int:
        texts = (each for each in names if isinstance(each, str))
        return reduce(or_, (self._bits.setdefault(n, 4 << len(self._bits)) for n in texts), 0)

    def _list_groups(self, part: Part) -> list[list[_Told]]:
        """Return what a part consists of: of each group the value follows one, or all of it."""
        groups = defaultdict[Any, list[_Told]](list)
        for key, more in list_in_place(part, self.root):
            if id(more) in self._told:
                groups[id(more) if key == "allOf" else key].append(self._told[id(more)])
        return [*groups.values()]

    @staticmethod
    def _join(groups: Sequence[Sequence[_Told]]) -> int:
        return reduce(or_, (told.below for group in groups for told in group), 0)

    def _spread(self, part: Part, groups: Sequence[Sequence[_Told]]) -> None:
        """Tell each group of a part what the part itself and the other groups say."""
        told = self._told[id(part)]
        sayings = [self._join([group]) for group in groups]
        for group, others in zip(groups, _join_others(sayings), strict=True):
            for each in group:
                each.beside |= told.own | told.beside | others

    def _spread_by_name(
        self, parts: Sequence[Part], groups: Mapping[int, Sequence[Sequence[_Told]]]
    ) -> None:
        """Tell values that have one name in several parts of an object what the others say."""
        by_name = defaultdict[Any, dict[int, _Told]](dict)
        for part in parts:
            told = self._told[id(part)]
            sayings = [told.own, *(self._join([group]) for group in groups[id(part)])]
            if told.beside or sum(map(bool, sayings)) > 1:
                for name, value in _list_members(part):
                    if id(value) in self._told:
                        by_name[name][id(value)] = self._told[id(value)]
        anywhere = by_name[_ANY]
        for name, values in by_name.items():
            same = [*(values if name == _ITEMS else values | anywhere).values()]
            others = _join_others([told.below for told in same])
            for told, more in zip(same, others, strict=True):
                told.beside |= more


def _list_members(part: Part) -> Iterator[tuple[Any, Any]]:
    """Yield the schemas of an object's or a list's members, each with its name."""
    named = part.get("properties")
    if isinstance(named, dict):
        yield from named.items()
    yield _ANY, part.get("additionalProperties")
    patterns = part.get("patternProperties")
    if isinstance(patterns, dict):
        yield from ((_ANY, each) for each in patterns.values())
    for key in _OF_ITEMS:
        given = part.get(key)
        yield from ((_ITEMS, each) for each in (given if isinstance(given, list) else [given]))


def _join_others(sets: Sequence[int]) -> list[int]:
    """Return of each set of bits the union of all others."""
    before = accumulate([0, *sets], or_)
    behind = [*accumulate([0, *reversed(sets)], or_)][::-1][1:]
    return [one | other for one, other in zip(before, behind, strict=False)]

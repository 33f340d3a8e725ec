"""Bounds of JSON schemas: too long, deep or endless ones are refused before they are grammars."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

from rapid.constraints.schemas.closed_schemas import close_schema
from rapid.constraints.schemas.plain_schemas import simplify_schema
from rapid.constraints.schemas.schema_parts import (
    IN_PLACE,
    OF_DEFINITIONS,
    follow_reference,
    list_in_place,
    list_parts,
    walk_schema,
)

MAX_GRAMMAR = 2**15  # bytes: checking the largest takes tens of milliseconds
MAX_DEPTH = 100  # objects and lists in each other: llguidance reads 127, with what it puts around
_MOST_GIVEN = 2**20  # with its annotations, which are left out in some tens of milliseconds
TOO_LONG = f"is too long: {MAX_GRAMMAR} bytes at most"
TOO_DEEP = f"is nested too deeply: {MAX_DEPTH} levels at most"
_MOST_REMAINDERS = 10_000  # a matcher has a state for each: 0.03 s and 4 MB, as 100,000 take 0.8 s
# What one text must match together doubles a state each: 12 take 0.6 s and 17 all memory.
_MOST_PATTERNS = 8
_MOST_PASSES = 32  # over a schema, until its references have told what they lead to


class UnusableGrammar(ValueError):
    """A grammar that cannot be followed; ``str()`` says why and continues the field's name.

    Attributes:
        index: Of the schema that is to blame, of several; None where it is the only one, or none.
    """

    def __init__(self, why: str, index: int | None = None) -> None:
        super().__init__(why)
        self.index = index


def _spell(schema: Any) -> str:
    return json.dumps(schema, separators=(",", ":"), ensure_ascii=False)


def is_too_deep(given: object) -> bool:
    """Return whether a value of JSON has more than `MAX_DEPTH` objects and lists in each other."""
    level = [given] if isinstance(given, dict | list) else []
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for each in level
            for inner in (each.values() if isinstance(each, dict) else each)
            if isinstance(inner, dict | list)
        ]
    return bool(level)


def prepare_schema(given: Any) -> Any:
    """Return a schema as it is compiled, closed and without annotations, if it can be.

    Refused is, by path and keyword, what llguidance would compute without end, whatever its limits:
    it compiles such a schema, and is lost at some token of an answer, in an engine.

    Raises:
        UnusableGrammar: There is such a thing, or the schema is too long or nested too deeply.
    """
    if is_too_deep(given):
        raise UnusableGrammar(TOO_DEEP)
    try:
        num_given = len(_spell(given))
    except (ValueError, TypeError) as error:
        raise UnusableGrammar(f"is no JSON schema: {error}") from None
    plain = simplify_schema(given) if num_given <= _MOST_GIVEN else given
    if len(_spell(plain)) > MAX_GRAMMAR:  # else what follows would take long
        raise UnusableGrammar(TOO_LONG)
    schema = close_schema(plain)
    if len(_spell(schema)) > 2 * MAX_GRAMMAR:  # with the names that parts have of others
        raise UnusableGrammar(TOO_LONG)
    _check_end(schema)
    _check_multiples(schema)
    _check_patterns(schema)
    return schema


def _check_end(root: Any) -> None:
    """Refuse a schema whose values would have no end, as of an object that must have itself."""

    def ends(part: Mapping[str, Any], found: Mapping[int, int]) -> int:
        groups = defaultdict[Any, list[int]](list)
        for key, more in list_in_place(part, root):
            groups[id(more) if key == "allOf" else key].append(found.get(id(more), 1))
        named, required = part.get("properties"), part.get("required")
        least, first = part.get("minItems", 0), part.get("prefixItems")
        needed: list[Any] = []
        if isinstance(least, int) and least > 0:
            needed += first[:least] if isinstance(first, list) else ()
            needed += [part.get("items")] * (least > len(needed))
        if isinstance(named, dict) and isinstance(required, list):
            needed += [named.get(each) for each in required if isinstance(each, str)]
        return int(all(map(any, groups.values())) and all(found.get(id(x), 1) for x in needed))

    if isinstance(root, dict):
        parts = [part for part, _ in walk_schema(root)]
        if not _settle(parts, 0, ends)[id(root)]:
            raise UnusableGrammar("allows no value that ends: a '$ref' must lead back to itself")


def _check_multiples(root: Any) -> None:
    """Refuse a number that is a multiple of numbers with too many remainders together.

    A matcher follows those by all numbers that may stand at one place, as of alternatives.
    """

    def gather(part: Mapping[str, Any], found: Mapping[int, int]) -> int:
        body = {key: value for key, value in part.items() if key not in OF_DEFINITIONS}
        inner = [each for each, _ in list_parts(body)]
        inner += [each for key, each in list_in_place(part, root) if key == "$ref"]
        every = math.lcm(count_own(part), *(found.get(id(each), 1) for each in inner))
        return min(every, _MOST_REMAINDERS + 1)

    def count_own(part: Mapping[str, Any]) -> int:
        return _count_remainders(part.get("multipleOf"))

    parts = list(walk_schema(root))
    found = _settle([part for part, _ in parts], 1, gather)
    for part, place in parts:
        more = [found.get(id(each), 1) for _, each in list_in_place(part, root)]
        numbers = [each for each in (count_own(part), *more) if each > 1]
        is_one = len(numbers) == 1 and "multipleOf" not in part  # which is looked at by itself
        if not is_one and math.lcm(*numbers) > _MOST_REMAINDERS:
            where = f"{place}.multipleOf" if "multipleOf" in part else place
            raise UnusableGrammar(
                "has a number that takes too long to follow: the least common multiple of all "
                f"'multipleOf' of one may be {_MOST_REMAINDERS:,}, without points, at {where}"
            )


def _count_remainders(multiple: object) -> int:
    """Return the number of remainders by a number, of which each digit more has another."""
    if isinstance(multiple, int):
        return abs(multiple) or 1
    if not isinstance(multiple, float) or not math.isfinite(multiple):
        return 1
    _, digits, exponent = Decimal(repr(multiple)).normalize().as_tuple()
    return int("".join(map(str, digits))) * 10 ** max(0, int(exponent)) or 1


def _check_patterns(root: Any) -> None:
    """Refuse a text that must match too many regular expressions together.

    Those of an `allOf` and of what a part's references lead to are added, those of alternatives
    and of an object's parts are not. Objects that are joined may have one part, so that a part has
    the most that any of its own has.
    """
    parts = list(walk_schema(root))
    # References are from another root then.
    has_ids = any(isinstance(part.get(key), str) for part, _ in parts[1:] for key in ("$id", "id"))

    def count(part: Mapping[str, Any], counts: Mapping[int, int]) -> int:
        num = sum(isinstance(part.get(key), str) for key in ("pattern", "format"))
        most_inner = 0
        for key, value in part.items():
            inner = [counts[id(each)] for each, _ in list_parts({key: value})]
            if key == "$ref":
                found = None if has_ids else follow_reference(value, root)
                most = max(counts.values())
                num += most if found is None else counts.get(id(found), 0)
            elif key in IN_PLACE:
                num += sum(inner) if key == "allOf" else max(inner, default=0)
            elif key not in OF_DEFINITIONS:
                most_inner = max([most_inner, *inner])
        return min(num + most_inner, _MOST_PATTERNS + 1)

    counts = _settle([part for part, _ in parts], 0, count)
    # The innermost: those around it have as many.
    for part, place in reversed(parts):
        if counts[id(part)] > _MOST_PATTERNS:
            raise UnusableGrammar(
                f"has more than {_MOST_PATTERNS} regular expressions ('pattern', 'format') "
                f"that one text must match together, at {place}"
            )


def _settle(
    parts: list[dict[str, Any]],
    least: int,
    count: Callable[[Mapping[str, Any], Mapping[int, int]], int],
) -> dict[int, int]:
    """Return the counts of parts, by their ids, of which each may depend on those of others.

    They grow pass by pass, as references may be a circle.

    Raises:
        UnusableGrammar: They do not end.
    """
    counts = {id(part): least for part in parts}
    order = [*parts]
    for _ in range(_MOST_PASSES):
        before = dict(counts)
        order.reverse()  # so that references to what comes before or behind need a pass or two
        for part in order:
            counts[id(part)] = count(part, counts)
        if counts == before:
            return counts
    raise UnusableGrammar("has references ('$ref') that lead from one to the next too often")

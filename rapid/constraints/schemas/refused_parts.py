"""The part of a schema that is to blame for the refusal of the whole."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from rapid.constraints.grammar_checks import TOO_COMPLEX, measure_fault
from rapid.constraints.schemas.schema_parts import OF_DEFINITIONS, list_parts, walk_schema

MOST_CPU_S = 0.5  # of the checking process: as much as one grammar may take
_MOST_TRIED = 40  # parts
_UNKNOWN_KEYS = "Unimplemented keys: "
_REFUSED = "cannot be followed: "
_WORDS = {  # of llguidance, for which a client has no use
    "oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate oneOf with "
    "anyOf": "alternatives of a 'oneOf' may both be right for one value, so use 'anyOf'"
}


def tell_fault(fault: str) -> str:
    """Return why a grammar is refused, as it continues the name of a field."""
    return fault if fault == TOO_COMPLEX else f"{_REFUSED}{_WORDS.get(fault, fault)}"


def name_place(finding: str, schema: Any, write: Callable[[Any], str]) -> str:
    """Return a finding with the place of the keyword that it is about, where it names one.

    Args:
        finding: As `tell_fault` returns it.
        schema: The schema that was refused.
        write: Returns the grammar of a schema.
    """
    if not finding.startswith(_REFUSED):
        return finding  # it is too long, or no schema at all
    _, found, names = finding.partition(_UNKNOWN_KEYS)
    if found:
        keyword = json.loads(names)[0]
        place = next((place for part, place in walk_schema(schema) if keyword in part), "$")
        return f"has a keyword that is not supported: {keyword!r}, at {place}"
    part, place = _Blame(finding, schema, write).find()
    said = [key for key in part if key.lower() in finding.lower()]
    return f"{finding}, at {'.'.join([place, *said[:1]])}"


class _Blame:
    """Finds the smallest part of a schema that is refused for the same reason, by halves."""

    def __init__(self, finding: str, schema: Any, write: Callable[[Any], str]) -> None:
        self._finding, self._schema, self._write = finding, schema, write
        self._shared = {key: schema[key] for key in OF_DEFINITIONS if key in schema}
        self._cpu_s = 0.0

    def find(self) -> tuple[Any, str]:
        """Return the part and its path, or those of a larger one after `MOST_CPU_S`."""
        part, place = self._schema, "$"
        parts = list(list_parts(part, place))
        for _ in range(_MOST_TRIED):
            if not parts or self._cpu_s > MOST_CPU_S:
                break
            half = parts[: (len(parts) + 1) // 2]
            if not self._has_refused([each for each, _ in half]):
                parts = parts[len(half) :]
            elif len(half) > 1:
                parts = half
            else:
                ((part, place),) = half
                parts = list(list_parts(part, place))
        return part, place

    def _has_refused(self, parts: Sequence[dict[str, Any]]) -> bool:
        """Return whether one of some parts is refused, or all are so together."""
        tried = [*parts]
        if len(parts) > 1:
            # Of a property that nothing satisfies is no word, nor of those beside an empty
            # alternative.
            named = {f"{index}": part for index, part in enumerate(parts)}
            tried = [{"properties": named}, {"anyOf": [*parts]}]
        return any(self._is_refused(each) for each in tried)

    def _is_refused(self, part: dict[str, Any]) -> bool:
        fault, cpu_s = measure_fault(self._write(part | self._shared))
        self._cpu_s += cpu_s
        return tell_fault(fault) == self._finding

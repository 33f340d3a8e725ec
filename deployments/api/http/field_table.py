"""What a route does with the fields that clients may send: each is honoured, refused or ignored."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rapid.errors import BadRequest

FieldClass = Literal["honoured", "refused", "ignored"]

_MOST_NAMED = 64  # ignored fields that a receipt names, and characters of each name


@dataclass(frozen=True, slots=True)
class FieldTable:
    """The fields of one route's bodies; one that changes the answer is never ignored.

    Attributes:
        honoured: Those that a body's model has.
        refused: Those that are not supported, each with its values that ask for nothing.
        ignored: Those that are known and change no answer; unknown ones are ignored as well.
        renamed: Those that have another name here, which their refusal tells.
        nested: The tables of honoured fields that are an object, or a list of objects.
    """

    honoured: Collection[str]
    refused: Mapping[str, tuple[Any, ...]]
    ignored: Collection[str] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)
    nested: Mapping[str, FieldTable] = field(default_factory=dict)

    def derive(
        self,
        own: Collection[str],
        refused: Mapping[str, tuple[Any, ...]],
        ignored: Collection[str] = (),
        renamed: Mapping[str, str] | None = None,
        nested: Mapping[str, FieldTable] | None = None,
    ) -> FieldTable:
        """Return the table of a route that takes fields of its `own`, and beside them this one's.

        Of these, what the other arguments name is refused, ignored or called otherwise there.
        """
        renamed, nested = renamed or {}, nested or {}
        apart = {*own, *refused, *ignored, *renamed}
        usual = {name: values for name, values in self.refused.items() if name not in apart}
        honoured = {*own, *({*self.honoured} - apart)}
        return FieldTable(
            honoured,
            usual | dict(refused),
            {*ignored, *({*self.ignored} - apart)},
            renamed,
            {name: each for name, each in {**self.nested, **nested}.items() if name in honoured},
        )

    def find_class(self, name: str) -> FieldClass | None:
        """Return what is done with a field; None if nobody has decided it."""
        if name in self.honoured:
            return "honoured"
        if name in self.refused or name in self.renamed:
            return "refused"
        return "ignored" if name in self.ignored else None

    def list_ignored(self, fields: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the names of a body's fields that change nothing; a null is no field.

        Those of the objects of a list are named once, as ``messages[].name``.

        Raises:
            BadRequest: A field asks for something that is not supported.
        """
        ignored = dict.fromkeys(each[:_MOST_NAMED] for each in self._walk(fields, ""))
        return tuple(ignored)[:_MOST_NAMED]

    def _walk(self, fields: Mapping[str, Any], where: str) -> Iterator[str]:
        """Yield the names of the ignored fields of the object `where`, and of those in it."""
        for name, value in fields.items():
            param = f"{where}{name}"
            if value is None:
                continue
            if name in self.honoured:
                if (table := self.nested.get(name)) is not None:
                    yield from table._walk_objects(value, param)
            elif name in self.renamed:
                called = self.renamed[name]
                raise BadRequest(f"{param} is called {called} here.", param, "unknown_parameter")
            elif (usual := self.refused.get(name)) is None:
                yield re.sub(r"\[[0-9]+\]", "[]", where) + name
            elif not asks_for_nothing(value, usual):
                message = f"{param} is not supported yet: leave it out."
                raise BadRequest(message, param, "unsupported")

    def _walk_objects(self, value: object, where: str) -> Iterator[str]:
        if isinstance(value, Mapping):
            yield from self._walk(value, f"{where}.")
        for index, each in enumerate(value if isinstance(value, list) else ()):
            if isinstance(each, Mapping):
                yield from self._walk(each, f"{where}[{index}].")


def asks_for_nothing(value: object, usual: tuple[Any, ...]) -> bool:
    """Return whether a value is one of the usual ones; to Python, False is equal to 0."""
    return any(
        value == each and isinstance(value, bool) == isinstance(each, bool) for each in usual
    )

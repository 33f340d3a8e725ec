"""What a route does with the fields that clients may send: each is honoured, refused or ignored."""

from __future__ import annotations

from collections.abc import Collection, Mapping
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
    """

    honoured: Collection[str]
    refused: Mapping[str, tuple[Any, ...]]
    ignored: Collection[str] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)

    def derive(
        self,
        own: Collection[str],
        refused: Mapping[str, tuple[Any, ...]],
        ignored: Collection[str] = (),
        renamed: Mapping[str, str] | None = None,
    ) -> FieldTable:
        """Return the table of a route that takes fields of its `own`, and beside them this one's.

        Of these, what the other arguments name is refused, ignored or called otherwise there.
        """
        renamed = renamed or {}
        apart = {*own, *refused, *ignored, *renamed}
        usual = {name: values for name, values in self.refused.items() if name not in apart}
        return FieldTable(
            {*own, *({*self.honoured} - apart)},
            usual | dict(refused),
            {*ignored, *({*self.ignored} - apart)},
            renamed,
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

        Raises:
            BadRequest: A field asks for something that is not supported.
        """
        ignored = []
        for name, value in fields.items():
            if value is None or name in self.honoured:
                continue
            if name in self.renamed:
                called = self.renamed[name]
                raise BadRequest(f"{name} is called {called} here.", name, "unknown_parameter")
            if (usual := self.refused.get(name)) is None:
                ignored.append(name[:_MOST_NAMED])
            elif not asks_for_nothing(value, usual):
                raise BadRequest(f"{name} is not supported yet: leave it out.", name, "unsupported")
        return tuple(ignored[:_MOST_NAMED])


def asks_for_nothing(value: object, usual: tuple[Any, ...]) -> bool:
    """Return whether a value is one of the usual ones; to Python, False is equal to 0."""
    return any(
        value == each and isinstance(value, bool) == isinstance(each, bool) for each in usual
    )

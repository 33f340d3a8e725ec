"""The structure of a package: its rooms, the imports between them, its floors and circles.

A room is a module or a folder at the top level of a package. An arrow says that one room imports
another; imports for type checking count. A circle is a group of rooms that import each other,
directly or through others, and its rooms share a floor. Otherwise a room stands one floor above
the highest room that it imports.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property


@dataclass(frozen=True)
class House:
    """The rooms of a package, each with the rooms that it imports."""

    imports: Mapping[str, frozenset[str]]
    folders: frozenset[str]

    @classmethod
    def read(cls, package: str, sources: Mapping[str, str]) -> House:
        """Return the house of a package, whose modules are given as text by their paths."""
        found: dict[str, set[str]] = defaultdict(set)
        folders = set()
        for path, source in sources.items():
            room, *inner = path.removeprefix(package.replace(".", "/") + "/").split("/")
            if inner:
                folders.add(room)
            if room != "__init__.py":
                found[room.removesuffix(".py")] |= imported(package, source)
        imports = {room: frozenset(names & found.keys() - {room}) for room, names in found.items()}
        return cls(imports, frozenset(folders))

    @property
    def arrows(self) -> list[tuple[str, str]]:
        return sorted((room, other) for room in self.imports for other in self.imports[room])

    @cached_property
    def circle_of(self) -> dict[str, frozenset[str]]:
        """The group that a room belongs to; a room in no circle is alone in its group."""
        below = {room: self._reached_from(room) for room in self.imports}
        return {
            room: frozenset({room} | {other for other in below[room] if room in below[other]})
            for room in self.imports
        }

    @property
    def circles(self) -> set[frozenset[str]]:
        return {circle for circle in self.circle_of.values() if len(circle) > 1}

    @cached_property
    def floor_of(self) -> dict[str, int]:
        """The floor that a room stands on, counted from 1 at the ground."""
        floors: dict[str, int] = {}

        def floor(room: str) -> int:
            circle = self.circle_of[room]
            if room not in floors:
                below = {other for each in circle for other in self.imports[each]} - circle
                floors.update(dict.fromkeys(circle, 1 + max(map(floor, below), default=0)))
            return floors[room]

        return {room: floor(room) for room in self.imports}

    def counts(self) -> dict[str, int]:
        return {
            "rooms": len(self.imports),
            "arrows": len(self.arrows),
            "floors": max(self.floor_of.values()),
            "circles": len(self.circles),
        }

    def _reached_from(self, room: str) -> set[str]:
        reached: set[str] = set()
        to_visit = [room]
        while to_visit:
            new = self.imports[to_visit.pop()] - reached
            reached |= new
            to_visit += new
        return reached


def imported(package: str, source: str) -> set[str]:
    """Return the top-level names of the package that a module imports by absolute imports."""
    inside = package + "."
    names = _imported_names(source)
    return {name.removeprefix(inside).split(".")[0] for name in names if name.startswith(inside)}


@cache  # a module is read for its room, for the room around that, and so on
def _imported_names(source: str) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names

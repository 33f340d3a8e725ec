"""Pictures of packages as houses: the rooms, the arrows between them, the floors and the circles.

    python -m benchmarks.pictures.house                             # house-*-after.svg
    python -m benchmarks.pictures.house --at 3224cd5 --name before  # house-*-before.svg

What is a room, an arrow, a floor and a circle: `benchmarks.pictures.rooms`.
"""

from __future__ import annotations

import argparse
import io
import pathlib
import subprocess
import tarfile
from collections import defaultdict
from collections.abc import Iterable, Mapping
from statistics import mean

import matplotlib

from benchmarks.pictures.rooms import House
from benchmarks.reporting import ROOT

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from matplotlib.path import Path
from matplotlib.textpath import TextPath

PICTURES = ROOT / "docs" / "pictures"
PACKAGES = ("rapid.engines", "deployments", "deployments.api")
TEXT = "#7d8590"  # readable on a light page and on a dark one
ROOM, CIRCLE = "#1f6feb", "#d29922"
FONT_SIZE = 9
HEIGHT, STOREY = 0.26, 0.66  # of a room, and from floor to floor, in inches
GAP = 0.12  # between neighbours on a floor, in inches

Place = tuple[str, int]  # a room's name, and its own floor or one that arrows to it pass


def sources_at(revision: str, package: str, repository: pathlib.Path = ROOT) -> dict[str, str]:
    """Return the modules of a package at a git revision, as text by their paths."""
    command = ["git", "-C", str(repository), "archive", revision, package.replace(".", "/")]
    packed = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        files = {file.name: archive.extractfile(file) for file in archive if file.isfile()}
        return {
            name: file.read().decode()
            for name, file in files.items()
            if file is not None and name.endswith(".py")
        }


class Layout:
    """The places of a house's rooms and arrows: `middles`, in inches from the left.

    All arrows to a room join into one line, which passes the floors in between beside their rooms.
    `links` are the pieces of these lines, each from a place to one on the next floor below.
    """

    def __init__(self, house: House, sweeps: int = 40) -> None:
        self.house = house
        self.links = self._links()
        places = {(room, floor) for room, floor in house.floor_of.items()}
        places |= {place for link in self.links for place in link}
        self.middles = {place: float(at) for at, place in enumerate(sorted(places))}
        for sweep in range(sweeps):
            self._straighten(upwards=sweep % 2 == 1)
        left = min(middle - self.width(place) / 2 for place, middle in self.middles.items())
        self.middles = {place: middle - left for place, middle in self.middles.items()}

    def is_room(self, place: Place) -> bool:
        return self.house.floor_of[place[0]] == place[1]

    def label(self, room: str) -> str:
        return room + "/" * (room in self.house.folders)

    def width(self, place: Place) -> float:
        if not self.is_room(place):
            return 0.0
        text = TextPath((0, 0), self.label(place[0]), size=FONT_SIZE)
        return float(text.get_extents().width) / 72 + 0.2

    def _links(self) -> list[tuple[Place, Place]]:
        floors = self.house.floor_of
        links = set()
        for room, other in self.house.arrows:
            start = (room, floors[room])
            for floor in reversed(range(floors[other], floors[room])):
                links.add((start, (other, floor)))
                start = (other, floor)
        return sorted(links)

    def _straighten(self, upwards: bool) -> None:
        """Move each floor's places towards those they are linked to on the floor seen before."""
        linked: dict[Place, list[Place]] = defaultdict(list)
        for start, end in self.links:
            place, seen = (start, end) if upwards else (end, start)
            linked[place].append(seen)
        for floor in sorted({floor for _, floor in self.middles}, reverse=not upwards):
            wanted = {
                place: mean([self.middles[other] for other in linked[place]] or [middle])
                for place, middle in self.middles.items()
                if place[1] == floor
            }
            for circle in self.house.circles:  # its rooms stay neighbours
                rooms = [(room, floor) for room in circle if self.is_room((room, floor))]
                wanted |= {room: mean([wanted[each] for each in rooms]) for room in rooms}
            row = sorted(wanted, key=lambda place: (wanted[place], place))
            rightwards = self._side_by_side(row, wanted, 1)
            leftwards = self._side_by_side(reversed(row), wanted, -1)
            self.middles |= {each: (rightwards[each] + leftwards[each]) / 2 for each in row}

    def _side_by_side(
        self, row: Iterable[Place], wanted: Mapping[Place, float], sign: int
    ) -> dict[Place, float]:
        """Return the middles of places that are pushed apart to the right, or left for sign -1."""
        middles: dict[Place, float] = {}
        free = -float("inf")
        for place in row:
            half = self.width(place) / 2
            middle = max(sign * wanted[place], free + half)
            middles[place] = sign * middle
            free = middle + half + GAP
        return middles


def draw(house: House, path: pathlib.Path) -> None:
    layout = Layout(house)
    right = max(middle + layout.width(place) / 2 for place, middle in layout.middles.items())
    top = ceiling(house.counts()["floors"])
    style = {"svg.hashsalt": "rapid", "svg.fonttype": "none", "font.size": FONT_SIZE}
    with matplotlib.rc_context(style):
        figure = pyplot.figure(figsize=(right + 0.45, top + 0.3))
        axis = figure.add_axes((0, 0, 1, 1), xlim=(-0.35, right + 0.1), ylim=(-0.2, top + 0.1))
        axis.axis("off")
        draw_floors(axis, house, right)
        draw_arrows(axis, layout)
        draw_rooms(axis, layout)
        figure.savefig(path, metadata={"Date": None}, transparent=True)
        pyplot.close(figure)


def ground(floor: int) -> float:
    return (floor - 1) * STOREY


def ceiling(floor: int) -> float:
    return ground(floor) + HEIGHT


def draw_floors(axis: Axes, house: House, right: float) -> None:
    for floor in range(1, house.counts()["floors"] + 1):
        axis.plot((0, right), [ground(floor) - 0.03] * 2, color=TEXT, lw=0.5, alpha=0.4)
        middle = ground(floor) + HEIGHT / 2
        axis.text(-0.2, middle, str(floor), color=TEXT, ha="center", va="center", fontsize=8)


def draw_rooms(axis: Axes, layout: Layout) -> None:
    for room, floor in layout.house.floor_of.items():
        colour = CIRCLE if len(layout.house.circle_of[room]) > 1 else ROOM
        middle, width = layout.middles[room, floor], layout.width((room, floor))
        corner = middle - width / 2, ground(floor)
        shape = "round,pad=0,rounding_size=0.05"
        axis.add_patch(FancyBboxPatch(corner, width, HEIGHT, shape, ec=colour, fc="none", lw=1.4))
        height = ground(floor) + HEIGHT / 2
        axis.text(middle, height, layout.label(room), color=colour, ha="center", va="center")


def draw_arrows(axis: Axes, layout: Layout) -> None:
    for start, end in layout.links:
        x0, x1 = layout.middles[start], layout.middles[end]
        y0, y1 = ground(start[1]), ceiling(end[1])
        half = (y0 + y1) / 2
        curve(axis, [(x0, y0), (x0, half), (x1, half), (x1, y1)], TEXT, layout.is_room(end))
        if not layout.is_room(end):
            axis.plot((x1, x1), (y1, ground(end[1])), color=TEXT, lw=0.9)
    floors = layout.house.floor_of
    for room, other in layout.house.arrows:
        floor = floors[room]
        if floors[other] == floor:  # a circle's arrow is an arc below its floor
            x0, x1 = layout.middles[room, floor], layout.middles[other, floor]
            y0, y1 = ground(floor), ground(floor) - (STOREY - HEIGHT) / 2
            curve(axis, [(x0, y0), (x0, y1), (x1, y1), (x1, y0)], CIRCLE, has_head=True)


def curve(axis: Axes, points: list[tuple[float, float]], colour: str, has_head: bool) -> None:
    path = Path(points, [Path.MOVETO, Path.CURVE4, Path.CURVE4, Path.CURVE4])
    style = "-|>,head_length=0.4,head_width=0.15" if has_head else "-"
    axis.add_patch(
        FancyArrowPatch(path=path, arrowstyle=style, mutation_scale=9, color=colour, lw=0.9)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--at", default="HEAD", help="git revision (default: HEAD)")
    parser.add_argument("--name", default="after", help="the last word of the pictures' names")
    options = parser.parse_args()
    for package in PACKAGES:
        house = House.read(package, sources_at(options.at, package))
        print(package, *(f"{count} {what}" for what, count in house.counts().items()), sep=", ")
        draw(house, PICTURES / f"house-{package.split('.')[-1]}-{options.name}.svg")


if __name__ == "__main__":
    main()

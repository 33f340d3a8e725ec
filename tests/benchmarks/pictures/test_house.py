"""The counts and the layout of `benchmarks/pictures/house.py`, on a package of a few lines."""

from __future__ import annotations

import itertools
import subprocess

import pytest

from benchmarks.pictures import house
from benchmarks.pictures.rooms import House

SOURCES = {
    "big/tiny/__init__.py": "from big.tiny import door",
    "big/tiny/door.py": "import big.tiny.hall\nfrom big.tiny.cellar.wine import Red",
    "big/tiny/hall.py": "from big import other\nfrom big.tiny import kitchen",
    "big/tiny/kitchen.py": """
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from big.tiny.hall import Hall

def cook():
    from big.tiny.cellar import wine
""",
    "big/tiny/cellar/__init__.py": "",
    "big/tiny/cellar/wine.py": "from big.tiny.cellar import Wine",
}


def test_rooms_arrows_floors_and_circles_are_counted():
    read = House.read("big.tiny", SOURCES)
    assert read.arrows == [
        ("door", "cellar"),
        ("door", "hall"),
        ("hall", "kitchen"),
        ("kitchen", "cellar"),
        ("kitchen", "hall"),
    ]
    assert read.circles == {frozenset({"hall", "kitchen"})}
    assert read.floor_of == {"cellar": 1, "hall": 2, "kitchen": 2, "door": 3}
    assert read.counts() == {"rooms": 4, "arrows": 5, "floors": 3, "circles": 1}


def test_nothing_on_a_floor_overlaps():
    layout = house.Layout(House.read("big.tiny", SOURCES))
    assert ("cellar", 2) in layout.middles  # the arrow from the door passes hall and kitchen
    row = sorted(layout.middles.items(), key=lambda item: item[1])
    for (left, at), (right, then) in itertools.combinations(row, 2):
        if left[1] == right[1]:
            gap = then - at - (layout.width(left) + layout.width(right)) / 2
            assert gap == pytest.approx(house.GAP) or gap > house.GAP


def test_a_package_is_read_as_it_was_committed(tmp_path):
    for path, source in SOURCES.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(source)
    git = ("git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run([*git, "init", "--quiet"], check=True)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "--quiet", "--message", "A house"], check=True)
    (tmp_path / "big/tiny/door.py").write_text("import nothing")
    assert house.sources_at("HEAD", "big.tiny", tmp_path) == SOURCES
    house.draw(House.read("big.tiny", SOURCES), tmp_path / "house.svg")
    assert "kitchen</text>" in (tmp_path / "house.svg").read_text()

"""The diagram of docs/structure.md names rooms that exist."""

from __future__ import annotations

import re

from benchmarks.pictures.request_trace import PAGE, draw, room_of
from benchmarks.reporting import ROOT


def test_the_page_names_rooms_that_there_are():
    calls = re.findall(r"^  (\S+) -- \d+ --> (\S+)$", PAGE.read_text(), flags=re.MULTILINE)
    assert len(calls) > 5
    for room in {each for call in calls for each in call}:
        path = ROOT / room.replace(".", "/")
        assert path.is_dir() or path.with_suffix(".py").is_file(), room


def test_a_room_is_a_folder_or_module_at_the_top_level_of_a_package():
    assert room_of(f"{ROOT}/rapid/engines/kv/rings.py") == "rapid.engines"
    assert room_of(f"{ROOT}/rapid/pair/pair.py") == "rapid.pair"
    assert room_of(f"{ROOT}/tests/toy.py") is None
    assert room_of("/usr/lib/python3/typing.py") is None
    assert draw([("a.b", "c.d")]).splitlines()[2] == "  a.b -- 1 --> c.d"

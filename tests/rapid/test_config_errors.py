"""Findings in a settings file name its keys as they are written there."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from rapid.config import Frozen
from rapid.config_errors import read_yaml, validate
from rapid.errors import ConfigurationError


class Shelf(Frozen):
    width: int


class Room(Frozen):
    height: int
    shelf: Shelf | Literal["none"] = "none"
    shelves: tuple[Shelf, ...] = ()


def findings(settings: object) -> list[str]:
    with pytest.raises(ConfigurationError) as refused:
        validate(Room, settings, prefix="room.yaml: ", top="room")
    return str(refused.value).splitlines()


def test_settings_without_a_fault_are_the_model() -> None:
    settings = {"height": 2, "shelf": {"width": 1}}
    assert validate(Room, settings, prefix="", top="room") == Room(height=2, shelf=Shelf(width=1))


@pytest.mark.parametrize(
    ("settings", "finding"),
    [
        ({}, "room.yaml: height: Field required"),
        ({"height": 1, "hight": 2}, "room.yaml: hight: unknown key; did you mean height?"),
        ({"height": 1, "sofa": 2}, "room.yaml: sofa: unknown key"),
        (
            {"height": 1, "shelves": [{"width": 1}, {"width": 1, "witdh": 2}]},
            "room.yaml: shelves.1.witdh: unknown key; did you mean width?",
        ),
        (["height"], "room.yaml: room: Input should be a valid dictionary or instance of Room"),
    ],
)
def test_a_finding_names_the_key_as_the_file_writes_it(settings: object, finding: str) -> None:
    assert findings(settings) == [finding]


def test_every_finding_has_a_line_and_a_union_s_members_are_not_named() -> None:
    lines = findings({"height": "tall", "shelf": {"width": "wide"}})
    assert [line.split(": ")[1] for line in lines] == ["height", "shelf.width", "shelf"]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"a: [", "is not YAML"),
        (b"\xff", "is not YAML"),
        (b"", "is empty: start from example.yaml"),
        (b"- 1", "is no configuration, which has keys: start from example.yaml"),
        (None, "cannot be read: No such file"),
    ],
)
def test_a_file_without_a_mapping_is_refused(
    tmp_path: Path, content: bytes | None, sentence: str
) -> None:
    path = tmp_path / "room.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=sentence) as refused:
        read_yaml(path, "example.yaml")
    assert str(path) in str(refused.value)


def test_a_file_with_a_mapping_is_read(tmp_path: Path) -> None:
    (tmp_path / "room.yaml").write_text("height: 2")
    assert read_yaml(tmp_path / "room.yaml", "example.yaml") == {"height": 2}

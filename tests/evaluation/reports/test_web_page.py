"""The page of a run as one file, in which a browser finds everything."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from evaluation.reports.report import WEB_PAGE, write
from evaluation.reports.web_page import render_page
from tests.evaluation.reports.handmade import result, run_dir, task

SHIPPED = ("plain", "rapid-adaptive", "rag-both", "mixture")


class Read(HTMLParser):
    """What a page has: its elements, ids, references within it and out of it, by picture."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            self.ids += [value or ""] if name == "id" else []
            self.links += [value or ""] if name in ("src", "href", "xlink:href", "srcset") else []


@pytest.fixture
def page(tmp_path: Path) -> str:
    judged = {"drafted": 12, "accepted": 9, "rounds": 3, "by_position": ((3, 3), (3, 2))}
    lines = [
        result(number, name, float(number % 3 < place), **(judged if place else {}))
        for number in range(12)
        for place, name in enumerate(SHIPPED)
    ]
    out = run_dir(tmp_path / "run", task(*SHIPPED), lines)
    write(out)
    return (out / WEB_PAGE).read_text()


def test_nothing_is_loaded_from_elsewhere(page: str) -> None:
    read = Read(page)
    assert not {"script", "img", "link", "iframe"} & set(read.tags)
    assert all(link.startswith("#") for link in read.links)
    assert {link[1:] for link in read.links} <= set(read.ids)
    assert not re.search(r"url\((?!#)|@import", page)
    assert "default-src 'none'" in page


def test_pictures_do_not_share_their_parts(page: str) -> None:
    read = Read(page)
    assert read.tags.count("svg") == 4  # accuracy, won and lost, acceptance, speed
    assert len(read.ids) == len(set(read.ids))


def test_the_default_and_the_controls_are_in_every_picture(page: str) -> None:
    pictures = re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)
    assert len(pictures) == 4
    for picture in pictures:
        for name in SHIPPED[1:]:
            assert f">{name}</text>" in picture


def test_what_models_and_files_are_called_is_no_html() -> None:
    page = render_page("# <b>x</b>\n\n| a |\n| --- |\n| <i> |\n", "<u>", {})
    assert "<b>" not in page
    assert "<i>" not in page
    assert "<u>" not in page
    assert "<td>&lt;i&gt;</td>" in page

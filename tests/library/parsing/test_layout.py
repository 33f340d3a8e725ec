from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from library.parsing import Box, Layout, Location, PageExtent

TEXT = "one\ntwo\n\nthree"
PAGES = (PageExtent(0, 612.0, 792.0), PageExtent(9, 612.0, 792.0), PageExtent(9, 300.5, 792.0))
EDGES = array("i", [10, 20, 30, 40, 11, 21, 31, 41, 0, 0, 0, 0, 12, 22, 32, 42])
LAYOUT = Layout.of(TEXT, PAGES, EDGES)


def test_a_span_leads_to_its_pages_lines_and_boxes():
    where = LAYOUT.locate(TEXT.index("wo"), TEXT.index("hree"))
    boxes = (Box(1, 1.1, 2.1, 3.1, 4.1), Box(3, 1.2, 2.2, 3.2, 4.2))
    assert where == Location(range(1, 4), range(2, 5), boxes)


def test_the_end_of_a_span_is_not_in_it():
    assert LAYOUT.locate(0, 4).lines == range(1, 2)
    assert LAYOUT.locate(4, 4).lines == range(2, 3)
    assert LAYOUT.locate(0, 9).pages == range(1, 2)


def test_a_text_without_pages_has_lines_only():
    where = Layout.of(TEXT).locate(0, len(TEXT))
    assert where == Location(range(0), range(1, 5), ())


@given(st.text(alphabet="a\n", max_size=50), st.integers(0, 50))
def test_lines_are_those_of_an_editor(text, offset):
    lines = Layout.of(text).locate(offset, offset + 1).lines
    assert lines == range(text[:offset].count("\n") + 1, text[:offset].count("\n") + 2)


@pytest.mark.parametrize("layout", [LAYOUT, Layout.of(TEXT), Layout.of("", PAGES[:1])])
def test_a_layout_survives_being_stored(layout):
    assert Layout.from_bytes(layout.to_bytes()) == layout


def test_a_stored_layout_is_compact():
    text = "a line of text as long as most\n" * 50_000
    edges = array("i", (e for line in range(50_001) for e in (720, 14 * (line % 50), 5400, 100)))
    pages = [PageExtent(50 * 31 * number, 612.0, 792.0) for number in range(1000)]
    assert len(Layout.of(text, pages, edges).to_bytes()) < len(text) / 50


@given(st.binary(max_size=100), st.integers(0, 60))
def test_no_bytes_make_a_layout_that_is_not_one(noise, kept):
    try:
        layout = Layout.unpack(LAYOUT.pack()[:kept] + noise)
    except ValueError:
        return
    layout.locate(0, 5)


@pytest.mark.parametrize(
    ("old", "new"),
    [(b"lay1", b"lay2"), (array("i", [9]).tobytes(), array("i", [-9]).tobytes())],
)
def test_a_layout_with_other_numbers_is_refused(old, new):
    packed = LAYOUT.pack()
    assert old in packed
    with pytest.raises(ValueError, match="layout"):
        Layout.unpack(packed.replace(old, new, 1))

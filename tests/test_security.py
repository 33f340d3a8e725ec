"""Every line of the security page has a test that is there, or says that nothing defends it."""

from __future__ import annotations

import ast

from tests.security import PAGE, named_tests


def test_every_test_that_the_page_names_is_there():
    names = named_tests()
    assert len(names) > 30
    for name in names:
        path, *parts = name.split("::")
        body: list[ast.stmt] = ast.parse((PAGE.parent.parent / path).read_text()).body
        for part in parts:
            found = [each for each in body if getattr(each, "name", None) == part]
            assert found, name
            body = getattr(found[0], "body", [])


def test_every_line_has_a_test_or_says_that_there_is_none():
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    rows = [line for line in lines if not line.startswith(("| line", "| ---"))]
    assert len(rows) > 30
    for row in rows:
        assert ".py" in row or "not defended" in row.lower() or "operator's" in row, row


def test_the_page_stays_short():
    assert len(PAGE.read_text().split()) <= 1200

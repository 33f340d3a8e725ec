"""Statements and words of answers as models write them."""

from __future__ import annotations

import pytest

from rapid.citing.words import split_statements, words


@pytest.mark.parametrize(
    ("text", "statements"),
    [
        ("It is red. It is 4.5 m long! Is it?", ["It is red.", "It is 4.5 m long!", "Is it?"]),
        ("Dr. Smith (see fig. 3) met J. Doe.", ["Dr. Smith (see fig. 3) met J. Doe."]),
        ("1. One thing\n2. Another.\n\n- more", ["1. One thing", "2. Another.", "- more"]),
        ('He said "no." Then he left', ['He said "no."', "Then he left"]),
        ("これは赤い。あれは青い。", ["これは赤い。", "あれは青い。"]),
        ("  \n ", []),
    ],
)
def test_statements_end_where_sentences_and_lines_do(text: str, statements: list[str]) -> None:
    assert [text[start:stop] for start, stop in split_statements(text)] == statements


def test_words_leave_out_space_and_what_markdown_marks_them_with() -> None:
    text = "The **red** fox_1\nran, 赤い"
    told = ["The", "red", "fox", "1", "ran", ",", "赤", "い"]
    assert [word.text for word in words(text)] == told
    assert all(text[word.start : word.stop] == word.text for word in words(text))

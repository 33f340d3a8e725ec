"""What a person is told of how far a server reads."""

from __future__ import annotations

from deployments.cli.questions.reading_pace import ReadingPace


def test_the_rate_and_what_is_left_are_told_after_a_second() -> None:
    now = [0.0]
    pace = ReadingPace(lambda: now[0])
    assert pace.tell("reading 100 of 4100 tokens") == "reading 2% of 4,100 tokens"
    now[0] += 2
    assert pace.tell("reading 1700 of 4100 tokens") == (
        "reading 41% of 4,100 tokens, 800 tokens a second, 3 s left"
    )


def test_passages_are_counted() -> None:
    now = [0.0]
    pace = ReadingPace(lambda: now[0])
    assert pace.tell("embedding passages") == "embedding passages"
    assert pace.tell("embedding passages 12 of 1,130") == "embedding passages 12 of 1,130"
    now[0] += 4
    assert pace.tell("embedding passages 412 of 1,130") == (
        "embedding passages 412 of 1,130, 100 a second, 7 s left"
    )

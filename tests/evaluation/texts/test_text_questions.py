"""The questions on real text keep their rules, and the rules notice what breaks them."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from pydantic import ValidationError

from evaluation.texts import text_questions as questions_module
from evaluation.texts.text_questions import (
    TextQuestion,
    document_names,
    holds,
    questions_of,
    span_of,
)
from tests.evaluation.texts import question_rules
from tests.evaluation.texts.question_rules import faults, faults_of


def test_every_shipped_question_keeps_the_rules():
    assert [fault for name in document_names() for fault in faults_of(name)] == []


def test_there_are_enough_questions_of_every_kind():
    asked = [each for name in document_names() for each in questions_of(name)]
    kinds = Counter(each.kind for each in asked)
    assert len(asked) >= 300
    assert min(kinds.values()) >= 60
    assert len(kinds) == 4


TEXT = (
    "A lantern is lit by the keeper.\n\nThe harbor opens at dawn, and the\nbell rings nine times."
)


def question(kind: str, asked: str, answer: list[list[str]], *evidence: str) -> TextQuestion:
    return TextQuestion.model_validate(
        {
            "id": "harbor-1",
            "kind": kind,
            "question": asked,
            "answer": answer,
            "evidence": evidence,
        }
    )


BELL = "the bell rings nine times."


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (question("one place", "How often does the bell ring?", [["nine"]], BELL), None),
        (question("paraphrase", "How many strokes sound?", [["nine times"]], BELL), None),
        (question("unanswerable", "Who paid for the bell?", []), None),
        (
            question("one place", "How often does the bell ring?", [["nine"]], "The bell is old."),
            "the evidence is not in the document",
        ),
        (
            question("paraphrase", "How often does the bell sound?", [["nine times"]], BELL),
            "share bell",
        ),
        (
            question("one place", "How many strokes sound?", [["nine"]], BELL),
            "it is a paraphrase",
        ),
        (
            question("one place", "How often does the bell ring?", [["ten", "eleven"]], BELL),
            "is in the evidence",
        ),
        (
            question("one place", "Does the bell ring nine times?", [["nine"]], BELL),
            "gives ('nine',) away",
        ),
        (
            question("several places", "Who lights the lantern?", [["keeper"]], TEXT[:31]),
            "two passages or more",
        ),
        (
            question("unanswerable", "How often does the bell ring?", [["nine"]], BELL),
            "neither answer nor evidence",
        ),
        (question("one place", "How often does the bell ring?", []), "are missing"),
        (
            question(
                "one place", "What of the bell?", [["one two three four five six seven eight nine"]]
            ),
            "longer than eight words",
        ),
    ],
)
def test_a_question_that_breaks_a_rule_is_told(monkeypatch, asked, told):
    monkeypatch.setattr(question_rules, "document_text", lambda name: TEXT)
    found = list(faults(asked))
    if told is None:
        assert found == []
    else:
        assert any(told in fault for fault in found), found


def test_evidence_is_found_across_line_breaks():
    span = span_of("dawn, and the bell", TEXT)
    assert span is not None
    assert TEXT[slice(*span)] == "dawn, and the\nbell"


@pytest.mark.parametrize(
    ("text", "part", "is_held"),
    [
        ("Use `Path.rmdir()` for it.", "rmdir", True),
        ("Use Path.rmdir.", "path rmdir", True),
        ("There are 14.", "4", False),
        ("NINE times", "nine", True),
        ("nothing", "...", False),
    ],
)
def test_an_answer_is_held_as_whole_words(text, part, is_held):
    assert holds(text, part) == is_held


def test_a_question_without_an_id_is_refused():
    with pytest.raises(ValidationError, match="id"):
        question("one place", "How often does the bell ring?", [["nine"]]).model_validate(
            {"id": "Harbor", "kind": "one place", "question": "", "answer": [], "evidence": []}
        )


def test_faults_of_a_whole_file_are_told(monkeypatch, tmp_path):
    (tmp_path / "documents").mkdir()
    (tmp_path / "questions").mkdir()
    (tmp_path / "documents/harbor.txt").write_text(TEXT)
    line = {"id": "port-1", "kind": "unanswerable", "question": "Who paid for the bell?"}
    path = tmp_path / "questions/harbor.jsonl"
    path.write_text(json.dumps(line | {"answer": [], "evidence": []}) + "\n")
    monkeypatch.setattr(questions_module, "FOLDER", tmp_path)
    assert document_names() == ["harbor"]
    told = "\n".join(faults_of("harbor"))
    assert "names another document" in told
    assert "no question of the kind several places" in told
    path.write_text("{}")
    assert "Field required" in "\n".join(faults_of("harbor"))

"""What stands in the sources word for word, or with most of its words."""

from __future__ import annotations

import pytest

from rapid.chat_messages import Document
from rapid.citing.copies import CitingRule, find_claims, find_copies, find_near, find_overlap
from rapid.receipt import Citation
from retrieval import RetrievedChunk

TEXT = (
    "The banner of Tezawe is a red fox with green ears on a white field. It was sewn in 1402.\n\n"
    "The banner of Ruki is\na blue whale above three waves of silver thread. Nobody has seen it."
)
ATLAS = Document("atlas", TEXT)
RULE = CitingRule()


def passage(words: str, document: str = "atlas", offset: int = 0) -> RetrievedChunk:
    start = offset if document != "atlas" else TEXT.index(words)
    return RetrievedChunk(f"{document}:{start}", document, start, start + len(words), words, 9, 1.0)


def copied(
    answer: str, passages: list[RetrievedChunk], question: str = "", *documents: Document
) -> list[Citation]:
    claims = find_claims(0, answer, question)
    find_copies(claims, documents or (ATLAS,), passages, RULE)
    return [each for claim in claims for each in claim.citations]


def test_a_copy_is_cited_with_its_place_in_both_texts() -> None:
    answer = "Well: the banner of Ruki is a blue whale above **three** waves. It is old."
    (found,) = copied(answer, [])
    assert answer[found.start : found.end] == "banner of Ruki is a blue whale above **three** waves"
    assert TEXT[found.document_start : found.document_end] == found.quote
    assert found.quote == "banner of Ruki is\na blue whale above three waves"
    assert (found.evidence, found.document, found.passage_id) == ("copied", "atlas", None)


def test_of_equal_places_one_that_was_retrieved_counts() -> None:
    twice = Document("atlas", f"{TEXT}\n{TEXT}")
    second = len(TEXT) + 1
    chunk = RetrievedChunk("atlas:1", "atlas", second, second + len(TEXT), TEXT, 9, 1.0)
    (found,) = copied("It was sewn in 1402.", [chunk], "", twice)
    assert (found.passage_id, found.document_start) == ("atlas:1", second + TEXT.index("It was"))


def test_a_passage_of_the_question_itself_is_a_source_too() -> None:
    told = passage("we sold forty red bricks to the mill", "conversation", 100)
    (found,) = copied("You sold forty red bricks.", [told])
    assert (found.document, found.document_start) == ("conversation", 103)


@pytest.mark.parametrize(
    ("answer", "question", "quotes"),
    [
        ("1402.", "When was it sewn?", ["1402."]),  # rare, and all that is told
        ("The banner of Tezawe is pink.", "What is the banner of Tezawe?", []),  # only its question
        ("A fox of green wool, in 1403.", "", []),
        ("So.", "", []),
        (
            "A red fox with green ears on a white field, and a blue whale above three waves.",
            "",
            ["red fox with green ears on a white field", "a blue whale above three waves"],
        ),
    ],
)
def test_what_counts(answer: str, question: str, quotes: list[str]) -> None:
    assert [each.quote for each in copied(answer, [], question)] == quotes


def test_near_are_the_few_passages_that_share_most_new_words() -> None:
    texts = ["ab", "b", "cab", "d", "ab"]
    passages = [passage(words, "notes", 9 * i) for i, words in enumerate(texts)]
    assert find_near(find_claims(0, "Ab cab.", ""), passages) == [
        passages[0],
        passages[2],
        passages[4],
    ]
    assert find_near(find_claims(0, "Unheard of.", ""), passages) == []
    assert find_near([], passages) == []


@pytest.mark.parametrize(
    ("whole", "part", "is_needed"), [(-3, -9, True), (-3, -3.5, False), (-90, -98, False)]
)
def test_needed_is_what_a_statement_loses_much_without(
    whole: float, part: float, is_needed: bool
) -> None:
    assert RULE.is_needed(whole, part) == is_needed


def test_most_words_are_present_in_one_passage() -> None:
    first, second = TEXT.split("\n\n")
    passages = [passage(first), passage(f"\n\n{second}")]
    (claim,) = find_claims(0, "Silver waves, three, and a whale, blue, on Ruki.", "")
    assert find_overlap(claim, passages, RULE) is passages[1]
    claim.add("present", passages[1])
    (found,) = claim.citations
    assert TEXT[found.document_start : found.document_end] == found.quote == second
    (other,) = find_claims(0, "Some yellow dragons in a banner.", "")
    assert find_overlap(other, passages, RULE) is None
    assert find_overlap(other, [], RULE) is None

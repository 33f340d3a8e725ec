"""Which words of a question count, and which of them are names."""

import pytest

from retrieval.embeddings.terms import content_terms, names, terms


def test_terms_are_words_whatever_their_case_and_pairs_where_no_spaces_are_written():
    assert list(terms("The STRASSE of ﬁle_42")) == ["the", "strasse", "of", "file", "42"]
    assert list(terms("市長は GPU")) == ["市長", "長は", "gpu"]


def test_content_is_what_remains_without_function_words_if_anything_does():
    assert content_terms("What is the harbor of Belaron?") == ["harbor", "belaron"]
    assert content_terms("To be or not to be") == ["to", "be", "or", "not", "to", "be"]


@pytest.mark.parametrize(
    ("question", "named"),
    [
        ("What is the harbor of Belaron?", {"belaron"}),
        ("Belaron is where?", set()),
        ("Please help. Which harbor has Belaron?", {"belaron"}),
        ("First: Which one? “And Orrin?”", {"orrin"}),
        ("3rd question: what holds 42 boxes, or PATH?", {"3rd", "42", "path"}),
        ("where is the harbor", set()),
        ("", set()),
    ],
)
def test_names_have_a_capital_within_a_sentence_or_a_digit(question, named):
    assert names(question) == named

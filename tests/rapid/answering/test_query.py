from hypothesis import given
from hypothesis import strategies as st

from rapid.answering.query import choose_query
from tests.retrieval.tokens import words


def test_a_short_message_is_the_question():
    query = choose_query(" What is the harbor?\n", words, budget_tokens=10)
    assert (query.text, query.context) == ("What is the harbor?", "")
    assert query.question == " What is the harbor?\n"


def test_of_a_long_message_the_last_paragraphs_are_the_question():
    message = "A letter.\n\n" + "and so on " * 50 + "\n\nNow tell me.\n\nWhat is the harbor?"
    query = choose_query(message, words, budget_tokens=20)
    assert query.question == "Now tell me.\n\nWhat is the harbor?"
    assert query.context.endswith("so on \n\n")


def test_a_last_paragraph_without_end_is_cut_at_a_token():
    query = choose_query("on and " * 100, words, budget_tokens=10)
    assert query.text == " ".join(["on and"] * 5)


def test_an_explicit_query_changes_only_what_is_searched():
    query = choose_query("one\n\n" + "two " * 20, words, budget_tokens=4, query="harbor")
    assert query.text == "harbor"
    assert query.question == "two two two two "


@given(st.text(alphabet="ab .\n", max_size=200), st.integers(1, 30))
def test_no_character_of_the_message_is_lost(message, budget):
    query = choose_query(message, words, budget_tokens=budget)
    assert query.context + query.question == message
    assert len(words(query.question)) <= budget
    assert query.question.strip() or not message.strip()

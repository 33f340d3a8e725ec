import pytest
from hypothesis import given
from hypothesis import strategies as st

from rapid.answering.prompt.excerpts.query import choose_query, join_earlier
from rapid.chat_messages import Message
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
    assert query.text == query.question


@pytest.mark.parametrize("blank", ["\n\n", "\n \t\n\n"])
def test_of_a_document_with_a_question_after_it_only_the_question_is_searched_for(blank):
    document = blank.join(["and so on " * 20] * 3)
    query = choose_query(document + blank + "What is the harbor?\n", words, budget_tokens=100)
    assert query.text == "What is the harbor?"
    assert query.question == "and so on " * 20 + blank + "What is the harbor?\n"


def test_where_no_line_is_blank_the_last_line_is_searched_for():
    document = "\n".join(["and so on " * 20] * 3)
    query = choose_query(document + "\nWhat is the harbor?", words, budget_tokens=1000)
    assert query.text == "What is the harbor?"


def test_what_is_said_after_a_question_is_searched_for_with_it():
    ask = "What is the harbor?\n\nAnswer briefly.\n\nThanks!"
    document = "and so on " * 50
    assert choose_query(ask, words, budget_tokens=100).text == ask
    assert choose_query(f"{document}\n\n{ask}", words, budget_tokens=100).text == ask


def test_a_question_of_many_lines_is_searched_for_whole():
    ask = "Which harbor is it?\n" + "the one over there or\n" * 20 + "\nAnswer with a letter."
    assert choose_query(ask, words, budget_tokens=1000).text == ask


def test_a_long_last_paragraph_is_searched_for_whole():
    asked = "what of this and " * 40
    query = choose_query("A letter.\n\n" + asked, words, budget_tokens=1000)
    assert query.text == asked.strip()


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
    assert query.question.strip().endswith(query.text)
    assert query.text or not message.strip()


def follow(*questions: str) -> str | None:
    said = [Message("user", each) for each in questions]
    chat = [each for turn in said for each in (turn, Message("assistant", "It is."))]
    return join_earlier(chat[:-1], words, budget_tokens=100)


@pytest.mark.parametrize(
    "last", ["And the second?", "what about Ruki?", "Why is that?", "Where are its doors?"]
)
def test_a_question_that_leaves_something_out_is_searched_for_with_the_one_before(last: str):
    whole = "What is the harbor of Tezawe?"
    assert follow(whole, last) == f"{whole} {last}"
    assert follow("Who?", whole, last) == f"{whole} {last}"
    assert follow(whole, "And the first?", last) == f"{whole} And the first? {last}"
    document = "and so on " * 50
    assert follow(f"{document}\n\n{whole}", last) == f"{whole} {last}"
    assert follow(last) is None
    assert len((follow(*[last] * 500) or "").split()) < 150


@pytest.mark.parametrize("last", ["What is the harbor of Ruki?", "it " * 13, "Andrew?"])
def test_a_whole_question_is_searched_for_alone(last: str):
    assert follow("What is the well of Tezawe?", last) is None

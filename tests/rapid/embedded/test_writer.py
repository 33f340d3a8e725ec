"""Random sentences in the wording of one kind of document."""

from __future__ import annotations

import random

import pytest

from rapid.embedded.wording import COUNTS, STYLES
from rapid.embedded.writer import Writer


@pytest.mark.parametrize("kind", STYLES)
def test_a_question_names_what_its_sentences_are_about(kind):
    writer = Writer(random.Random(1), STYLES[kind])
    name, other = writer.distinct_names(2)
    question, (fact,) = writer.ask_fact(attribute := writer.attribute(), name)
    assert all(word in text for word in (attribute, name) for text in (question, fact))
    question, deposits = writer.ask_list(name)
    assert COUNTS[len(deposits)] in question
    assert all(name in text for text in (question, *deposits))
    if STYLES[kind].link:
        question, (link, fact) = writer.ask_pair(attribute, name, other)
        assert name in question
        assert other not in question
        assert name in link
        assert other in link
        assert other in fact
        assert attribute in fact


@pytest.mark.parametrize("kind", STYLES)
def test_a_topic_ends_before_the_value(kind):
    style = STYLES[kind]
    topic = style.topic(style.fact, attribute="oil", name="Bakeno")
    _, (fact,) = Writer(random.Random(2), style).ask_fact("oil", "Bakeno")
    assert fact.startswith(topic)
    assert topic.endswith((" ", ": "))

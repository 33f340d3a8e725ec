"""What of a request names what it reads."""

from __future__ import annotations

from dataclasses import replace

from rapid.answering.leases.document_keys import affinity_of
from rapid.chat_messages import Document, Message
from rapid.messages import GenerateRequest

ASK = GenerateRequest(
    request_id="r",
    tenant="one",
    messages=(Message("system", "s" * 9000), Message("user", "Who?")),
    documents=(Document("a", "text"),),
)


def test_questions_about_the_same_documents_have_one_name() -> None:
    other = replace(ASK, messages=(Message("user", "When?"),), documents=(Document("b", "text"),))
    assert affinity_of(ASK) == affinity_of(other) != ""
    assert affinity_of(replace(ASK, tenant="two")) != affinity_of(ASK)
    assert affinity_of(replace(ASK, documents=(Document("a", "text2"),))) != affinity_of(ASK)


def test_a_conversation_is_named_by_its_long_beginning() -> None:
    begun = replace(ASK, documents=(), messages=(Message("user", "long " * 1000),))
    further = replace(begun, messages=(*begun.messages, Message("assistant", "?")))
    assert affinity_of(begun) == affinity_of(further) != ""


def test_what_everybody_says_names_nothing() -> None:
    """A system prompt or a short question is no reason to send all to one replica."""
    assert affinity_of(replace(ASK, documents=())) == ""

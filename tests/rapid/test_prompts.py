"""What target and drafter read, to the byte."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import pytest

from rapid.chat_messages import (
    Document,
    Message,
    TextPart,
    ToolCall,
)
from rapid.embedded.chat import build_drafter_prompt, document_prompt
from rapid.errors import BadRequest
from rapid.prompts import DrafterPlan, drafter_messages, plan_drafter_chat, target_messages


@dataclass(frozen=True)
class Chunk:
    document: str
    text: str


def user(text: str) -> Message:
    return Message("user", text)


def system(text: str) -> Message:
    return Message("system", text)


def assistant(text: str) -> Message:
    return Message("assistant", text)


def words(text: str) -> int:
    return len(text.split())


def plan(*messages: Message, documents: tuple[Document, ...] = (), **options) -> DrafterPlan:
    options = {"budget_tokens": 40, "count_tokens": words} | options
    return plan_drafter_chat(messages, documents, **options)


NOTES = Document("notes", "One. Two. Three.")


def test_the_wording_is_the_one_the_models_are_trained_on():
    question = "What is the harbor of Bakeno?"
    (target,) = target_messages([user(question)], [NOTES])
    assert target.content == document_prompt(NOTES.name, NOTES.text, question)
    chunks = [Chunk("notes", "One."), Chunk("notes", "Three.")]
    (drafter,) = drafter_messages(plan(user(question), documents=(NOTES,)), chunks)
    assert drafter.content == build_drafter_prompt("notes", ["One.", "Three."], question)


def test_documents_stand_at_the_start_of_the_first_user_message():
    other = Document("letter", "Dear all")
    chat = target_messages(
        [system("Be kind."), user("First?"), assistant("Yes."), user("Second?")], [NOTES, other]
    )
    assert chat == (
        system("Be kind."),
        user('Document "notes":\nOne. Two. Three.\n\nDocument "letter":\nDear all\n\nFirst?'),
        assistant("Yes."),
        user("Second?"),
    )


def test_a_short_chat_is_kept_and_chunks_replace_documents_in_place():
    chat = [system("Be kind."), user("First?"), assistant("Yes."), user("Second?")]
    taken_apart = plan(*chat, documents=(NOTES,))
    assert taken_apart.documents == (NOTES,)
    assert taken_apart.question == "Second?"
    assert drafter_messages(taken_apart, [Chunk("notes", " Two.\n")]) == (
        system("Be kind."),
        user('Retrieved text chunks of "notes":\nTwo.\n\nFirst?'),
        assistant("Yes."),
        user("Second?"),
    )


def test_nothing_retrieved_leaves_no_trace():
    taken_apart = plan(user("Second?"), documents=(NOTES,))
    assert drafter_messages(taken_apart, []) == (user("Second?"),)


def test_a_chunk_of_a_document_that_the_chat_has_not_is_refused():
    taken_apart = plan(user("Second?"), documents=(NOTES,))
    with pytest.raises(ValueError, match=r"of document 'book', and .* are \['notes'\]"):
        drafter_messages(taken_apart, [Chunk("notes", "One."), Chunk("book", "Two.")])


def test_older_turns_become_a_document():
    chat = [user("one two three four"), assistant("five six seven"), user("eight"), user("Last?")]
    taken_apart = plan(*chat, documents=(NOTES,), budget_tokens=16)
    assert taken_apart.documents == (
        NOTES,
        Document("conversation", "user: one two three four\n\nassistant: five six seven"),
    )
    chunks = [Chunk("notes", "Two."), Chunk("conversation", "five six")]
    assert drafter_messages(taken_apart, chunks) == (
        user(
            'Retrieved text chunks of "notes":\nTwo.\n\n'
            'Retrieved text chunks of "conversation":\nfive six\n\neight'
        ),
        user("Last?"),
    )


def test_kept_turns_begin_with_the_user():
    taken_apart = plan(
        user("a b c d e f g"), assistant("yes"), user("and"), assistant("no"), user("Last?")
    )
    assert [turn.message.role for turn in taken_apart.turns] == ["user", "assistant", "user"]
    taken_apart = plan(user("a b c d e f g"), assistant("yes"), user("Last?"), budget_tokens=12)
    assert [turn.message.content for turn in taken_apart.turns] == ["Last?"]


def test_the_beginning_of_an_over_long_message_is_searched():
    message = "A long story.\n\nAnother part.\n\nWhat happened?"
    taken_apart = plan(user(message), question="What happened?")
    assert taken_apart.documents == (Document("message", "A long story.\n\nAnother part.\n\n"),)
    assert drafter_messages(taken_apart, [Chunk("message", "A long story.")]) == (
        user('Retrieved text chunks of "message":\nA long story.\n\nWhat happened?'),
    )
    with pytest.raises(ValueError, match="the end of"):
        plan(user(message), question="What else?")


def test_system_text_that_does_not_fit_is_searched():
    rules = "Answer from this book. " * 5
    taken_apart = plan(system(rules), user("Who?"))
    assert taken_apart.documents == (Document("instructions", rules),)
    assert drafter_messages(taken_apart, []) == (user("Who?"),)
    assert drafter_messages(taken_apart, [Chunk("instructions", "this book")])[0] == system(
        'Retrieved text chunks of "instructions":\nthis book\n\n'
    )


def test_names_of_overflow_do_not_meet_those_of_attachments():
    taken = (Document("message", "x"), Document("message 2", "y"))
    taken_apart = plan(user("long. Who?"), documents=taken, question="Who?")
    assert [document.name for document in taken_apart.documents][2:] == ["message 3"]


def test_turns_after_the_question_stay():
    chat = drafter_messages(plan(user("Who?"), assistant("It was")), [])
    assert chat == (user("Who?"), assistant("It was"))


def test_a_chat_without_a_question_is_refused():
    with pytest.raises(BadRequest, match="user") as refused:
        target_messages([system("Be kind.")], [])
    assert refused.value.param == "messages"


def num_lines_run(function: Callable[[], object]) -> int:
    """Return how many lines of Python `function` runs: work that no clock measures."""
    num_lines = 0

    def count(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal num_lines
        num_lines += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        function()
    finally:
        sys.settrace(before)
    return num_lines


def test_the_work_on_a_chat_grows_as_the_chat_does() -> None:
    """Forty thousand system messages of one letter stopped an orchestrator for minutes."""

    def chat_of(num_messages: int) -> DrafterPlan:
        return plan(*([system("a")] * num_messages), user("Who?"), budget_tokens=4)

    def found_in(taken_apart: DrafterPlan) -> object:
        return drafter_messages(taken_apart, [Chunk(d.name, "a") for d in taken_apart.documents])

    few, many = chat_of(200), chat_of(800)
    assert len(many.documents) == 799
    assert num_lines_run(lambda: chat_of(800)) < 5 * num_lines_run(lambda: chat_of(200))
    assert num_lines_run(lambda: found_in(many)) < 5 * num_lines_run(lambda: found_in(few))


def test_overflow_is_numbered_past_the_names_of_attachments() -> None:
    taken = (Document("instructions 2", "x"),)
    taken_apart = plan(*([system("a b")] * 4), user("Who?"), documents=taken, budget_tokens=4)
    names = [document.name for document in taken_apart.documents]
    assert names == ["instructions 2", "instructions", "instructions 3", "instructions 4",
                     "instructions 5"]  # fmt: skip


def test_text_in_parts_is_read_as_the_same_text() -> None:
    parts = Message("user", (TextPart("Who keeps "), TextPart("the light?")))
    whole = Message("user", "Who keeps the light?")
    documents = [Document("notes", "Ada keeps the light.")]
    (from_parts,), (from_text,) = (target_messages([each], documents) for each in (parts, whole))
    assert from_parts.text == from_text.text
    assert from_parts.content[1:] == parts.content  # a part that is not text would keep its place


CALL = ToolCall("abc", "read", '{"page": 7}')


def call_and(result: str) -> list[Message]:
    return [Message("assistant", "", (CALL,)), Message("tool", result, tool_call_id="abc")]


def test_a_long_result_of_a_tool_is_searched_and_a_short_one_stays():
    long = "word " * 11
    chat = [user("What is on the page?"), *call_and(long), *call_and("two words")]
    planned = plan(*chat)  # ten words of results may stay
    assert planned.documents == (Document("tool result abc", long),)
    told = drafter_messages(planned, [Chunk("tool result abc", "word word")])
    shown = 'Retrieved text chunks of "tool result abc":\nword word\n\n'
    assert told == (chat[0], chat[1], Message("tool", shown, tool_call_id="abc"), *chat[3:])
    assert target_messages(chat, []) == tuple(chat)  # the target reads all of it
    both = [user("What?"), *call_and("word " * 6), *call_and("word " * 6)]
    assert [each.name for each in plan(*both).documents] == ["tool result abc"]
    assert plan(*both).turns[2].document_names == ("tool result abc",)  # the earlier one


def test_a_call_and_its_results_are_kept_or_searched_together():
    chat = [user("first one"), *call_and("two words"), assistant("Done."), user("and now?")]
    kept = plan(*chat)
    assert tuple(turn.message for turn in kept.turns) == tuple(chat)
    older = plan(*chat, budget_tokens=24)
    assert [turn.message.role for turn in older.turns] == ["user"]
    (document,) = older.documents
    assert document.text == (
        'user: first one\n\nassistant: read({"page": 7})\n\ntool: two words\n\nassistant: Done.'
    )

"""`rapid chat`: a conversation with an ingress whose orchestrator is scripted."""

from __future__ import annotations

from pathlib import Path

import pytest

from deployments.cli.questions import chat_command
from rapid.embedded.generator import generate_document
from rapid.errors import PromptTooLong
from rapid.events import Finished, TextDelta
from tests.deployments.cli.command import rapid
from tests.deployments.scripted import STARTED, receipt


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    path = tmp_path / "notes.txt"
    path.write_text("One.\nTwo.\nThree.\n")
    return path


def talk(serve, *lines: str, files: tuple[Path, ...] = (), **config: object):
    server = serve(**config)
    typed = "".join(f"{line}\n" for line in lines)
    result = rapid("chat", *map(str, files), "--url", server.url, input=typed)
    return server.orchestrator.requests, result


def test_each_question_comes_with_those_before_it(serve, notes):
    (first, second), result = talk(serve, "Who?", "", "And when?", files=(notes,))
    assert [(each.role, each.content) for each in second.messages] == [
        ("user", "Who?"),
        ("assistant", "Hello, wörld!"),
        ("user", "And when?"),
    ]
    assert [each.name for each in first.documents] == ["notes.txt"]
    assert first.messages[0].documents == second.messages[0].documents == ("notes.txt",)
    assert (result.exit_code, result.stdout) == (0, "Hello, wörld!\nHello, wörld!\n")
    assert result.stderr == "looked in notes\n" * 2  # whose text is not at hand


def test_an_answer_steers_no_terminal(serve):
    events = STARTED, TextDelta(0, "Hi\x1b[2J", (), "stop"), Finished(receipt())
    result = rapid("chat", "--url", serve(*events).url, input="Who?\n")
    assert result.stdout_bytes == b"Hi[2J\n"


def test_a_document_that_is_added_stands_where_it_came(serve, notes, tmp_path):
    more = tmp_path / "with space.md"
    more.write_text("# More")
    asked, _ = talk(serve, "Who?", f"/add '{more}'", "And now?", files=(notes,))
    assert [each.name for each in asked[1].documents] == ["notes.txt", "with space.md"]
    assert [each.documents for each in asked[1].messages] == [
        ("notes.txt",),
        (),
        ("with space.md",),
    ]


def test_words_that_an_embedded_model_has_never_read_are_named_once(serve, tmp_path):
    english, generated = tmp_path / "english.txt", tmp_path / "generated.txt"
    english.write_text("You may not use this file except in compliance with the License.")
    generated.write_text(generate_document(1, 200).text)
    for files, lines in (
        ((english,), ["What is the rent?"]),
        ((generated,), [f"/add {english}", "What is the rent?"]),
        ((generated,), ["What is the rent?", "Please summarise this.", "And shorter?"]),
    ):
        _, result = talk(serve, *lines, files=files, is_embedded=True)
        assert result.stderr.count("this model understands only documents that") == 1
    _, result = talk(serve, "Please summarise this.", files=(english,))
    assert "understands only" not in result.stderr


def test_commands(serve, notes):
    lines = ["/why", "/mode rag", "Who?", "/sources", "/why", "/mode x", "/add 'a", "/sources 2"]
    (request,), result = talk(serve, *lines, "/quit", "Not asked", files=(notes,))
    assert request.speculation.mode == "rag"
    assert "nothing has been answered yet" in result.stderr
    assert (
        "mode rag: retrieval found evidence; sampled from: fused; 0 of 100 tokens" in result.stderr
    )
    assert "/mode takes one of plain, lossless" in result.stderr
    assert "No closing quotation" in result.stderr
    assert "/sources 2 is no command here; there are:\n/add FILE...   more" in result.stderr
    assert "notes" in result.stdout.splitlines()[1]


def test_what_is_refused_ends_only_its_question(serve, notes, tmp_path):
    server = serve(PromptTooLong("Too long: use `mode: rag`."))
    typed = f"/add {tmp_path / 'missing'}\nWho?\nAnd now?\n"
    result = rapid("chat", str(notes), "--url", server.url, input=typed)
    assert len(server.orchestrator.requests) == 2
    assert [len(each.messages) for each in server.orchestrator.requests] == [1, 1]
    assert result.stderr.count("error: Too long: use `/mode rag`.") == 2
    assert "missing cannot be read" in result.stderr
    assert result.exit_code == 1


def test_an_answer_that_is_interrupted_stays_as_far_as_it_came(serve, monkeypatch):
    asked: list[dict[str, object]] = []

    def interrupt(client, body, card, answer, show, *_):
        asked.append(body)
        if len(asked) == 1:
            answer.text = "Hel"
            show("Hel")
        raise KeyboardInterrupt

    monkeypatch.setattr(chat_command, "stream_answer", interrupt)
    _, result = talk(serve, "Who?", "When?", "Why?")
    assert [len(body["messages"]) for body in asked] == [1, 3, 3]
    assert result.stdout == "Hel\n"
    assert result.stderr.count("interrupted: the question is forgotten") == 2


def test_who_interrupts_behind_an_answer_asks_on(serve, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(chat_command, "origin", interrupt)
    asked, result = talk(serve, "Who?", "And when?")
    assert result.stdout == "Hello, wörld!\n" * 2
    assert result.stderr == "interrupted\n" * 2
    assert len(asked[1].messages) == 3


def test_a_terminal_asks_until_it_is_left(serve, monkeypatch):
    server = serve()
    typed = iter(["Who?", KeyboardInterrupt, EOFError])

    def answer_prompt(prompt: str) -> str:
        line = next(typed)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", answer_prompt)
    monkeypatch.setattr(chat_command, "_is_terminal", lambda: True)
    result = rapid("chat", "--url", server.url)
    assert (result.exit_code, len(server.orchestrator.requests)) == (0, 1)
    assert result.stdout.startswith("Hello, wörld!\n")

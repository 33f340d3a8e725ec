"""`rapid ask` against an ingress whose orchestrator is scripted."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import Result

from deployments.cli.questions.citations import origin
from deployments.cli.terminal import Waiting
from deployments.config.api_config import ApiKey
from deployments.config.tenants import hash_key
from library.parsing import Layout, PageExtent, ParsedText
from rapid.embedded.generator import generate_document
from rapid.errors import EngineFailed, Overloaded, PromptTooLong, TargetUnavailable
from rapid.events import Finished, Reading, TextDelta
from rapid.receipt import ChunkUsed, Explanation
from rapid.replay import read_receipt
from tests.deployments.cli.command import rapid
from tests.deployments.scripted import STARTED, receipt

STREAM = "deployments.cli.questions.answer_stream"


@pytest.fixture
def document(tmp_path: Path) -> Path:
    path = tmp_path / "notes.txt"
    path.write_text("One. Two.", encoding="utf-8")
    return path


class TestAsk:
    def test_the_answer_streams_to_standard_output(self, serve, document):
        server = serve()
        result = rapid("ask", "-d", str(document), "Who?", "--url", server.url, "--seed", "3")
        assert (result.exit_code, result.stdout) == (0, "Hello, wörld!\n")
        (request,) = server.orchestrator.requests
        assert request.messages[0].content == "Who?"
        assert [(d.name, d.text) for d in request.documents] == [("notes.txt", "One. Two.")]
        assert (request.seed, request.temperature) == (3, 0)

    def test_an_answer_steers_no_terminal_and_json_has_it_whole(self, serve):
        pieces = TextDelta(0, "Hi\x1b"), TextDelta(0, "[2J\n\tthere\x9b", (), "stop")
        url = serve(STARTED, *pieces, Finished(receipt())).url
        assert rapid("ask", "Who?", "--url", url).stdout_bytes == b"Hi[2J\n\tthere\n"
        assert json.loads(rapid("ask", "Who?", "--url", url, "--json").stdout)["text"] == (
            "Hi\x1b[2J\n\tthere\x9b"
        )

    def test_options_reach_the_server(self, serve):
        server = serve()
        options = "--mode lossless --eta 2 --transfer distill --max-draft 4 --retrieval-tokens 99"
        more = "--temperature 0.5 --top-p 0.9 --max-tokens 7"
        result = rapid("ask", "Who?", "--url", server.url, *options.split(), *more.split())
        assert result.exit_code == 0
        (request,) = server.orchestrator.requests
        asked = request.speculation
        assert (asked.mode, asked.eta, asked.transfer, asked.max_draft) == (
            "lossless",
            2.0,
            "distill",
            4,
        )
        assert (request.retrieval_tokens, request.max_tokens) == (99, 7)
        assert (request.temperature, request.top_p) == (0.5, 0.9)

    def test_stats(self, serve):
        shown = rapid("ask", "Who?", "--url", serve().url, "--stats").stdout
        for expected in ("fused", "6 of 9 tokens accepted (67%)", "notes [0:40]", "100 read"):
            assert expected in shown

    def test_who_wrote_each_token(self, serve):
        cited = replace(receipt(is_explained=True), chunks=(ChunkUsed("c1", "notes", 1, 0, 5),))
        server = serve(STARTED, TextDelta(0, "Hello", (), "stop"), Finished(cited))
        shown = rapid("ask", "Who?", "--url", server.url, "--explain").stdout
        (asked,) = server.orchestrator.requests
        assert (asked.explain, asked.explains_prompts) == (True, False)
        rows = [line.split() for line in shown.splitlines()]
        assert ["'Hello'", "drafted", "0.2500", "0.5000", "0.4000", "1"] in rows
        assert ["''", "corrected", "1.0000", "0.0000", "1.0000"] in rows

    def test_what_replay_needs_is_written_to_a_file(self, serve, tmp_path):
        explanation = Explanation((1, 2), (3,), (), ((4, 5),), (("drafted", "corrected"),))
        told = replace(receipt(), explanation=explanation)
        server = serve(STARTED, TextDelta(0, "Hi", (), "stop"), Finished(told), is_embedded=True)
        path = tmp_path / "receipt.json"
        options = ("--url", server.url, "--temperature", "0.5", "--receipt", str(path))
        assert rapid("ask", "Who?", *options).exit_code == 0
        assert server.orchestrator.requests[0].explain
        file = read_receipt(path.read_bytes())
        assert (file.request.temperature, file.receipt.contract) == (0.5, told.contract)
        assert (file.models.target, file.models.drafter) == ("embedded:target", "embedded:drafter")
        assert file.receipt.explain is not None
        assert file.receipt.explain.token_ids == ((4, 5),)
        missing = ("--receipt", str(tmp_path / "no folder" / "file"))
        refused = rapid("ask", "Who?", "--url", server.url, *missing)
        assert (refused.exit_code, "cannot be written" in refused.stderr) == (1, True)

    def test_how_far_the_server_has_read_is_one_line_where_nobody_watches(self, serve):
        text = TextDelta(0, "Hello", (), "stop")
        script = (STARTED, Reading(512, 4000), Reading(1024, 4000), text, Finished(receipt()))
        result = rapid("ask", "Who?", "--url", serve(*script).url)
        assert (result.stdout, result.stderr) == ("Hello\n", "reading 13% of 4,000 tokens\n")

    def test_the_command_waits_while_documents_are_embedded(self, serve, monkeypatch):
        """The server is silent for longer than the command waits, but for its comments."""
        monkeypatch.setattr(f"{STREAM}.SILENCE_TIMEOUT_S", 2.0)
        text = TextDelta(0, "Hello", (), "stop")
        steps = [each for n in range(6) for each in (Reading(n, 6, "passages"), 0.2)]
        server = serve(*steps, 2.5, STARTED, text, Finished(receipt()), heartbeat_s=0.1)
        result = rapid("ask", "Who?", "--url", server.url)
        assert (result.stdout, result.stderr) == ("Hello\n", "embedding passages 0 of 6\n")

    def test_the_command_waits_as_long_as_the_server_says(self, serve, monkeypatch):
        monkeypatch.setattr(f"{STREAM}.SILENCE_TIMEOUT_S", 0.5)
        text = TextDelta(0, "Hello", (), "stop")
        answer = (STARTED, text, Finished(receipt()))
        result = rapid("ask", "Who?", "--url", serve(1.5, *answer, silence_s=60).url)
        assert result.stdout == "Hello\n"
        silent = serve(asyncio.Event(), *answer, silence_s=0.1)
        assert "went silent" in rapid("ask", "Who?", "--url", silent.url).stderr

    @pytest.mark.parametrize(
        ("state", "said"),
        [
            ({"ready": True}, "queued, or looking for passages"),
            ({"ready": False, "reason": "no target has started"}, "loading: no target has started"),
        ],
    )
    def test_what_holds_up_an_answer_is_said_before_it_begins(
        self, serve, monkeypatch, state, said
    ):
        monkeypatch.setattr(f"{STREAM}._LOOK_S", 0.2)
        go_on = asyncio.Event()
        server = serve(go_on, STARTED, TextDelta(0, "Hello", (), "stop"), Finished(receipt()))
        server.orchestrator.state = state
        told: list[str] = []
        say = Waiting.say

        def note_and_go_on(waiting: Waiting, message: str) -> None:
            told.append(message)
            say(waiting, message)
            server.run_soon(go_on.set)

        monkeypatch.setattr(Waiting, "say", note_and_go_on)
        result = rapid("ask", "Who?", "--url", server.url)
        assert result.stdout == "Hello\n"
        assert told[0].startswith(said)

    def test_a_document_that_is_read_again_in_mid_answer_is_not_spoken_of(self, serve):
        begun, rest = TextDelta(0, "Hel"), TextDelta(0, "lo", (), "stop")
        script = (STARTED, begun, Reading(512, 4000), rest, Finished(receipt()))
        result = rapid("ask", "Who?", "--url", serve(*script).url)
        assert (result.stdout, result.stderr) == ("Hello\n", "")

    def test_a_text_that_the_embedded_models_cannot_know_is_named_before_the_answer(
        self, serve, tmp_path
    ):
        known, english = tmp_path / "known.txt", tmp_path / "licence.txt"
        known.write_text(generate_document(1, 200).text)
        english.write_text("You may not use this file except in compliance with the License.")
        url = serve(EngineFailed("no answer"), is_embedded=True).url
        result = rapid("ask", "-d", str(known), "-d", str(english), "Who?", "--url", url)
        (said, _) = result.stderr.splitlines()
        assert said.startswith("this model understands only documents that")
        assert "% of the words of licence.txt are unknown to it" in said
        assert said.endswith("models get smollm2-135m all-minilm-l6-v2', then 'make run' again")

    def test_of_several_models_the_first_answers_and_the_others_are_named(self, serve, tmp_path):
        english = tmp_path / "licence.txt"
        english.write_text("You may not use this file except in compliance with the License.")
        server = serve(is_embedded=True, others=["reader", "poet"])
        asked = ("ask", "-d", str(english), "Who?", "--url", server.url)
        chosen, warned, *_ = rapid(*asked).stderr.splitlines()
        assert chosen == "served answers; --model asks another: reader, poet"
        assert warned.endswith("for English text of your own, ask with --model reader")
        told = rapid(*asked, "--model", "reader")
        assert (told.exit_code, "--model" in told.stderr) == (0, False)
        assert [each.model for each in server.orchestrator.requests] == ["served", "reader"]

    def test_nothing_is_said_of_a_generated_document_or_to_real_models(self, serve, tmp_path):
        generated = tmp_path / "document.txt"
        generated.write_text(generate_document(1, 200).text)
        embedded, real = serve(is_embedded=True), serve()
        known = rapid("ask", "-d", str(generated), "What is the rent?", "--url", embedded.url)
        other = rapid("ask", "Who wrote this licence?", "--url", real.url, "--model", "served")
        assert (known.exit_code, other.exit_code, other.stderr) == (0, 0, "")
        assert "understands only" not in known.stderr

    def test_an_english_question_about_a_generated_document_is_foreign_too(self, serve, tmp_path):
        generated = tmp_path / "document.txt"
        generated.write_text(generate_document(1, 200).text)
        url = serve(is_embedded=True).url
        result = rapid("ask", "-d", str(generated), "Please summarise this text.", "--url", url)
        (said,) = [each for each in result.stderr.splitlines() if "understands only" in each]
        assert "100% of the words of the question are unknown to it, so its answer means" in said

    def test_a_question_without_a_document_is_looked_at_itself(self, serve):
        url = serve(is_embedded=True).url
        result = rapid("ask", "Who wrote this licence?", "--url", url, "--model", "served")
        assert "of the words of the question are unknown" in result.stderr
        assert "name it with --document FILE" in result.stderr

    def test_a_model_that_the_server_lacks_is_refused_by_the_server(self, serve):
        result = rapid("ask", "Who?", "--url", serve().url, "--model", "other")
        assert (result.exit_code, "'other' does not exist" in result.stderr) == (1, True)

    def test_files_of_one_name_are_told_apart(self, serve, tmp_path):
        paths = [tmp_path / folder / "a.txt" for folder in "xy"]
        for path in paths:
            path.parent.mkdir()
            path.write_text("text")
        server = serve()
        rapid("ask", "-d", str(paths[0]), "-d", str(paths[1]), "Who?", "--url", server.url)
        (request,) = server.orchestrator.requests
        assert [d.name for d in request.documents] == [str(path) for path in paths]

    def test_keys(self, serve, monkeypatch):
        server = serve(keys=(ApiKey(tenant="acme", sha256=hash_key("sk-1")),))
        refused = rapid("ask", "Who?", "--url", server.url)
        assert (refused.exit_code, "give it with --api-key, or set" in refused.stderr) == (1, True)
        wrong = rapid("ask", "Who?", "--url", server.url, "--api-key", "sk-2")
        assert (wrong.exit_code, "check --api-key and RAPID_API_KEY" in wrong.stderr) == (1, True)
        monkeypatch.setenv("RAPID_API_KEY", "sk-1")
        assert rapid("ask", "Who?", "--url", server.url).exit_code == 0

    def test_no_server(self, monkeypatch):
        monkeypatch.setattr("deployments.cli.server.server_process.running_pid", lambda: None)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        result = rapid("ask", "Who?", "--url", f"http://127.0.0.1:{port}")
        assert result.exit_code == 1
        assert "make run" in result.stderr
        result = rapid("ask", "Who?", "--url", f"https://127.0.0.1:{port}")
        assert "so write http://" in result.stderr
        monkeypatch.setattr("deployments.cli.server.server_process.running_pid", lambda: 123)
        result = rapid("ask", "Who?", "--url", f"http://127.0.0.1:{port}")
        assert "this folder's is running" in result.stderr
        assert "make run" not in result.stderr

    @pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x", "http://", "http://x:port"])
    def test_no_url(self, url):
        result = rapid("ask", "Who?", "--url", url)
        assert result.exit_code == 2
        assert "is no URL" in result.stderr

    def test_no_host_of_that_name(self):
        result = rapid("ask", "Who?", "--url", "http://no-such-host.invalid")
        assert (result.exit_code, "check --url" in result.stderr) == (1, True)
        assert "make run" not in result.stderr

    @pytest.mark.parametrize(
        ("script", "said"),
        [
            ((PromptTooLong("The prompt is 5 tokens too long."),), "5 tokens too long"),
            ((STARTED, TextDelta(0, "Hel"), EngineFailed("secret")), "The server made a mistake"),
            ((Overloaded("The pool is full."),), "The pool is full. Asking again may help."),
            (
                (STARTED, TextDelta(0, "Hel"), TargetUnavailable("The target was lost.")),
                "The target was lost. Asking again may help.",
            ),
        ],
    )
    def test_what_the_server_says_is_shown(self, serve, script, said):
        result = rapid("ask", "Who?", "--url", serve(*script).url)
        assert result.exit_code == 1
        assert said in " ".join(result.stderr.split())

    def test_the_url_that_rapid_serve_prints(self, serve):
        for tail in ("/v1", "/v1/", "/"):
            assert rapid("ask", "Who?", "--url", serve().url + tail).exit_code == 0

    @pytest.mark.parametrize(
        ("given", "said"),
        [
            (("Who?", "--temperature", "nan"), "--temperature must be a finite number"),
            (("Who?", "--eta", "nan"), "--eta must be a finite number"),
            (("Who?", "--top-p", "inf"), "--top-p must be a finite number"),
            (("Who?", "--api-key", "ключ"), "--api-key has characters that no key has"),
            (("Wh\udce9?",), "the question is no UTF-8 text: Wh\ufffd?"),
            ((" \n",), "the question is empty"),
            (("Who?", "-d", "caf\udce9.txt"), "caf\ufffd.txt cannot be read: No such file"),
        ],
    )
    def test_what_cannot_be_sent_is_one_sentence(self, serve, given, said):
        server = serve()
        result = rapid("ask", *given, "--url", server.url)
        assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
        assert said in result.stderr
        assert not server.orchestrator.requests

    def test_bad_options_and_files(self, serve, tmp_path):
        url = serve().url
        for name in ("--mode", "--transfer"):
            refused = rapid("ask", "Who?", "--url", url, name, "x")
            assert refused.exit_code == 2
            said = " ".join(refused.stderr.split())
            assert f"Invalid value for '{name}': 'x' is not one of" in said
        assert "cannot be read" in rapid("ask", "-d", str(tmp_path / "no"), "Who?").stderr
        for name, value in (("--top-p", "7"), ("--temperature", "9"), ("--max-draft", "0")):
            refused = rapid("ask", "Who?", "--url", url, name, value)
            assert (refused.exit_code, refused.stderr.startswith(f"error: {name}")) == (2, True)
        assert rapid("ask", "Who?", "--url", url, "--max-tokens", "0").exit_code == 2

    @pytest.mark.parametrize(
        ("said", "shown"),
        [
            ("Shorten it, lower max_tokens, or use `mode: rag`, which",
             "lower --max-tokens, or use `--mode rag`, which"),
            ("rapid.retrieval_tokens must be below it.", "--retrieval-tokens must be below it."),
            ("max_completion_tokens must be positive", "--max-tokens must be positive"),
            ("rapid.documents[1].text is empty", "--document b.txt is empty"),
        ],
    )  # fmt: skip
    def test_the_server_s_names_are_said_as_options(self, serve, tmp_path, said, shown):
        for name in "ab":
            (tmp_path / f"{name}.txt").write_text("text")
        files = [each for name in "ab" for each in ("-d", str(tmp_path / f"{name}.txt"))]
        result = rapid("ask", *files, "Who?", "--url", serve(PromptTooLong(said)).url)
        assert shown in " ".join(result.stderr.split())


LICENSE = "Terms\n\nYou may copy.\nYou may change.\n\nNo warranty.\nNone at all.\n"


def asked_with(serve, tmp_path, *options: str, name: str = "LICENSE", **settings: object) -> Result:
    """Ask about a licence, and get the receipt with these settings."""
    path = tmp_path / name
    path.write_text(LICENSE)
    script = (STARTED, TextDelta(0, "Yes.", (), "stop"), Finished(replace(receipt(), **settings)))
    return rapid("ask", "-d", str(path), "May I?", *options, "--url", serve(*script).url)


def chunk(text: str, document: str = "LICENSE") -> ChunkUsed:
    start = LICENSE.index(text)
    return ChunkUsed(f"d:{start}", document, 1.5, start, start + len(text))


def parsed_from(text: str, media_type: str = "text/plain", pages: Sequence[int] = ()) -> ParsedText:
    layout = Layout.of(text, (PageExtent(start, 612, 792) for start in pages))
    return ParsedText(text, media_type, layout)


class TestSources:
    @pytest.mark.parametrize(
        ("texts", "lines"),
        [
            (["You may copy.\nYou may change.\n\n"], "lines 3-4"),
            (["\nYou may copy.\n"], "line 3"),
            (["No warranty.", "None at all.\n", "Terms"], "lines 1, 6-7"),
        ],
    )
    def test_one_line_says_which_lines_an_answer_is_from(self, serve, tmp_path, texts, lines):
        result = asked_with(serve, tmp_path, chunks=tuple(map(chunk, texts)))
        assert (result.stdout, result.stderr) == ("Yes.\n", f"from LICENSE, {lines}\n")

    @pytest.mark.parametrize(
        "reason",
        [
            "the retrieved passages are not about the question",
            "asked for, but retrieval found nothing above its floor: nothing to fuse with",
            "the drafter does not find the answer in what was retrieved (-2.31)",
        ],
    )
    def test_or_that_nothing_in_the_documents_is_about_the_question(self, serve, tmp_path, reason):
        said = "nothing in LICENSE is about this question: check the answer\n"
        for chunks in ((), (chunk("No warranty."),)):
            assert asked_with(serve, tmp_path, reason=reason, chunks=chunks).stderr == said

    def test_which_is_said_before_the_answer_where_it_is_known_then(self, serve, tmp_path):
        path = tmp_path / "LICENSE"
        path.write_text(LICENSE)
        reason = "the retrieved passages are not about the question"
        ended = Finished(replace(receipt(), reason=reason))
        script = (replace(STARTED, reason=reason), TextDelta(0, "Yes.", (), "stop"), ended)
        asking = ("ask", "-d", str(path), "May I?", "--url", serve(*script).url)
        said = "nothing in LICENSE is about this question: check the answer\n"
        result = rapid(*asking)
        assert (result.exit_code, result.output) == (0, f"{said}Yes.\n{said}")
        result = rapid(*asking, "--json")
        assert (result.exit_code, result.stderr) == (0, "")
        assert json.loads(result.stdout)["nothing_found"]
        plain = asked_with(serve, tmp_path, "--json")
        assert json.loads(plain.stdout)["nothing_found"] is False

    @pytest.mark.parametrize(
        ("answer", "line"),
        [
            ("You may change it. None at all.", "from LICENSE, lines 4, 7"),
            (
                "There is no warranty. Paris is the capital of France.",
                "from LICENSE, line 6; not all of the answer's words stand there: check the answer",
            ),
            (
                "Paris.",
                "the answer does not stand word for word in LICENSE: check the answer",
            ),
            ("Yes.", "no passages are named: mode plain looks nothing up"),
        ],
    )
    def test_an_answer_without_passages_is_looked_for_in_the_documents(self, answer, line):
        said = {"reason": "asked for", "mode": "plain", "chunks": []}
        documents = {"LICENSE": parsed_from(LICENSE)}
        assert origin("What is the capital?", answer, said, documents) == line

    def test_which_is_said_of_an_answer_without_a_drafter_too(self, serve, tmp_path):
        lost = {"mode": "plain", "reason": "no drafter could be had: the target went on alone"}
        said = "no passages are named: no drafter could be had: the target went on alone\n"
        assert asked_with(serve, tmp_path, **lost, chunks=()).stderr == said

    def test_a_question_without_documents_has_no_such_line(self, serve):
        assert rapid("ask", "Who?", "--url", serve().url).stderr == ""

    def test_the_passages_are_printed_where_they_are_asked_for(self, serve, tmp_path):
        chunks = (chunk("You may copy.\nYou may change.\n\n"), chunk("No warranty."))
        result = asked_with(serve, tmp_path, "--sources", chunks=chunks)
        assert result.stdout == (
            "Yes.\n\nLICENSE, lines 3-4:\nYou may copy.\nYou may change.\n"
            "\nLICENSE, line 6:\nNo warranty.\n"
        )

    def test_a_document_of_one_line_is_named_by_characters(self):
        documents = {"notes": parsed_from("One. Two. Three.")}
        said = {"reason": "asked for", "mode": "rag"}
        said |= {"chunks": [{"document": "notes", "start": 5, "end": 9}]}  # type: ignore[dict-item]
        assert origin("How many?", "Two.", said, documents) == "from notes, characters 6-9"

    @pytest.mark.parametrize(
        ("answer", "line"),
        [
            ("You may change it.", "from LICENSE, lines 3-4"),
            ("No.", "from LICENSE, lines 3-4"),
            (
                "You may copy it. The mayor decides.",
                "from LICENSE, lines 3-4; not all of the answer's words stand there: check the "
                "answer",
            ),
            (
                "The mayor decides.",
                "looked in LICENSE, lines 3-4; the answer's words do not stand there: check the "
                "answer",
            ),
        ],
    )
    def test_passages_without_the_answers_words_do_not_support_it(self, answer, line):
        said = {"reason": "evidence", "mode": "fused"}
        start = LICENSE.index("You may copy")
        found = {"document": "LICENSE", "start": start, "end": LICENSE.index("No warranty")}
        said |= {"chunks": [found]}  # type: ignore[dict-item]
        assert origin("What may I do?", answer, said, {"LICENSE": parsed_from(LICENSE)}) == line

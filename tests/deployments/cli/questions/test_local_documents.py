"""Files that `rapid ask` is given: read, told apart, weighed, and named in sources."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import Result

from library.library_config import LibraryConfig
from library.parsing import Layout, ParsedText
from rapid.events import Finished, TextDelta
from rapid.receipt import ChunkUsed
from tests.deployments.cli.command import rapid
from tests.deployments.scripted import STARTED, receipt
from tests.library.parsing.small_pdf import write_pdf

PAGES = [
    [(72, 700, "The first page."), (72, 680, "Its second line.")],
    [(72, 700, "The bridge was built in 1904."), (72, 680, "It is long.")],
]


@pytest.fixture
def paper(tmp_path: Path) -> Path:
    path = tmp_path / "paper.pdf"
    path.write_bytes(write_pdf(PAGES))
    return path


def ask_about(serve, path: Path, start: int, end: int, *options: str) -> Result:
    used = ChunkUsed("d:0", path.name, 1.5, start, end)
    told = replace(receipt(), chunks=(used,))
    url = serve(STARTED, TextDelta(0, "1904.", (), "stop"), Finished(told)).url
    return rapid("ask", "-d", str(path), "When?", "--url", url, *options)


def test_sources_of_a_pdf_have_pages_and_lines_on_them(serve, paper):
    text = "The first page.\nIts second line.\n\nThe bridge was built in 1904.\nIt is long."
    start = text.index("The bridge")
    said = [
        ask_about(serve, paper, *span).stderr
        for span in [(start, start + 30), (0, len(text)), (0, 34)]
    ]
    assert said == [
        "from paper.pdf, page 2 line 1\n",
        "from paper.pdf, pages 1-2\n",
        "looked in paper.pdf, page 1 lines 1-2; the answer's words do not stand there: check the "
        "answer\n",
    ]
    shown = ask_about(serve, paper, start, len(text), "--sources").stdout
    assert shown.endswith(
        "paper.pdf, page 2 lines 1-2:\nThe bridge was built in 1904.\nIt is long.\n"
    )


def test_lines_of_a_page_of_html_are_those_of_its_text(serve, tmp_path):
    path = tmp_path / "page.html"
    path.write_text("<html><body><p>In 1904.</p><p>Two.</p></body></html>")
    assert ask_about(serve, path, 0, 8).stderr == "from page.html, line 1 of its text\n"


def test_json_is_one_object_with_text_sources_receipt_and_usage(serve, paper):
    result = ask_about(serve, paper, 34, 63, "--json", "--sources", "--stats")
    told = json.loads(result.stdout)
    assert told.keys() == {"text", "sources", "nothing_found", "receipt", "usage"}
    assert (told["text"], told["usage"]["prompt_tokens"]) == ("1904.", 100)
    (source,) = told["sources"]
    assert source["place"] == "paper.pdf, page 2 line 1"
    assert source["text"] == "The bridge was built in 1904."
    assert (source["document"], source["start"], source["score"]) == ("paper.pdf", 34, 1.5)
    assert result.stderr == ""


def test_a_folder_is_sent_and_what_is_passed_over_is_counted_in_one_line(serve, tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same.md").write_text(f"In {folder}.")
    (tmp_path / ".hidden").write_text("x")
    (tmp_path / "photo.jpg").write_bytes(b"\xff\xd8\xff\xe0" + bytes(range(256)))
    server = serve()
    result = rapid("ask", "-d", str(tmp_path), "Who?", "--url", server.url)
    (request,) = server.orchestrator.requests
    names = [(each.name, each.text) for each in request.documents]
    assert names == [(str(tmp_path / each / "same.md"), f"In {each}.") for each in "ab"]
    assert result.stderr.splitlines()[0].startswith("passed over in folders: 1 hidden, 1 empty or")


def test_what_is_piped_in_is_a_document(serve):
    server = serve()
    piped = "Die Brücke ist alt.".encode("latin-1")
    result = rapid("ask", "-d", "-", "Who?", "--url", server.url, input=piped)
    (request,) = server.orchestrator.requests
    assert [(each.name, each.text) for each in request.documents] == [
        ("standard input", "Die Brücke ist alt.")
    ]
    assert "standard input is not plain UTF-8: read as Windows-1252 (Latin-1)" in result.stderr


def test_every_file_that_cannot_be_read_is_named_and_nothing_is_sent(serve, tmp_path):
    (tmp_path / "a.pdf").write_bytes(b"%PDF-1.4 and no more")
    (tmp_path / "b.png").write_bytes(bytes(range(256)))
    server = serve()
    named = ("-d", str(tmp_path / "a.pdf"), "-d", str(tmp_path / "b.png"))
    result = rapid("ask", *named, "Who?", "--url", server.url)
    first, second = result.stderr.splitlines()
    assert (result.exit_code, result.stdout, server.orchestrator.requests) == (2, "", [])
    assert first.startswith("error: ")
    assert "a.pdf: The file is broken" in first
    assert "b.png: Files of this kind are not read" in second
    nothing = rapid("ask", "-d", str(tmp_path / "b.*"), "Who?", "--url", server.url)
    assert (nothing.exit_code, "nothing there can be read" in nothing.stderr) == (2, True)


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"max_characters": 100_000}, "this server takes 0.1 MB (100,000 characters)"),
        ({"max_body_bytes": 200_000}, "this server takes 0.2 MB (200,000 bytes)"),
        ({"max_documents": 1}, "there are 2 documents, and this server takes 1 in a question"),
    ],
)
def test_what_the_server_would_refuse_is_not_sent(serve, tmp_path, limits, said):
    sizes = {"big.txt": 900_000, "small.txt": 2_000}
    for name, size in sizes.items():
        (tmp_path / name).write_text("x" * size)
    server = serve(**limits)
    named = [each for name in sizes for each in ("-d", str(tmp_path / name))]
    result = rapid("ask", *named, "Who?", "--url", server.url)
    assert (result.exit_code, server.orchestrator.requests) == (2, [])
    assert said in result.stderr
    if "max_documents" not in limits:
        assert "big.txt has 0.9 MB, small.txt has 0.002 MB" in result.stderr


def test_of_one_document_a_part_is_advised_and_every_limit_that_is_in_the_way(serve, tmp_path):
    (tmp_path / "big.md").write_text("x" * 300_000)
    server = serve(max_characters=100_000, max_body_bytes=200_000)
    result = rapid("ask", "-d", str(tmp_path / "big.md"), "Who?", "--url", server.url)
    assert "ask about a part of the file, or raise api.max_characters and api.max_body_bytes" in (
        result.stderr
    )


def test_what_alone_is_too_many_bytes_can_be_kept_by_the_server(serve, tmp_path):
    (tmp_path / "big.md").write_text("x" * 300_000)
    server = serve(max_characters=400_000, max_body_bytes=200_000)
    result = rapid("ask", "-d", str(tmp_path / "big.md"), "Who?", "--url", server.url)
    assert (result.exit_code, server.orchestrator.requests) == (2, [])
    assert (
        "takes 0.2 MB (200,000 bytes) in a question: have the server keep the file (`rapid "
        "documents add FILE`) and ask about it there (`rapid ask --file ID`), or raise "
        "api.max_body_bytes"
    ) in result.stderr


def test_characters_of_kept_files_count_as_those_that_are_sent(serve, tmp_path):
    for name, size in (("kept", 90_000), ("small", 20_000)):
        (tmp_path / f"{name}.txt").write_text("x" * size)
    server = serve(max_characters=100_000, library=LibraryConfig(folder=tmp_path / "library"))
    named = ("--file", keep(server, tmp_path / "kept.txt"), "-d", str(tmp_path / "small.txt"))
    result = rapid("ask", *named, "Who?", "--url", server.url)
    assert (result.exit_code, server.orchestrator.requests) == (2, [])
    assert "kept.txt has 0.090 MB, small.txt has 0.020 MB; that is 0.1 MB together" in result.stderr


def keep(server, path: Path) -> str:
    """Have the server keep a file, and return its id."""
    return rapid("documents", "add", str(path), "--url", server.url).stdout.split()[0]


@pytest.fixture
def ask_kept(serve, paper, tmp_path):
    """Ask about the paper, which the server keeps, and get an answer from its second page."""
    text = "The first page.\nIts second line.\n\nThe bridge was built in 1904.\nIt is long."

    def ask(answer: str, *options: str, **settings: object) -> Result:
        used = ChunkUsed("d:0", "paper.pdf", 1.5, text.index("The bridge"), len(text))
        told = replace(receipt(), **{"chunks": (used,)} | settings)
        script = (STARTED, TextDelta(0, answer, (), "stop"), Finished(told))
        server = serve(*script, library=LibraryConfig(folder=tmp_path / "library"))
        return rapid("ask", "--file", keep(server, paper), "When?", "--url", server.url, *options)

    return ask


def test_passages_of_a_kept_file_are_printed_and_looked_at_like_those_of_one_that_is_sent(ask_kept):
    result = ask_kept("In 1904.", "--sources")
    assert result.stdout == (
        "In 1904.\n\npaper.pdf, page 2:\nThe bridge was built in 1904.\nIt is long.\n"
    )
    assert result.stderr == "from paper.pdf, page 2\n"
    assert ask_kept("The mayor decides.").stderr == (
        "looked in paper.pdf, page 2; the answer's words do not stand there: check the answer\n"
    )
    (source,) = json.loads(ask_kept("In 1904.", "--json").stdout)["sources"]
    assert source["text"] == "The bridge was built in 1904.\nIt is long."


def test_an_answer_that_looked_nothing_up_is_looked_for_in_a_kept_file_too(ask_kept):
    plain = {"mode": "plain", "reason": "asked for", "chunks": ()}
    assert ask_kept("In 1904.", **plain).stderr == "from paper.pdf, page 2 line 1\n"
    assert ask_kept("In Paris.", **plain).stderr == (
        "the answer does not stand word for word in paper.pdf: check the answer\n"
    )


def test_nothing_is_made_up_of_a_kept_file_that_is_large_or_read_otherwise(ask_kept, monkeypatch):
    module = "deployments.cli.questions.ask_command"
    monkeypatch.setattr(f"{module}._MOST_FETCHED_BYTES", 10)
    assert ask_kept("The mayor decides.").stderr == "looked in paper.pdf, page 2\n"
    assert "The bridge" in ask_kept("The mayor decides.", "--sources").stdout
    otherwise = ParsedText("Other", "application/pdf", Layout.of("Other"))
    monkeypatch.setattr("library.parsing.read_text", lambda *_: otherwise)
    result = ask_kept("The mayor decides.", "--sources")
    assert result.stderr == "looked in paper.pdf, page 2\n"
    assert result.stdout.endswith("paper.pdf, page 2:\n(its text is not at hand)\n")

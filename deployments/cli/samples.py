"""The command ``rapid sample-document``, which generates a document for the embedded models."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Annotated

import typer

from deployments.cli.terminal import fail, note, rapid_command


def sample_document(
    seed: Annotated[int, typer.Option(help="The same seed gives the same document.")] = 7,
    tokens: Annotated[
        int, typer.Option(min=50, max=1_000_000, help="Its length, more or less.")
    ] = 1000,
    out: Annotated[
        Path, typer.Option(file_okay=False, help="Folder to write to; made when missing.")
    ] = Path("sample"),
) -> None:
    """Write a generated document and questions about it, with their answers.

    The embedded models understand only such documents. DIR gets document.txt and questions.jsonl,
    one question and its answer on each line.
    """
    from rapid.embedded.generator import generate_document

    document = generate_document(seed, tokens)
    lines = [
        json.dumps({"question": each.question, "answer": each.answer}, ensure_ascii=False)
        for each in document.questions
    ]
    text_path, questions_path = out / "document.txt", out / "questions.jsonl"
    try:
        out.mkdir(parents=True, exist_ok=True)
        text_path.write_text(document.text, encoding="utf-8")
        questions_path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as error:
        fail(f"{error.filename or out} cannot be written: {error.strerror}")
    note(f"{text_path}: {len(document.text):,} characters")
    note(f"{questions_path}: {len(lines)} questions with answers")
    if not document.questions:
        return
    first = document.questions[0]
    note("\nWith the server running (make run), ask:\n")
    path, question = shlex.quote(str(text_path)), shlex.quote(first.question)
    typer.echo(f"{rapid_command()} ask --document {path} {question}")
    note(f"\nThe document says: {first.answer}")

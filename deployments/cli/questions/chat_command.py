"""The command ``rapid chat``, a conversation about documents with a running server."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from deployments.cli.questions.answer_stream import (
    StreamedAnswer,
    choose_card,
    document_objects,
    is_embedded,
    list_cards,
    stream_answer,
)
from deployments.cli.questions.ask_command import warn_of_foreign
from deployments.cli.questions.citations import origin, passages, warn_of_nothing
from deployments.cli.questions.local_documents import read_documents
from deployments.cli.questions.question_options import (
    MaxTokensOption,
    Mode,
    ModelOption,
    ModeOption,
    SectionsOption,
    SeedOption,
    TemperatureOption,
    make_body,
    show_text,
)
from deployments.cli.server.server_client import KeyOption, Url, connect
from deployments.cli.terminal import DEFAULT_URL, note, print_text

if TYPE_CHECKING:
    import httpx

    from library.parsing import ParsedText

_HELP = """\
/add FILE...   more documents: files, folders, patterns
/mode MODE     how the next questions are answered: {modes}
/sources       the passages of the last answer
/why           why the last answer was made as it was
/quit          leave, as Ctrl-D does; Ctrl-C ends an answer"""


def chat(
    files: Annotated[
        list[Path] | None,
        typer.Argument(metavar="FILE...", help="As --document of 'rapid ask'.", show_default=False),
    ] = None,
    url: Url = DEFAULT_URL,
    api_key: KeyOption = None,
    model: ModelOption = None,
    mode: ModeOption = None,
    sections: SectionsOption = False,
    temperature: TemperatureOption = 0.0,
    seed: SeedOption = None,
    max_tokens: MaxTokensOption = None,
) -> None:
    """Talk about documents; each question comes with those before it, and /help shows commands.

    The server reads the documents once: later questions find them read. Where standard input is no
    terminal, each of its lines is a question, and the exit status is 1 if one was not answered.
    """
    texts = read_documents(files or [])
    with connect(url, api_key) as client:
        cards = list_cards(client)
        card = choose_card(cards, model)
        conversation = Conversation(
            client,
            cards,
            card,
            {"temperature": temperature, "seed": seed, "max_completion_tokens": max_tokens},
            {"mode": mode, "too_long": "sections" if sections else None},
        )
        conversation.add(texts)
        for line in _lines():
            try:
                if line.startswith("/"):
                    if not conversation.obey(line):
                        break
                elif line:
                    conversation.ask(line)
            except KeyboardInterrupt:  # behind an answer, or within a command
                note("interrupted")
    if conversation.has_failed and not _is_terminal():
        raise typer.Exit(1)


class Conversation:
    """A conversation, which this side keeps: each question is sent with all before it.

    A document stands before the question that it came with, and stays there, so that the server
    finds what it has read.

    Attributes:
        has_failed: Whether a question was not answered.
    """

    def __init__(
        self,
        client: httpx.Client,
        cards: Sequence[dict[str, Any]],
        card: dict[str, Any],
        sampling: dict[str, Any],
        rapid: dict[str, Any],
    ) -> None:
        self.has_failed = False
        self._client, self._cards, self._card = client, cards, card
        self._has_warned = not is_embedded(card)
        self._sampling, self._rapid = sampling, rapid
        self._messages: list[dict[str, str]] = []
        self._texts: dict[str, ParsedText] = {}
        self._places: list[int] = []
        self._receipt: dict[str, Any] = {}
        self._usage: dict[str, Any] = {}

    def add(self, texts: dict[str, ParsedText]) -> None:
        """Add documents, which come with the next question; one of the same name is left out."""
        for name, parsed in texts.items():
            if name in self._texts:
                note(f"{name} is there already")
                continue
            self._texts[name] = parsed
            self._places.append(len(self._messages))
        self._warn_of_foreign("")

    def ask(self, question: str) -> None:
        """Ask, and print the answer; one that fails or is interrupted ends nothing else."""
        self._warn_of_foreign(question)
        messages = [*self._messages, {"role": "user", "content": show_text(question)}]
        documents = document_objects(self._texts, self._places)
        rapid = self._rapid | {"documents": documents}
        body = make_body(self._card["id"], messages, rapid, **self._sampling)
        answer = StreamedAnswer()
        try:
            stream_answer(
                self._client,
                body,
                self._card,
                answer,
                partial(print_text, ends_line=False),
                "command",
                lambda reason: warn_of_nothing(reason, [*self._texts]),
            )
        except typer.Exit:  # it has said why
            self.has_failed = True
        except KeyboardInterrupt:
            note("interrupted" if answer.text else "interrupted: the question is forgotten")
        if answer.text:
            typer.echo()
            self._messages = [*messages, {"role": "assistant", "content": answer.text}]
        if answer.receipt and answer.final:  # it is complete
            self._receipt, self._usage = answer.receipt, answer.final["usage"]
            line = origin(question, answer.text, answer.receipt, self._texts)
            if line is not None:
                note(line)

    def obey(self, line: str) -> bool:
        """Do what a line with a command says; return whether the conversation goes on."""
        try:
            command, *words = shlex.split(line)
        except ValueError as error:
            note(f"{line}: {error}")
            return True
        match command, words:
            case "/quit" | "/exit", _:
                return False
            case "/add", [_, *_]:
                try:
                    self.add(read_documents([Path(each).expanduser() for each in words]))
                except typer.Exit:  # it has said why
                    self.has_failed = True
            case "/mode", [mode] if mode in get_args(Mode):
                self._rapid["mode"] = mode
            case "/mode", _:
                note(f"/mode takes one of {', '.join(get_args(Mode))}")
            case "/sources", []:
                self._show_sources()
            case "/why", []:
                self._explain()
            case _:
                if command != "/help":
                    note(f"{line} is no command here; there are:")
                note(_HELP.format(modes=", ".join(get_args(Mode))))
        return True

    def _warn_of_foreign(self, question: str) -> None:
        """Say once of words that an embedded model has never read that it has not."""
        if not self._has_warned:
            texts = {name: each.text for name, each in self._texts.items()}
            self._has_warned = warn_of_foreign(texts, question, self._cards)

    def _show_sources(self) -> None:
        if not self._receipt.get("chunks"):
            note("no passages are known: ask something first, or in another mode")
            return
        for place, text in passages(self._receipt, self._texts):
            print_text(f"{place}:\n{text}\n")

    def _explain(self) -> None:
        if not self._receipt:
            note("nothing has been answered yet")
            return
        mode, contract = self._receipt["mode"], self._receipt["contract"]
        cached = self._usage["prompt_tokens_details"]["cached_tokens"]
        note(
            f"mode {mode}: {self._receipt['reason']}; sampled from: {contract}; "
            f"{cached:,} of {self._usage['prompt_tokens']:,} tokens had been read before"
        )


def _is_terminal() -> bool:
    return sys.stdin.isatty()


def _lines() -> Iterator[str]:
    """Yield what is typed, or the lines of standard input, without the space around them."""
    if not _is_terminal():
        yield from (line.strip() for line in sys.stdin)
        return
    import readline  # noqa: F401 (which gives `input` a history)

    while True:
        try:
            yield input("> ").strip()
        except EOFError:
            typer.echo()
            return
        except KeyboardInterrupt:  # of a line that was begun
            typer.echo()

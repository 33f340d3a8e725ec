"""Two models that stay open for questions about documents."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from typing_extensions import Unpack

from rapid.answering.request import RequestRun
from rapid.answering.services import Services
from rapid.chat_messages import Document, Message
from rapid.errors import BadRequest, RapidError
from rapid.pair.asking import AskSettings, as_request, in_own_words
from rapid.pair.loop_thread import LoopThread
from rapid.pair.pair_stream import Answer, OnProgress, Stream


class Pair:
    """A target with its drafter, open until `close`; made by `rapid.open`."""

    def __init__(
        self, services: Services, loop: LoopThread, opened: ExitStack, temperature: float
    ) -> None:
        self._services = services
        self._temperature = temperature  # of questions that name none
        self._loop = loop
        self._opened = opened
        self._ids = itertools.count()

    def __repr__(self) -> str:
        """Return whether it is open."""
        return f"<rapid.Pair, {'closed' if self._loop.is_closed else 'open'}>"

    def answer(
        self,
        question: str | Sequence[Message],
        *,
        documents: Sequence[str | Document | Path] = (),
        on_progress: OnProgress | None = None,
        **settings: Unpack[AskSettings],
    ) -> Answer:
        """Answer a question about documents.

        Args:
            question: A question, or a whole chat of `rapid.Message`.
            documents: The documents, which the target reads in full: texts, `rapid.Document` where
                they have names, or paths of files (text, Markdown, HTML, PDF, DOCX) and folders.
            on_progress: Called with a `rapid.Reading` while documents are embedded or read for
                longer than a second; what it raises ends the answer.
            settings: Mode, sampling and speculation settings. A temperature that is left out is 0
                with an embedded target, else that of its generation config, or 1.

        Raises:
            BadRequest: An argument or a setting is invalid; ``param`` names it.
            PromptTooLong: Question, documents and answer exceed the target's context.
            RapidError: The answer could not be produced under its contract.
        """
        # Only who is streamed to is told how far the documents are read.
        is_streamed = on_progress is not None
        stream = self._begin(question, documents, settings, on_progress, is_streamed=is_streamed)
        for _ in stream:
            pass
        assert stream.answer is not None
        return stream.answer

    def stream(
        self,
        question: str | Sequence[Message],
        *,
        documents: Sequence[str | Document | Path] = (),
        on_progress: OnProgress | None = None,
        **settings: Unpack[AskSettings],
    ) -> Stream:
        """Answer piece by piece, with the arguments and errors of `answer`.

        Some errors are raised here, the others when a piece is taken; a refusal comes no later
        than the first piece.
        """
        return self._begin(question, documents, settings, on_progress, is_streamed=True)

    def _begin(
        self,
        question: str | Sequence[Message],
        documents: Sequence[str | Document | Path],
        settings: AskSettings,
        on_progress: OnProgress | None,
        *,
        is_streamed: bool,
    ) -> Stream:
        request = as_request(
            f"local-{next(self._ids)}",
            question,
            _read_paths(documents),
            settings,
            is_streamed=is_streamed,
            default_temperature=self._temperature,
        )
        try:
            run = RequestRun(self._services, request)
        except BadRequest as refused:
            raise in_own_words(refused) from None
        return Stream(self._loop, run.events(), on_progress)

    def close(self) -> None:
        """Stop the engines; answers in progress fail."""
        self._opened.close()

    def __enter__(self) -> Self:
        if self._loop.is_closed:
            raise RapidError("this pair is closed: open another one")
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _read_paths(documents: Sequence[str | Document | Path]) -> Sequence[str | Document]:
    """Return documents, of which those that are paths are read.

    Raises:
        BadRequest: A file cannot be read.
    """
    is_list = isinstance(documents, Sequence)
    if not (is_list and any(isinstance(each, Path) for each in documents)):
        return documents  # type: ignore[return-value]  # what is no list is refused by `as_request`
    from library.parsing import read_files  # whose libraries only these callers need

    read = read_files([each for each in documents if isinstance(each, Path)])
    if read.problems:
        raise BadRequest(read.problems[0], "documents", "unreadable_file")
    found: list[str | Document] = []
    place = 0
    for given in documents:
        if isinstance(given, Path):
            files = (each for each in read.files if each.place == place)
            found += (Document(each.name, each.parsed.text) for each in files)
            place += 1
        else:
            found.append(given)
    return found

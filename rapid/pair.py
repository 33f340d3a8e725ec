"""The in-process API: two models that stay open for questions about documents.

::

    with rapid.open("embedded:target", drafter="embedded:drafter") as pair:
        answer = pair.answer("What is the banner of Tezawe?", documents=[text], mode="fused")
        print(answer.text, answer.receipt)

A question takes the same path as over HTTP (`rapid.answering.request`), with the same modes,
receipts and errors. The KV of a document is kept until its room is needed, so a second question
about it skips the prefill. Methods block; they may be called from within a notebook's event loop
and from several threads.
"""

from __future__ import annotations

import asyncio
import functools
import html
import itertools
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from typing_extensions import Unpack

from rapid.answering.answers import join_neighbours
from rapid.answering.pair_pools import Pools
from rapid.answering.passage_gate import PassageGate
from rapid.answering.prompting import RequestPrompts
from rapid.answering.request import RequestRun
from rapid.answering.services import Services
from rapid.asking import AskSettings, as_request, in_own_words
from rapid.chat_messages import Document, Message, ToolCall
from rapid.checkpoints.facts import read_model_facts
from rapid.checkpoints.files import checkpoint_source, read_temperature
from rapid.checkpoints.text import ChatText
from rapid.checkpoints.vocabulary import check_same_vocabulary
from rapid.config import AnsweringConfig, EngineConfig, OwnDrafting, SpeculationConfig
from rapid.engines.forward.loading import LoadedModel, check_memory, without_bars
from rapid.engines.local_ports import LocalPool, make_engine
from rapid.engines.parallel.leading import load_replica
from rapid.errors import BadRequest, ConfigurationError, RapidError
from rapid.estimators import Patience
from rapid.events import (
    LENGTH,
    CallDelta,
    Finished,
    FinishReason,
    GenerationEvent,
    Reading,
    TextDelta,
    ThinkingDelta,
)
from rapid.loop_thread import LoopThread
from rapid.receipt import Receipt
from retrieval import RetrievalConfig, Retriever, open_retriever

OnProgress = Callable[[Reading], None]
"""Function that is told about twice a second how far documents are embedded or read."""

_EMBEDDED = "embedded:"
_FOR_EMBEDDED = RetrievalConfig(chunk_tokens=64, budget_tokens=320)  # as in `serve_config.yaml`


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete answer, with the contract under which it was produced.

    Attributes:
        finish_reason: `stop` where the answer ended by itself, `length` where it was cut,
            `tool_calls` where it ended with calls.
        tool_calls: Its calls of tools, as a `Message` takes them.
        thinking: What the model thought before it, where that is told apart.
    """

    text: str
    finish_reason: FinishReason
    receipt: Receipt
    tool_calls: tuple[ToolCall, ...] = ()
    thinking: str = ""

    def _repr_html_(self) -> str:
        """Return the text, the calls and the receipt, which notebooks show."""
        calls = (f"{each.name}({each.arguments})" for each in self.tool_calls)
        shown = "\n".join(filter(None, (self.text, *calls)))
        text = f'<div style="white-space: pre-wrap">{html.escape(shown)}</div>'
        return text + self.receipt._repr_html_()


class Stream(Iterator[str]):
    """An iterator over the pieces of an answer's text, each available once it is final.

    It keeps its leases until it is read to the end, however slowly, or closed. One thread at a time
    may take pieces; any may close.

    Attributes:
        answer: The complete answer once the last piece was taken; None before.
    """

    def __init__(
        self,
        pair: Pair,
        events: AsyncGenerator[GenerationEvent],
        on_progress: OnProgress | None = None,
    ) -> None:
        self.answer: Answer | None = None
        self._pair = pair
        self._events = events
        self._on_progress = on_progress
        self._pieces: list[str] = []
        self._calls: list[CallDelta] = []
        self._thoughts: list[str] = []
        self._finish = LENGTH
        self._taking = threading.Lock()
        self._turn = asyncio.Lock()

    def __next__(self) -> str:
        if not self._taking.acquire(blocking=False):
            raise RapidError(
                "another thread waits for a piece of this stream: give each thread its own stream"
            )
        try:
            return self._next()
        except StopIteration:
            raise
        except BadRequest as refused:
            raise in_own_words(refused) from None
        except BaseException:
            self.close()
            raise
        finally:
            self._taking.release()

    def _next(self) -> str:
        while self.answer is None:
            event = self._pair._loop.run(self._event)
            if event is None:  # `close` came first
                break
            if isinstance(event, TextDelta):
                self._pieces.append(event.text)
                self._finish = event.finish_reason or self._finish
                if event.text:
                    return event.text
            elif isinstance(event, Reading):
                if self._on_progress is not None:
                    self._on_progress(event)
            elif isinstance(event, CallDelta):
                self._calls.append(event)
            elif isinstance(event, ThinkingDelta):
                self._thoughts.append(event.text)
            elif isinstance(event, Finished):
                calls = tuple(
                    ToolCall(each.id, each.name, each.arguments)
                    for each in join_neighbours(self._calls)
                    if isinstance(each, CallDelta)
                )
                text, thoughts = "".join(self._pieces), "".join(self._thoughts)
                self.answer = Answer(text, self._finish, event.receipt, calls, thoughts)
                self.close()
        raise StopIteration

    def close(self) -> None:
        """Give up the rest of the answer; no-op on a complete one, or where the pair is closed."""
        try:
            self._pair._loop.run(self._end)
        except RapidError:
            if not self._pair._loop.is_closed:
                raise

    async def _event(self) -> GenerationEvent | None:
        async with self._turn:
            return await anext(self._events, None)

    async def _end(self) -> None:
        async with self._turn:  # after a wait that was interrupted, and releases its leases
            await self._events.aclose()


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
        return Stream(self, run.events(), on_progress)

    def close(self) -> None:
        """Stop the engines; answers in progress fail."""
        self._opened.close()

    def __enter__(self) -> Self:
        if self._loop.is_closed:
            raise RapidError("this pair is closed: open another one")
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_pair(
    target: str | Path | EngineConfig,
    *,
    drafter: str | Path | EngineConfig | OwnDrafting | None = None,
    retrieval: RetrievalConfig | None = None,
    speculation: SpeculationConfig | None = None,
    context_tokens: int = 32_768,
    answerable_log_odds: float | None = None,
) -> Pair:
    """Load a target and its drafter, and keep both open for questions.

    Args:
        target: A checkpoint directory, a hub name, ``embedded:target``, or an engine's settings.
        drafter: Likewise. With None the target drafts for itself on the retrieved chunks; with
            settings of `OwnDrafting`, as `PromptLookup`, nothing is retrieved.
        retrieval: How documents are searched; None searches by words, without a download.
        speculation: Defaults for settings that a question leaves out; the paper's rule is a mode.
        context_tokens: Longest prompt plus answer, in tokens, for models given by name; their KV
            pool holds twice that.
        answerable_log_odds: See `AnsweringConfig`: `auto` asks the drafter first.

    Raises:
        ConfigurationError: A checkpoint cannot be used, the two do not share a vocabulary, or the
            memory does not suffice.
    """
    if speculation is not None and speculation.rule != "exact":
        raise ConfigurationError("speculation.rule is not for all answers: ask with mode 'paper'")
    configs = [_engine_config(target, context_tokens)]
    own_drafting = drafter if isinstance(drafter, OwnDrafting) else None
    if drafter is not None and not isinstance(drafter, OwnDrafting):
        configs.append(_engine_config(drafter, context_tokens))
    if own_drafting is None and configs[0].max_leases < 2:  # the target may read what is retrieved
        configs[0] = configs[0].model_copy(update={"max_leases": 2})
    check_memory(*configs, with_pools=True)
    with without_bars():
        models = [load_replica(config) for config in configs]
    vocab_size = check_same_vocabulary(*models) if len(models) == 2 else None
    texts = [ChatText.load(config.model) for config in configs]
    is_embedded = configs[0].model.startswith(_EMBEDDED)
    # The embedded models were taught one right answer to each question.
    temperature = 0.0 if is_embedded else read_temperature(checkpoint_source(configs[0].model))
    if retrieval is None:
        retrieval = _FOR_EMBEDDED if is_embedded else RetrievalConfig()
    with ExitStack() as opening:
        loop = opening.enter_context(LoopThread())
        for model in models:
            if model.followers is not None:
                opening.callback(model.followers.close)
        pools = [_pool(opening, model, vocab_size) for model in models]
        retriever: Retriever | None = None
        if own_drafting is None:
            offsets, tokenizer = texts[0].token_offsets, texts[0].fingerprint
            with without_bars():  # of an embedder
                retriever = loop.run(
                    lambda: open_retriever(retrieval, offsets, tokenizer=tokenizer)
                )
            opening.callback(loop.run, retriever.close)
        config = AnsweringConfig(answerable_log_odds=answerable_log_odds)
        prompts = RequestPrompts(
            texts[0],
            texts[-1],
            retriever,
            budget_tokens=retrieval.budget_tokens,
            budget_for=retrieval.budget_for,
        )
        opening.callback(prompts.close)
        services = Services(
            config=config,
            speculation=speculation or SpeculationConfig(),
            pools=Pools(
                target=pools[0],
                drafter=own_drafting or pools[-1],
                alone=pools[-1],
                max_context={
                    "target": configs[0].max_context or models[0].max_context,
                    "drafter": configs[-1].max_context or models[-1].max_context,
                },
            ),
            prompts=prompts,
            patience=Patience(config.drafter_hangs_s),
            gate=PassageGate(
                is_wanted=own_drafting is None and configs[-1].passage_cache_tokens > 0
            ),
        )
        opening.callback(loop.run, services.gate.end)
        loop.run(functools.partial(_begin_gate, services))
        return Pair(services, loop, opening.pop_all(), temperature)


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


async def _begin_gate(services: Services) -> None:
    services.gate.begin(services.prompts, services.pools)


def _pool(opening: ExitStack, model: LoadedModel, vocab_size: int | None) -> LocalPool:
    engine = make_engine(model, vocab_size)
    opening.callback(engine.close)
    return LocalPool(engine)


def _engine_config(model: str | Path | EngineConfig, context_tokens: int) -> EngineConfig:
    if isinstance(model, EngineConfig):
        return model
    if isinstance(model, Path):
        model = str(model)
    if not isinstance(model, str):
        raise ConfigurationError(
            "a model must be a checkpoint directory, a hub name or a rapid.config.EngineConfig; "
            f"it is of type {type(model).__name__}"
        )
    facts = read_model_facts(EngineConfig(model=model))
    longest = min(context_tokens, facts.num_positions)
    return EngineConfig(model=model, max_context=longest, kv_cache_tokens=2 * longest)

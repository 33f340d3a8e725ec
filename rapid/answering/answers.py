"""The answers of a request: text deltas and counters made from the verdicts of its choices."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from itertools import groupby

from rapid.answering.thinking.spoken_thinking import SpokenThinkingStream
from rapid.answering.thinking.thinking_stream import ThinkingStream
from rapid.calling.call_reader import CallPiece, CallReader
from rapid.checkpoints.text import ChatText
from rapid.checkpoints.thinking_marks import SpokenMarks
from rapid.checkpoints.token_texts import TextStream
from rapid.errors import GrammarTooComplex
from rapid.events import (
    LENGTH,
    STOP,
    TOOL_CALLS,
    CallDelta,
    ChoiceDelta,
    Finished,
    FinishReason,
    GenerationEvent,
    TextDelta,
    ThinkingDelta,
    TokenText,
)
from rapid.messages import TokenLogprobs, Verdict
from rapid.speculation.statistics import RoundStatistics

logger = logging.getLogger(__name__)


class GrowingAnswer:
    """A growing answer: the text, counters and finish state of one choice."""

    def __init__(
        self,
        choice: int,
        text: ChatText,
        stop: Sequence[str],
        max_tokens: int,
        calls: CallReader | None = None,
        calls_id: str = "",
        stop_ids: Sequence[int] = (),
        *,
        includes_stop: bool = False,
        is_continued: bool = False,
        is_thinking: bool | None = None,
    ) -> None:
        """Begin an answer of at most `max_tokens`.

        Args:
            choice: Its number.
            text: Decodes its tokens.
            stop: Texts before which it ends.
            calls: Reads its calls; None where it has none.
            calls_id: What the ids of its calls are made of.
            stop_ids: Tokens that end it, beside the model's own.
            includes_stop: Whether its text has what ends it.
            is_continued: Whether it continues a text that is no chat.
            is_thinking: Whether its prompt ends within thinking; None where none can follow.
        """
        self.choice = choice
        self.is_finished = False
        self.statistics = RoundStatistics()
        self._text = text
        self._is_thinking = is_thinking
        self._open_text = partial(
            text.stream,
            stop,
            stop_ids,
            includes_stop=includes_stop,
            has_calls=calls is not None,
            is_continued=is_continued,
        )
        self._stream = self.decode_by(self._open_text())
        self._calls, self._calls_id = calls, calls_id
        self._is_continued = is_continued
        self._max_tokens = max_tokens
        self._num_untold = 0
        self._held: tuple[TokenLogprobs, ...] = ()  # of tokens that may be thinking

    @property
    def has_calls(self) -> bool:
        """Whether it has made a call so far."""
        return self._calls is not None and self._calls.num_calls > 0

    def decode_by(self, stream: TextStream) -> ThinkingStream:
        """Return a decoder of its tokens from the first one on, of whose answer `stream` is one."""
        marks = self._text.thinking_marks
        if isinstance(marks, SpokenMarks) and self._is_thinking is not None:
            return SpokenThinkingStream(self._text, stream, marks)
        return ThinkingStream(self._text, stream, is_open=self._is_thinking)

    def spell_tokens(self, most: int) -> Iterator[tuple[str, bool]]:
        """Yield what each of the first `most` tokens added to the text, and if that is thinking.

        The texts that are no thinking are the answer's text, with the calls that are taken from it.
        """
        stream = self.decode_by(self._open_text())
        token_ids = self.statistics.token_ids
        for position, token_id in enumerate(token_ids[:most], 1):
            text = stream.push([token_id])
            if position == len(token_ids):
                text += stream.finish()
            thought = stream.take_thoughts()
            yield text or thought, bool(thought and not text)

    async def follow(self, verdicts: AsyncIterator[Verdict]) -> AsyncIterator[ChoiceDelta]:
        """Yield the deltas of the rounds; the last has a finish reason, and no round follows it.

        An answer whose grammar becomes too complex is cut there, as it would be by its length.
        """
        try:
            async for verdict in verdicts:
                delta = self._take(verdict)
                for each in self._tell(delta):
                    yield each
                if delta.finish_reason:
                    return
        except GrammarTooComplex as error:
            num_tokens = len(self.statistics.token_ids)
            logger.warning("choice %d is cut behind %d tokens: %s", self.choice, num_tokens, error)
            self.statistics.cut_by = "grammar too complex"
            for each in self._tell(self._cut()):
                yield each

    def _tell(self, delta: TextDelta) -> Iterator[ChoiceDelta]:
        """Yield what a round has added, if anything."""
        deltas: list[ChoiceDelta] = [ThinkingDelta(self.choice, self._stream.take_thoughts())]
        deltas += [delta] if self._calls is None else self._tell_apart(delta, self._calls)
        told = [each for each in deltas if _says_anything(each)]
        if told:
            told[-1] = replace(told[-1], num_tokens=self._num_untold)
            self._num_untold = 0
        yield from told

    def _cut(self) -> TextDelta:
        """End here, with what was held back."""
        self.is_finished = True
        num_thinking, text = self._stream.num_thinking, self._stream.finish()
        self.statistics.thinking_tokens = self._stream.num_thinking
        shown = self._held[self._stream.num_thinking - num_thinking :]
        logprobs = tuple(spell(self._text, each) for each in shown)
        return TextDelta(self.choice, text, logprobs, LENGTH)

    def tell_prompt(self, text: str, logprobs: tuple[TokenText, ...], *, is_all: bool) -> TextDelta:
        """Return the delta of the prompt before the answer, or of the prompt alone."""
        self.is_finished = is_all
        return TextDelta(self.choice, text, logprobs, LENGTH if is_all else None)

    def _tell_apart(self, delta: TextDelta, calls: CallReader) -> Iterator[ChoiceDelta]:
        """Yield a round's text and its calls; its log-probabilities and its end come last."""
        pieces = [*calls.push(delta.text)]
        if delta.finish_reason:
            pieces += calls.finish()
        last = ""
        for piece in pieces:
            if last:
                yield TextDelta(self.choice, last)
            last = piece if isinstance(piece, str) else ""
            if isinstance(piece, CallPiece):
                key = f"{self._calls_id}/{self.choice}/{piece.index}".encode()
                name = f"call_{blake2b(key, digest_size=12).hexdigest()}"
                yield CallDelta(
                    self.choice, piece.index, name, piece.name, piece.arguments, piece.begins
                )
        finish = delta.finish_reason
        if finish == STOP and calls.has_whole_calls:  # else a stop string has cut one
            finish = TOOL_CALLS
        yield replace(delta, text=last, finish_reason=finish)

    def _take(self, verdict: Verdict) -> TextDelta:
        before, num_thinking = self._stream.num_tokens, self._stream.num_thinking
        text = self._stream.push(verdict.token_ids)
        num_kept = self._stream.num_tokens - before
        if num_kept < len(verdict.token_ids):  # tokens after a stop string are dropped
            verdict = replace(
                verdict,
                token_ids=verdict.token_ids[:num_kept],
                num_accepted=min(verdict.num_accepted, num_kept),
                logprobs=verdict.logprobs[:num_kept],
                probs=verdict.probs[:num_kept],
                is_finished=False,
            )
        self.statistics.observe(verdict)
        self._num_untold += num_kept
        finish: FinishReason | None = None
        if self._stream.stopped or verdict.is_finished:
            finish = STOP
        elif len(self.statistics.token_ids) >= self._max_tokens:
            finish = LENGTH
        if finish:
            self.is_finished = True
            text += self._stream.finish()
        self.statistics.thinking_tokens = self._stream.num_thinking
        # The end-of-sequence token has no text; who continues a prompt is told what it is worth.
        has_end = verdict.is_finished and self._stream.is_hidden(verdict.token_ids[-1])
        shown = verdict.logprobs[:-1] if has_end and not self._is_continued else verdict.logprobs
        shown = (self._held + shown)[self._stream.num_thinking - num_thinking :]
        is_decided = not self._stream.num_undecided
        self._held, shown = ((), shown) if is_decided else (shown, ())
        logprobs = tuple(spell(self._text, each) for each in shown)
        return TextDelta(self.choice, text, logprobs, finish)


def spell(text: ChatText, token: TokenLogprobs) -> TokenText:
    """Return a token and its alternatives as texts."""
    top = tuple((text.token_text(token_id), logprob) for token_id, logprob in token.top)
    return TokenText(text.token_text(token.token_id), token.logprob, top)


async def gather_deltas(
    events: AsyncIterator[GenerationEvent],
) -> AsyncGenerator[GenerationEvent]:
    """Yield `events` with the first delta as it comes and all later ones just before the receipt.

    For a caller who reads no text before the answer is complete, but may time its beginning: a
    delta of every round costs an orchestrator more than what it does itself for a round
    (``benchmarks/serving/rounds.py``). The later deltas are one for each choice.
    """
    deltas: dict[int, list[ChoiceDelta]] = {}
    has_begun = False
    async for event in events:
        if isinstance(event, ChoiceDelta) and has_begun:
            deltas.setdefault(event.choice, []).append(event)
            continue
        has_begun = has_begun or isinstance(event, ChoiceDelta)
        if isinstance(event, Finished):
            for _, parts in sorted(deltas.items()):
                for joined in join_neighbours(parts):
                    yield joined
        yield event


def join_neighbours(deltas: Iterable[ChoiceDelta]) -> Iterator[ChoiceDelta]:
    """Yield the deltas of one choice, with neighbours of one kind and call as one."""

    def kind(delta: ChoiceDelta) -> object:
        if isinstance(delta, CallDelta):
            return delta.index
        return type(delta) if isinstance(delta, TextDelta | ThinkingDelta) else id(delta)

    for _, neighbours in groupby(deltas, kind):
        first, *rest = neighbours
        if isinstance(first, TextDelta):
            first = as_one([first, *(each for each in rest if isinstance(each, TextDelta))])
        elif isinstance(first, ThinkingDelta):
            texts = (each.text for each in rest if isinstance(each, ThinkingDelta))
            num_tokens = sum(each.num_tokens for each in (first, *rest))
            first = replace(first, text=first.text + "".join(texts), num_tokens=num_tokens)
        elif isinstance(first, CallDelta):
            pieces = (each.arguments for each in rest if isinstance(each, CallDelta))
            num_tokens = sum(each.num_tokens for each in (first, *rest))
            arguments = first.arguments + "".join(pieces)
            first = replace(first, arguments=arguments, num_tokens=num_tokens)
        yield first


def as_one(parts: Sequence[TextDelta]) -> TextDelta:
    """Return consecutive deltas of one choice as one delta."""
    text = "".join(part.text for part in parts)
    logprobs = tuple(each for part in parts for each in part.logprobs)
    num_tokens = sum(part.num_tokens for part in parts)
    finish = parts[-1].finish_reason
    return TextDelta(parts[0].choice, text, logprobs, finish, num_tokens=num_tokens)


def _says_anything(delta: ChoiceDelta) -> bool:
    if isinstance(delta, TextDelta):
        return bool(delta.text or delta.logprobs or delta.finish_reason)
    return not isinstance(delta, ThinkingDelta) or bool(delta.text)


async def merge_answers(
    answers: Sequence[AsyncIterator[ChoiceDelta]],
) -> AsyncGenerator[ChoiceDelta]:
    """Yield the deltas of several choices as they come; the first failure ends all.

    Tokens that an answer has counted as generated are never generated again, even after a failover.
    So every delta that was made before the failure is yielded before the failure is raised.
    """
    if len(answers) == 1:
        async for delta in answers[0]:
            yield delta
        return
    deltas: asyncio.Queue[ChoiceDelta | BaseException | None] = asyncio.Queue()

    async def pump(answer: AsyncIterator[ChoiceDelta]) -> None:
        try:
            async for delta in answer:
                deltas.put_nowait(delta)
            deltas.put_nowait(None)
        except Exception as error:
            deltas.put_nowait(error)

    pumps = [asyncio.create_task(pump(answer)) for answer in answers]
    try:
        num_left = len(pumps)
        while num_left:
            event = await deltas.get()
            if isinstance(event, BaseException):
                for task in pumps:
                    task.cancel()
                await asyncio.wait(pumps)  # after this no further verdict is taken
                while not deltas.empty():
                    if isinstance(left := deltas.get_nowait(), ChoiceDelta):
                        yield left
                raise event
            if event is None:
                num_left -= 1
            else:
                yield event
    finally:
        for task in pumps:
            task.cancel()

"""The answers of a request: text deltas and counters made from the verdicts of its choices."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import replace

from rapid.checkpoints.text import ChatText
from rapid.messages import (
    LENGTH,
    STOP,
    ChoiceDelta,
    Finished,
    FinishReason,
    GenerationEvent,
    TextDelta,
    TokenLogprobs,
    TokenText,
    Verdict,
)
from rapid.speculation.statistics import RoundStatistics


class GrowingAnswer:
    """A growing answer: the text, counters and finish state of one choice."""

    def __init__(self, choice: int, text: ChatText, stop: Sequence[str], max_tokens: int) -> None:
        self.choice = choice
        self.is_finished = False
        self.statistics = RoundStatistics()
        self._text = text
        self._stream = text.stream(stop)
        self._max_tokens = max_tokens
        self._num_untold = 0

    async def follow(self, verdicts: AsyncIterator[Verdict]) -> AsyncIterator[TextDelta]:
        """Yield the deltas of the rounds; the last has a finish reason, and no round follows it."""
        async for verdict in verdicts:
            delta = self._take(verdict)
            if delta.text or delta.logprobs or delta.finish_reason:
                self._num_untold = 0
                yield delta
            if delta.finish_reason:
                return

    def _take(self, verdict: Verdict) -> TextDelta:
        before = self._stream.num_tokens
        text = self._stream.push(verdict.token_ids)
        num_kept = self._stream.num_tokens - before
        if num_kept < len(verdict.token_ids):  # tokens after a stop string are dropped
            verdict = replace(
                verdict,
                token_ids=verdict.token_ids[:num_kept],
                num_accepted=min(verdict.num_accepted, num_kept),
                logprobs=verdict.logprobs[:num_kept],
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
        # The end-of-sequence token has no text.
        shown = verdict.logprobs[:-1] if verdict.is_finished else verdict.logprobs
        logprobs = tuple(self._token_text(each) for each in shown)
        return TextDelta(self.choice, text, logprobs, finish, self._num_untold)

    def _token_text(self, token: TokenLogprobs) -> TokenText:
        text = self._text.token_text
        top = tuple((text(token_id), logprob) for token_id, logprob in token.top)
        return TokenText(text(token.token_id), token.logprob, top)


async def gather_deltas(
    events: AsyncIterator[GenerationEvent],
) -> AsyncGenerator[GenerationEvent]:
    """Yield `events` with the first delta as it comes and all later ones just before the receipt.

    For a caller who reads no text before the answer is complete, but may time its beginning: a
    delta of every round costs an orchestrator more than what it does itself for a round
    (``benchmarks/serving/rounds.py``). The later deltas are one for each choice.
    """
    deltas: dict[int, list[TextDelta]] = {}
    has_begun = False
    async for event in events:
        if isinstance(event, TextDelta) and has_begun:
            deltas.setdefault(event.choice, []).append(event)
            continue
        has_begun = has_begun or isinstance(event, TextDelta)
        if isinstance(event, ChoiceDelta) and (before := deltas.pop(event.choice, None)):
            yield as_one(before)  # what is of another kind keeps its place in the choice
        if isinstance(event, Finished):
            for _, parts in sorted(deltas.items()):
                yield as_one(parts)
        yield event


def as_one(parts: Sequence[TextDelta]) -> TextDelta:
    """Return consecutive deltas of one choice as one delta."""
    text = "".join(part.text for part in parts)
    logprobs = tuple(each for part in parts for each in part.logprobs)
    num_tokens = sum(part.num_tokens for part in parts)
    return TextDelta(parts[0].choice, text, logprobs, parts[-1].finish_reason, num_tokens)


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

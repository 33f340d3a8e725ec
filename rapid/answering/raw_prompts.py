"""Requests with several prompts that are no chats, each of which is a run of its own.

They are answered a few at a time, under one `Started` and one receipt. What a prompt has in common
with the one before it is read once: by the engine's prefix cache, as among all prompts; and where
log-probabilities of prompts are wanted, those of the common part are taken from the prompt before.
So four options after one context cost one read of the context.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace

import numpy as np

from rapid.answering.answers import merge_answers
from rapid.answering.request import RequestRun
from rapid.answering.run import Run
from rapid.answering.services import Services
from rapid.events import ChoiceDelta, Finished, GenerationEvent, Started, TextDelta, TokenText
from rapid.messages import GenerateRequest, Int32Array
from rapid.receipt import Receipt

_TOLD_AT_ONCE = 512  # tokens of a prompt in one delta: 32,000 took 0.5 s to render
_AT_ONCE = 4  # prompts of one request in run: the usual options of one question


async def answer_prompts(
    services: Services, request: GenerateRequest
) -> AsyncGenerator[GenerationEvent]:
    """Yield the events of a request, as `RequestRun.events`; errors are its own.

    Answer `i` of prompt `p` is choice ``p * num_choices + i``. No prompt is begun before all of
    them are known to fit.
    """
    services.prompts.weigh(request)
    is_one = len(request.prompts) < 2
    running: RequestRun | _Several
    if not is_one:
        running = _Several(services, request)
    elif request.tools is None:
        running = RequestRun(services, request)
    else:  # whose grammar is compiled, for half a second
        running = await asyncio.to_thread(RequestRun, services, request)
    async with aclosing(running.events()) as events:
        async for event in events:
            for part in _cut(event):
                yield part


def _cut(event: GenerationEvent) -> Iterator[GenerationEvent]:
    """Yield a delta with the tokens of a long prompt in parts, each with its tokens' text."""
    if not isinstance(event, TextDelta) or len(event.logprobs) <= _TOLD_AT_ONCE:
        yield event
        return
    tokens, text = event.logprobs, event.text
    while len(tokens) > _TOLD_AT_ONCE:
        part, tokens = tokens[:_TOLD_AT_ONCE], tokens[_TOLD_AT_ONCE:]
        length = sum(len(token.text) for token in part)
        yield TextDelta(event.choice, text[:length], part)
        text = text[length:]
    yield replace(event, text=text, logprobs=tokens)


class _Several:
    """The prompts of one request."""

    def __init__(self, services: Services, request: GenerateRequest) -> None:
        self._services, self._request = services, request
        self._parts = [replace(request, prompts=(prompt,)) for prompt in request.prompts]
        self._receipts: list[Receipt | None] = [None] * len(self._parts)
        self._places = asyncio.Semaphore(_AT_ONCE)
        self._has_lease = [asyncio.Event() for _ in self._parts]
        # The prompts' tokens, where they have log-probabilities.
        self._told: list[asyncio.Future[tuple[TokenText, ...]]] = []

    async def events(self) -> AsyncGenerator[GenerationEvent]:
        """Yield `Started`, then the deltas of all prompts as they come, then `Finished`."""
        prompts = await self._encode()
        if self._request.echoes_prompt and self._request.num_logprobs is not None:
            future = asyncio.get_running_loop().create_future
            self._told = [future() for _ in prompts]
            for index in range(1, len(prompts)):
                num_known = _num_common(prompts[index - 1], prompts[index])
                self._parts[index] = replace(self._parts[index], num_known=num_known)
        runs = [
            RequestRun(self._services, part, is_started=index > 0)
            for index, part in enumerate(self._parts)
        ]
        first = runs[0].events()
        is_begun = False
        try:
            async for event in first:
                if isinstance(event, Started):
                    self._has_lease[0].set()
                    yield replace(event, prompt_tokens=sum(map(len, prompts)))
                    break
                yield event
            is_begun = True
        finally:
            if not is_begun:
                await first.aclose()
        rest = [first, *(run.events() for run in runs[1:])]
        merged = merge_answers([self._deltas(index, each) for index, each in enumerate(rest)])
        async with aclosing(merged) as deltas:
            async for delta in deltas:
                yield delta
        yield Finished(_sum([each for each in self._receipts if each is not None]))

    async def _encode(self) -> list[Int32Array]:
        """Return the prompts' tokens.

        Raises:
            BadRequest: One cannot be served.
            PromptTooLong: One does not fit.
        """
        plan = Run(self._services, self._parts[0]).plan
        prompts = []
        for part in self._parts:
            encode = self._services.prompts.target_prompt
            prompts.append(await encode(part, plan.max_context["target"]))
            plan.fit("target", len(prompts[-1]), part.max_tokens)
        return prompts

    async def _deltas(
        self, index: int, running: AsyncGenerator[GenerationEvent]
    ) -> AsyncIterator[ChoiceDelta]:
        """Yield the deltas of one prompt, which begins when the prompt before it holds its lease.

        So prompts wait for room one after the other, and none holds a lease while it waits for what
        a prompt without one is to tell.
        """
        num_choices = self._request.num_choices
        if index > 0:
            await self._has_lease[index - 1].wait()
        async with self._places, aclosing(running) as events:
            awaits_prompt = set(range(num_choices)) if self._told else set()
            async for event in events:
                if isinstance(event, Started):
                    self._has_lease[index].set()
                elif isinstance(event, Finished):
                    self._receipts[index] = event.receipt
                elif isinstance(event, ChoiceDelta):
                    choice = event.choice
                    if choice in awaits_prompt and isinstance(event, TextDelta):
                        awaits_prompt.remove(choice)
                        event = await self._with_known(index, event)
                    yield replace(event, choice=index * num_choices + choice)

    async def _with_known(self, index: int, prompt: TextDelta) -> TextDelta:
        """Return the delta of a prompt with what the prompt before has told of it."""
        if num_known := self._parts[index].num_known:
            before = (await self._told[index - 1])[:num_known]
            prompt = replace(prompt, logprobs=(*before, *prompt.logprobs))
        if not self._told[index].done():
            self._told[index].set_result(prompt.logprobs)
        return prompt


def _num_common(one: Int32Array, other: Int32Array) -> int:
    """Return how many leading tokens two prompts have in common."""
    length = min(len(one), len(other))
    differs = np.flatnonzero(one[:length] != other[:length])
    return int(differs[0]) if len(differs) else length


def _sum(receipts: Sequence[Receipt]) -> Receipt:
    """Return the receipt of all prompts: counts and times are added."""
    first = receipts[0]
    timings = {
        name: sum(r.timings_ms.get(name, 0.0) for r in receipts) for name in first.timings_ms
    }
    return replace(
        first,
        prompt_tokens=sum(each.prompt_tokens for each in receipts),
        cached_tokens=sum(each.cached_tokens for each in receipts),
        choices=tuple(choice for each in receipts for choice in each.choices),
        plain_from=tuple(place for each in receipts for place in each.plain_from),
        failovers=tuple(how for each in receipts for how in each.failovers),
        is_fallback=any(each.is_fallback for each in receipts),
        target_s=sum(each.target_s for each in receipts),
        drafter_s=sum(each.drafter_s for each in receipts),
        kv_byte_s=sum(each.kv_byte_s for each in receipts),
        timings_ms={name: round(ms, 3) for name, ms in timings.items()},
    )

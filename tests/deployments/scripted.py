"""An orchestrator that says what a test wants, and notices when it is given up."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from datetime import date
from typing import Any

import numpy as np

from deployments.api.backend.service import GenerationService, Running, Tell, begin
from rapid.answering.prompt.prompt_tokens import TokenizedPrompt
from rapid.errors import BadRequest, UnknownModel
from rapid.events import Finished, GenerationEvent, Started, TextDelta, TokenText
from rapid.messages import GenerateRequest
from rapid.receipt import ChoiceStatistics, ChunkUsed, ExplainedToken, Explanation, Receipt
from retrieval.embeddings.relevance import TextVectors

Step = GenerationEvent | BaseException | float | asyncio.Event


class Generator(ABC):
    """A service whose answers are the events that `generate` yields."""

    @abstractmethod
    def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerationEvent]: ...

    async def begin(self, request: GenerateRequest, tell: Tell) -> Running:
        return await begin(self.generate(request), tell)

    async def ready(self) -> dict[str, Any]:
        return {"ready": True}


async def events_of(service: GenerationService, request: GenerateRequest) -> list[GenerationEvent]:
    """All events of an answer, and what is told before it begins."""
    events: list[GenerationEvent] = []
    running = await service.begin(request, events.append)
    return [*events, running.started, *[event async for event in running.rest]]


class ScriptedOrchestrator(Generator):
    """Yields the steps of its script: events as they are, errors raised, numbers slept.

    Without a script every request gets `answer`. `requests` has what came, `asked` is set when
    something did; `given_up` is set when a request was closed before its end.
    """

    def __init__(self, *script: Step) -> None:
        self.script: Sequence[Step] | None = script or None
        self.requests: list[GenerateRequest] = []
        self.asked, self.given_up = asyncio.Event(), asyncio.Event()
        self.state: dict[str, Any] | Exception = {"ready": True, "pools": {}, "engines": []}

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerationEvent]:
        self.requests.append(request)
        self.asked.set()
        is_done = False
        try:
            for step in answer(request) if self.script is None else self.script:
                if isinstance(step, BaseException):
                    raise step
                if isinstance(step, float):
                    await asyncio.sleep(step)
                elif isinstance(step, asyncio.Event):
                    await step.wait()
                else:
                    yield step
            is_done = True
        finally:
            if not is_done:
                self.given_up.set()

    async def embed(
        self, tenant: str, texts: Sequence[str], model: str | None, query: str | None = None
    ) -> TextVectors:
        """Vectors of a text's length, or the share of each text that is in the query."""
        if model not in (None, "lengths"):
            raise UnknownModel(f"The model {model!r} does not exist.")
        scores = tuple(sum(c in query for c in each) / len(each) for each in texts if query)
        vectors = np.array([[len(each), 0.5] for each in texts], np.float32)
        return TextVectors("lengths", vectors, scores, sum(map(len, texts)))

    async def tokenize(self, request: GenerateRequest) -> TokenizedPrompt:
        """Each character is a token; a chat's are those of its last message."""
        self.requests.append(request)
        text = str(request.prompts[0]) if request.prompts else request.messages[-1].text
        begin = [1] if request.adds_special_tokens else []
        return TokenizedPrompt((*begin, *map(ord, text)), (*("^" for _ in begin), *text), 64)

    async def detokenize(self, request: GenerateRequest) -> str:
        if any(int(each) > 0x10FFFF or 0xD800 <= int(each) < 0xE000 for each in request.prompts[0]):
            raise BadRequest("there is no such token", "messages")
        return "".join(chr(int(each)) for each in request.prompts[0])

    async def ready(self) -> dict[str, Any]:
        if isinstance(self.state, Exception):
            raise self.state
        return self.state


STARTED = Started("fused", "retrieval found evidence", "fused", "evidence found")


def answer(request: GenerateRequest) -> list[GenerationEvent]:
    """Three rounds for each choice: "Hello", ", wörld", "!"."""
    events: list[GenerationEvent] = [STARTED]
    for text, finish in (("Hello", None), (", wörld", None), ("!", "stop")):
        for choice in range(request.num_choices):
            events.append(TextDelta(choice, text, token_texts(request, text), finish))
    said = receipt(request.num_choices, is_explained=request.explain)
    asked = request.speculation.mode
    return [*events, Finished(said if asked == "auto" else replace(said, mode=asked))]


def token_texts(request: GenerateRequest, text: str) -> tuple[TokenText, ...]:
    if request.num_logprobs is None:
        return ()
    top = ((text, -0.5), ("other", -1.5))[: request.num_logprobs]
    return (TokenText(text, -0.5, top),)


EXPLAINED_TOKENS = (
    ExplainedToken("Hello", "drafted", 0.25, 0.5, 0.4, "c1"),
    ExplainedToken("", "corrected", 1.0, 0.0, 1.0),
)


def receipt(num_choices: int = 1, *, is_explained: bool = False) -> Receipt:
    return Receipt(
        mode="fused",
        reason="retrieval found evidence",
        cause="evidence found",
        contract="fused",
        seed=7,
        date=date(2026, 1, 31),
        coupling="shared_noise",
        transfer="boost",
        eta=10.0,
        max_draft=10,
        plausibility=0.1,
        draft_top_k=64,
        transfer_temperature=1.0,
        prompt_tokens=100,
        cached_tokens=0,
        choices=(ChoiceStatistics(3, 9, 6, 2, 0, 8, {3: (0, 1, 1, 1)}),) * num_choices,
        chunks=(ChunkUsed("doc:0", "notes", 1.5, 0, 40),),
        timings_ms={"queue": 1.0, "retrieval": 2.0},
        plain_from=(None,) * num_choices,
        explanation=Explanation(
            (1, 2), (3,), (6,), ((4, 5),), (("drafted", "corrected"),), (EXPLAINED_TOKENS,)
        )
        if is_explained
        else None,
    )

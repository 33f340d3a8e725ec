"""What the models read in one request: its prompts, with retrieval, and whether they fit."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import replace
from typing import Any

from rapid.answering.leases.sources import WitnessedSource, choose
from rapid.answering.mode.decisions import Decision, Evidence, decide, decide_without_reader
from rapid.answering.prompt.prompting import NOTHING, DrafterPrompt
from rapid.answering.run import Run
from rapid.errors import PromptTooLong
from rapid.events import Reading
from rapid.messages import GenerateRequest
from rapid.tracing import span

_SAY_S = 0.15  # between two looks at how far retrieval is; a stream begins 0.2 s after its request


class Readings:
    """The prompts of target, drafter and witness, kept in the request's run."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._prompts = run.services.prompts
        self._news: Reading | None = None

    async def read(self, begins: asyncio.Event) -> None:
        """Build the prompt of the model that answers, and resolve the mode where that needs it.

        `begins` is set before retrieval, if the mode needs it first.
        """
        run, asked = self._run, self._run.plan.mode
        if asked == "plain":
            run.decision = decide(asked, Evidence(0))
        elif own_drafting := run.plan.own_drafting:
            run.decision = decide_without_reader(asked, own_drafting)
            run.source = choose(own_drafting, run.services.pools.target)
        elif asked == "auto" and run.request.prompts:
            run.decision = decide(asked, NOTHING)
        if run.plan.role == "target":
            try:
                await self.render_chat()
                run.plan.fit("target", len(run.prompts["target"]), self._request.max_tokens)
            except PromptTooLong:
                if self._request.speculation.truncates and await self._drop_turns():
                    return
                if self._request.speculation.too_long == "refuse" or not self._request.documents:
                    raise
                if run.plan.own_drafting:  # nothing is retrieved there
                    raise
                begins.set()
                await self._shorten()
        elif asked == "rag":
            begins.set()
            run.decision, _ = await self.resolve()

    async def render_chat(self) -> None:
        """Render the whole chat as the target's prompt.

        Raises:
            PromptTooLong: It does not fit the target's context.
        """
        with span("tokenize"):
            try:
                prompt_ids = await self._prompts.target_prompt(
                    self._request, self._run.plan.max_context["target"]
                )
            except PromptTooLong as error:
                raise PromptTooLong(f"{error}{self._run.plan.hint('target')}") from None
        self._run.prompts["target"] = prompt_ids

    async def _drop_turns(self) -> bool:
        """Let the target read the chat without its oldest turns; return whether it fits then.

        The drafter's retrieval still searches them.
        """
        run, longest = self._run, self._request.max_tokens
        asked = self._request, run.plan.max_context["target"], run.plan.room(longest)
        try:
            with span("truncate"):
                prompt_ids, left_out = await self._prompts.drop_turns(*asked)
            run.plan.fit("target", len(prompt_ids), longest)
        except PromptTooLong:
            return False
        run.prompts["target"], run.left_out = prompt_ids, left_out
        return True

    async def _shorten(self) -> None:
        """Let the drafter answer from the documents, or the target read the parts of them that fit.

        Raises:
            PromptTooLong: The rest of the chat is too long already, or nothing of the documents has
                to do with the question.
            RetrievalUnavailable: Nothing can be retrieved now.
        """
        run = self._run
        if self._request.speculation.too_long == "rag":
            run.prompts.clear()
            # In a thread, as the drafter's grammar of calls may be compiled, for half a second.
            await asyncio.to_thread(run.replan, "rag")
            decision, _ = await self.resolve()
            run.decision = replace(decision, cause="target's prompt too long")
            return
        room = run.plan.room(self._request.max_tokens)
        began = time.monotonic()
        with span("sections"):
            run.prompts["target"], run.sections = await self._prompts.shorten_prompt(
                self._request, run.plan.max_context["target"], room, tell=self._note
            )
        run.retrieval_ms += 1e3 * (time.monotonic() - began)

    @property
    def _request(self) -> GenerateRequest:
        return self._run.request

    async def find(self, answer: str = "") -> DrafterPrompt:
        """Retrieve what the drafter is to read, for the question and the answer so far."""
        began = time.monotonic()
        with span("retrieval") as recorded:
            read = self._run.prompts.get("target")
            num_tokens = None if read is None else len(read)
            # Citations say which passages the drafter needed, and so depend on its prompt.
            ignores_drafts = self._run.plan.ignores_drafts and not self._request.citations
            found = await self._prompts.drafter_prompt(
                self._request,
                answer,
                num_tokens=num_tokens,
                tell=self._note,
                ignores_drafts=ignores_drafts,
            )
            recorded.set_attribute("rapid.chunks", len(found.chunks))
        self._run.retrieval_ms += 1e3 * (time.monotonic() - began)
        return found

    async def resolve(self) -> tuple[Decision, DrafterPrompt]:
        """Retrieve, choose the mode by what was found, and use that if the mode needs it.

        Errors are those of `decide` and `use`.
        """
        found, run = await self.find(), self._run
        decision = decide(run.plan.mode, found.evidence, by_text=run.drafts_from_text)
        if decision.is_drafted or run.plan.role == "drafter":
            await self.use(found, has_witness=isinstance(run.source, WitnessedSource))
        return decision, found

    def _note(self, news: Reading) -> None:
        self._news = news

    async def say_during(
        self, work: Callable[[asyncio.Event], Coroutine[Any, Any, None]]
    ) -> AsyncGenerator[Reading]:
        """Yield how far retrieval is, until work that waits for it is done; closing this ends it.

        What is said begins the response, after which a refusal has no status any more.

        Args:
            work: Sets its argument when it waits for nothing any more that may refuse the request
                before retrieval is done.

        Raises:
            Exception: What the work raised.
        """
        begins = asyncio.Event()
        doing = asyncio.create_task(work(begins))
        try:
            while not (await asyncio.wait({doing}, timeout=_SAY_S))[0]:
                if self._request.is_streamed and begins.is_set() and self._news is not None:
                    news, self._news = self._news, None
                    yield news
        finally:
            doing.cancel()
            await asyncio.wait({doing})
        doing.result()

    async def use(self, found: DrafterPrompt, *, has_witness: bool = False) -> None:
        """Make what was found the prompt of the drafter and, if there is one, of the witness.

        Raises:
            PromptTooLong: The drafter is to draft, and its context is too short for the answer.
        """
        run = self._run
        if run.plan.role == "target":
            run.plan.fit("drafter", len(found.prompt_ids), run.session.terms.max_tokens)
        run.prompts["drafter"] = found.prompt_ids
        run.chunks, run.joined_query = found.chunks, found.joined
        run.passages = found.passages if run.services.gate.is_open else ()
        if has_witness:
            run.prompts["witness"] = await self._prompts.witness_prompt(self._request, found)

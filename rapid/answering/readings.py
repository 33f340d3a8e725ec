"""What the models read in one request: its prompts, with retrieval, and whether they fit."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any

from rapid.answering.prompting import DrafterPrompt
from rapid.answering.run import Run
from rapid.errors import PromptTooLong
from rapid.messages import Reading
from rapid.tracing import span

_SAY_S = 0.5  # between two looks at how far retrieval is


class Readings:
    """The prompts of target, drafter and witness, kept in the request's run."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._request, self._prompts = run.request, run.services.prompts
        self._news: Reading | None = None

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

    async def find(self, answer: str = "") -> DrafterPrompt:
        """Retrieve what the drafter is to read, for the question and the answer so far."""
        began = time.monotonic()
        with span("retrieval") as recorded:
            read = self._run.prompts.get("target")
            num_tokens = None if read is None else len(read)
            found = await self._prompts.drafter_prompt(
                self._request, answer, num_tokens=num_tokens, tell=self._note
            )
            recorded.set_attribute("rapid.chunks", len(found.chunks))
        self._run.retrieval_ms += 1e3 * (time.monotonic() - began)
        return found

    def _note(self, news: Reading) -> None:
        self._news = news

    async def say_until(
        self, done: asyncio.Task[Any], begins: asyncio.Event
    ) -> AsyncGenerator[Reading]:
        """Yield how far retrieval is, until a task that waits for it is done, and end the task.

        What is said begins the response, after which a refusal has no status any more.

        Args:
            done: The task.
            begins: Is set when the task waits for nothing any more that may refuse the request
                before retrieval is done.
        """
        try:
            while not (await asyncio.wait({done}, timeout=_SAY_S))[0]:
                if self._request.is_streamed and begins.is_set() and self._news is not None:
                    news, self._news = self._news, None
                    yield news
        finally:
            done.cancel()
            await asyncio.wait({done})

    async def use(self, found: DrafterPrompt, *, has_witness: bool = False) -> None:
        """Make what was found the prompt of the drafter and, if there is one, of the witness."""
        self._run.prompts["drafter"] = found.prompt_ids
        self._run.chunks = found.chunks
        if has_witness:
            witness_ids = await self._prompts.witness_prompt(self._request, found)
            self._run.prompts["witness"] = witness_ids

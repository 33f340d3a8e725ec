"""The two prompts of a request as token ids, with retrieval between them.

Tokenizing a long document takes a while and runs in threads. This is the one place where the tenant
of a request reaches retrieval.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rapid.answering.query import choose_query
from rapid.answering.resolution import Evidence
from rapid.checkpoints.text import ChatText
from rapid.errors import RapidError
from rapid.messages import Document, GenerateRequest, Int32Array, Message, as_prompt
from rapid.ports import Chunk, Found, Retrieval
from rapid.prompts import DrafterPlan, drafter_messages, plan_drafter_chat, target_messages

logger = logging.getLogger(__name__)

_NOTHING = Evidence(0, "there is nothing to retrieve from")
_BELOW_FLOOR = Evidence(0, "retrieval found nothing above its floor")
_LOST = Evidence(0, "retrieval did not answer", is_lost=True)
_NO_ROOM = Evidence(0, "no retrieved chunk fits the budget")

BudgetFor = Callable[[int], int]
"""From the number of tokens that may be searched to the number that may be retrieved."""


@dataclass(frozen=True, slots=True)
class Search:
    """What to look for, so that the drafter can answer without reading everything.

    Attributes:
        plan: the chat taken apart, with the documents to search.
        query: what to search them for.
        budget_tokens: how much may be found, in tokens.
    """

    plan: DrafterPlan
    query: str
    budget_tokens: int


def plan_search(
    messages: Sequence[Message],
    documents: Sequence[Document],
    text: ChatText,
    *,
    budget_tokens: int | None,
    budget_for: BudgetFor,
    query: str | None = None,
    answer: str = "",
) -> Search:
    """Decide what the drafter reads word for word, and what is searched for the rest.

    Args:
        messages: the chat.
        documents: its attachments.
        text: the target's tokenizer, which counts.
        budget_tokens: how much may be found; None leaves it to `budget_for`.
        budget_for: chooses the budget by the size of the whole.
        query: what to search for; None takes the question.
        answer: the answer so far, when its drafter is to read something else from now on.
    """
    if budget_tokens is None:
        texts = [document.text for document in documents]
        texts += [message.content for message in messages]
        budget_tokens = budget_for(sum(map(text.count_tokens, texts)))
    last = next(each.content for each in reversed(messages) if each.role == "user")
    chosen = choose_query(last, text.token_offsets, budget_tokens=budget_tokens, query=query)
    plan = plan_drafter_chat(
        messages,
        documents,
        budget_tokens=budget_tokens,
        count_tokens=text.count_tokens,
        question=chosen.question,
    )
    searched_for = f"{chosen.text} {answer}" if answer else chosen.text
    return Search(plan, searched_for, budget_tokens)


@dataclass(frozen=True, slots=True)
class DrafterPrompt:
    """What the drafter reads, and the evidence that it is worth reading."""

    prompt_ids: Int32Array
    chunks: tuple[Chunk, ...]
    evidence: Evidence


class RequestPrompts:
    """Both prompts of any request; shared by all of them."""

    def __init__(
        self,
        target: ChatText,
        drafter: ChatText,
        retrieval: Retrieval | None,
        *,
        budget_tokens: int | None,
        budget_for: BudgetFor,
    ) -> None:
        """Take what all requests use.

        Args:
            target: tokenizer and template of the target.
            drafter: those of the drafter.
            retrieval: None where nothing can be retrieved.
            budget_tokens: the default of ``rapid.retrieval_tokens``; None chooses by length.
            budget_for: chooses it.
        """
        self.target = target
        self.drafter = drafter
        self._retrieval = retrieval
        self._budget_tokens = budget_tokens
        self._budget_for = budget_for

    async def target_prompt(self, request: GenerateRequest) -> Int32Array:
        """Return the whole chat with its documents, as the target reads it [tokens]."""
        chat = target_messages(request.messages, request.documents)
        return as_prompt(await asyncio.to_thread(self.target.encode_chat, chat, day=request.date))

    async def drafter_prompt(self, request: GenerateRequest, answer: str = "") -> DrafterPrompt:
        """Return the chat with what retrieval found in place of its long parts.

        Retrieval that fails is no evidence, not an error.

        Args:
            request: whose chat it is.
            answer: the answer so far, when something is to be found for it as well.
        """
        search = await asyncio.to_thread(
            plan_search,
            request.messages,
            request.documents,
            self.target,
            budget_tokens=request.retrieval_tokens or self._budget_tokens,
            budget_for=self._budget_for,
            query=request.query,
            answer=answer,
        )
        chunks: tuple[Chunk, ...] = ()
        evidence = _NOTHING
        if search.plan.documents:
            try:
                found = await self._retrieve(request.tenant, search)
            except RapidError as error:
                # Only for the log: a store's error can carry its address, keys and answers.
                logger.warning("request %s: no retrieval: %s", request.request_id, error)
                evidence = _LOST
            else:
                chunks = tuple(found.chunks)
                evidence = _evidence_of(found)
        messages = drafter_messages(search.plan, chunks)
        prompt_ids = await asyncio.to_thread(self.drafter.encode_chat, messages, day=request.date)
        return DrafterPrompt(as_prompt(prompt_ids), chunks, evidence)

    def longest_drafter_prompt(self, request: GenerateRequest, num_target_tokens: int) -> int:
        """Estimate how many tokens the drafter reads at most, before anything was retrieved."""
        budget = request.retrieval_tokens or self._budget_tokens
        return min(num_target_tokens, 2 * (budget or self._budget_for(num_target_tokens)))

    async def _retrieve(self, tenant: str, search: Search) -> Found:
        if self._retrieval is None:
            raise RapidError("no retriever is deployed")
        documents = search.plan.documents
        return await self._retrieval.retrieve(tenant, documents, search.query, search.budget_tokens)


def _evidence_of(found: Found) -> Evidence:
    if found.chunks:
        return Evidence(len(found.chunks))
    return _NO_ROOM if found.cleared_floor else _BELOW_FLOOR

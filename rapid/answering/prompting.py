"""The two prompts of a request as token ids, with retrieval between them.

Tokenizing runs in threads, because it takes long for a long document: in few of them, which tenants
take in turns, and never for more text than the context can hold. This is the only module that
passes the tenant of a request to retrieval.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rapid.answering.answerable import append_question
from rapid.answering.decisions import Evidence
from rapid.answering.query import choose_query
from rapid.answering.request_plan import too_long
from rapid.checkpoints.text import ChatText
from rapid.documents import InlineDocuments
from rapid.errors import RapidError, RetrievalPending, UnknownDocument
from rapid.messages import Document, GenerateRequest, Int32Array, Message, Tell, as_prompt
from rapid.ports import DocumentResolver, Found, Passage, Retrieval
from rapid.prompts import DrafterPlan, drafter_messages, plan_drafter_chat, target_messages
from rapid.threads import Threads

logger = logging.getLogger(__name__)

Made = TypeVar("Made")

_NUM_THREADS = 2  # a megabyte of text takes each about 125 MB meanwhile
_PLAUSIBLE_CHARACTERS = 8  # of a token; a text with more to each token of the context is suspect
_NOTHING = Evidence(0, "nothing to retrieve from")
_BELOW_FLOOR = Evidence(0, "nothing above the floor")
_LOST = Evidence(0, "retrieval lost")
_PENDING = Evidence(0, "still indexing")
_NO_ROOM = Evidence(0, "nothing fits the budget")

BudgetFor = Callable[[int], int]
"""Function from the number of tokens to search to the number of tokens to retrieve."""


@dataclass(frozen=True, slots=True)
class Search:
    """A planned retrieval for the drafter's prompt.

    Attributes:
        plan: The drafter's chat with its gaps, and the documents to search.
        query: Text to search for.
        budget_tokens: Tokens that may be retrieved.
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
    num_tokens: int | None = None,
    query: str | None = None,
    answer: str = "",
) -> Search:
    """Plan what the drafter reads verbatim, and the search for the rest.

    Args:
        messages: The chat.
        documents: The attachments.
        text: The target's tokenizer, which counts tokens.
        budget_tokens: Tokens that may be retrieved; None leaves the number to `budget_for`.
        budget_for: Function that chooses the budget from the size of chat and documents.
        num_tokens: Size of chat and documents, where a prompt has told it; None counts them here.
        query: Text to search for; None takes the question.
        answer: The answer so far, which is added to the query when the drafter's prompt is renewed.
    """
    if budget_tokens is None:
        if num_tokens is None:
            texts = [document.text for document in documents]
            texts += [message.text for message in messages]
            num_tokens = sum(map(text.count_tokens, texts))
        budget_tokens = budget_for(num_tokens)
    last = next(each.text for each in reversed(messages) if each.role == "user")
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
    """The drafter's prompt, with its retrieved chunks and the evidence for the choice of a mode.

    Attributes:
        messages: The chat that `prompt_ids` render, with retrieved chunks in place of its long
            parts.
    """

    prompt_ids: Int32Array
    chunks: tuple[Passage, ...]
    evidence: Evidence
    messages: tuple[Message, ...]


class RequestPrompts:
    """The builder of both prompts, shared by all requests."""

    def __init__(
        self,
        target: ChatText,
        drafter: ChatText,
        retrieval: Retrieval | None,
        *,
        budget_tokens: int | None,
        budget_for: BudgetFor,
        resolver: DocumentResolver | None = None,
    ) -> None:
        """Create a builder with the settings that all requests share.

        Args:
            target: Tokenizer and chat template of the target.
            drafter: Tokenizer and chat template of the drafter.
            retrieval: The search over documents; None where nothing can be retrieved.
            budget_tokens: Default of ``rapid.retrieval_tokens``; None chooses by length.
            budget_for: Function that chooses the budget by length.
            resolver: The source of the documents' texts; None for those that requests carry.
        """
        self.target = target
        self.drafter = drafter
        self.vocab_size = len(target.tokenizer)
        self._retrieval = retrieval
        self._budget_tokens = budget_tokens
        self._budget_for = budget_for
        self._resolver = resolver or InlineDocuments()
        self._threads = Threads(_NUM_THREADS, "rapid-prompts")

    def with_retrieval(
        self, retrieval: Retrieval | None, *, budget_tokens: int | None, budget_for: BudgetFor
    ) -> RequestPrompts:
        """Return a builder with other settings, whose requests wait in line for the same threads.

        The arguments are those of the constructor. Closing either ends the threads of both.
        """
        other = copy.copy(self)
        other._retrieval = retrieval
        other._budget_tokens = budget_tokens
        other._budget_for = budget_for
        return other

    async def read(
        self, request: GenerateRequest, read: Callable[..., Made], *more: object
    ) -> Made:
        """Return what a function of a request's documents returns, in the threads of all requests.

        There are no documents if one was deleted meanwhile.
        """
        documents: tuple[Document, ...] = ()
        with contextlib.suppress(UnknownDocument):
            documents = await self._resolver.resolve(request.tenant, request.documents)
        return await self._threads.run(request.tenant, read, documents, *more)

    def close(self) -> None:
        """End the threads in which prompts are tokenized."""
        self._threads.close()

    async def target_prompt(self, request: GenerateRequest, max_context: int) -> Int32Array:
        """Return the whole chat with its documents, as the target reads it [tokens].

        Raises:
            PromptTooLong: The chat has so much text that it certainly has more than `max_context`
                tokens. It was not tokenized to the end, which would take time and memory.
            UnknownDocument: The text of a document is not known.
        """
        documents = await self._resolver.resolve(request.tenant, request.documents)
        encode = self._encode_target_prompt
        asked = request, documents, max_context
        return as_prompt(await self._threads.run(request.tenant, encode, *asked))

    def _encode_target_prompt(
        self, request: GenerateRequest, documents: Sequence[Document], max_context: int
    ) -> list[int]:
        texts = [each.text for each in documents]
        texts += [each.text for each in request.messages]
        is_suspect = sum(map(len, texts)) > _PLAUSIBLE_CHARACTERS * max_context
        if is_suspect and self.target.has_more_tokens(texts, max_context):
            raise too_long(
                max_context,
                f"the prompt has more than the {max_context} tokens of the target's context.",
            )
        chat = target_messages(request.messages, documents)
        return self.target.encode_chat(chat, day=request.date)

    async def drafter_prompt(
        self,
        request: GenerateRequest,
        answer: str = "",
        *,
        num_tokens: int | None = None,
        tell: Tell | None = None,
    ) -> DrafterPrompt:
        """Return the drafter's prompt: the chat with retrieved chunks in place of its long parts.

        If retrieval fails, nothing is raised; `Evidence.is_lost` is then true.

        Args:
            request: The request with the chat.
            answer: The answer so far, with which retrieval searches as well.
            num_tokens: Length of the target's prompt, by which the budget is chosen; None, where
                there is no such prompt, counts the texts.
            tell: Is told how far the indexing of new documents is.

        Raises:
            UnknownDocument: The text of a document is not known.
        """
        documents = await self._resolver.resolve(request.tenant, request.documents)
        search = await self._threads.run(
            request.tenant,
            plan_search,
            request.messages,
            documents,
            self.target,
            budget_tokens=request.retrieval_tokens or self._budget_tokens,
            budget_for=self._budget_for,
            num_tokens=num_tokens,
            query=request.query,
            answer=answer,
        )
        chunks: tuple[Passage, ...] = ()
        evidence = _NOTHING
        if search.plan.documents:
            try:
                found = await self._retrieve(request.tenant, search, tell)
            except RetrievalPending:
                evidence = _PENDING
            except RapidError as error:
                # Logged, never returned: a store's error can hold its address, keys and replies.
                logger.warning("request %s: no retrieval: %s", request.request_id, error)
                evidence = _LOST
            else:
                chunks = tuple(found.chunks)
                evidence = _evidence_of(found)
        messages = drafter_messages(search.plan, chunks)
        prompt_ids = await self._encode(self.drafter, request, messages)
        return DrafterPrompt(as_prompt(prompt_ids), chunks, evidence, messages)

    async def witness_prompt(self, request: GenerateRequest, found: DrafterPrompt) -> Int32Array:
        """Return what the drafter reads, in the target's own template [tokens]."""
        return as_prompt(await self._encode(self.target, request, found.messages))

    async def answerable_prompt(self, request: GenerateRequest, found: DrafterPrompt) -> Int32Array:
        """Return the drafter's prompt with the question whether it can answer [tokens]."""
        return as_prompt(await self._encode(self.drafter, request, append_question(found.messages)))

    async def _encode(
        self, text: ChatText, request: GenerateRequest, messages: Sequence[Message]
    ) -> list[int]:
        encode = text.encode_chat
        return await self._threads.run(request.tenant, encode, messages, day=request.date)

    def longest_drafter_prompt(self, request: GenerateRequest, num_target_tokens: int) -> int:
        """Estimate the longest possible drafter prompt, in tokens, before retrieval."""
        budget = request.retrieval_tokens or self._budget_tokens
        return min(num_target_tokens, 2 * (budget or self._budget_for(num_target_tokens)))

    async def _retrieve(self, tenant: str, search: Search, tell: Tell | None) -> Found:
        if self._retrieval is None:
            raise RapidError("no retriever is deployed")
        documents = search.plan.documents
        return await self._retrieval.retrieve(
            tenant, documents, search.query, search.budget_tokens, tell=tell
        )


def _evidence_of(found: Found) -> Evidence:
    if found.chunks:
        return Evidence(len(found.chunks), is_enough=found.is_evidence)
    return _NO_ROOM if found.cleared_floor else _BELOW_FLOOR

"""The two prompts of a request as token ids, with retrieval between them.

Tokenizing runs in threads, because it takes long for a long document: in few of them, which tenants
take in turns, and never for more text than the context can hold. This is the only module that
passes the tenant of a request to retrieval.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from rapid.answering.mode.answerable import append_question
from rapid.answering.mode.decisions import Evidence
from rapid.answering.prompt.excerpts.passage_order import PassageOrder
from rapid.answering.prompt.excerpts.query import choose_query, join_earlier
from rapid.answering.prompt.excerpts.search_plan import BudgetFor, plan_search
from rapid.answering.prompt.excerpts.sections import drop_worst, join_passages
from rapid.answering.prompt.excerpts.turns import drop_turns
from rapid.answering.prompt.prompt_tokens import (
    TokenizedPrompt,
    encode_prompt,
    encode_raw,
    find_passages,
)
from rapid.chat_messages import Document, Message, ThinkingRequest
from rapid.checkpoints.text import ChatText
from rapid.checkpoints.thinking_marks import ThinkingMarks
from rapid.documents import InlineDocuments
from rapid.errors import (
    PromptTooLong,
    RapidError,
    RetrievalPending,
    RetrievalUnavailable,
    UnknownDocument,
)
from rapid.events import Tell
from rapid.messages import GenerateRequest, Int32Array, as_prompt
from rapid.ports import DocumentResolver, Found, Passage, Retrieval
from rapid.prompts import drafter_messages
from rapid.receipt import ReadPart
from rapid.threads import Threads

logger = logging.getLogger(__name__)

Made = TypeVar("Made")

_NUM_THREADS = 2  # a megabyte of text takes each about 125 MB meanwhile
_CHARACTERS_OF_JSON = 3  # of a token, about, in descriptions of tools
NOTHING = Evidence(0, "nothing to retrieve from")
_BELOW_FLOOR = Evidence(0, "nothing above the floor")
_LOST = Evidence(0, "retrieval lost")
_PENDING = Evidence(0, "still indexing")
_NO_ROOM = Evidence(0, "nothing fits the budget")


@dataclass(frozen=True, slots=True)
class DrafterPrompt:
    """The drafter's prompt, with its retrieved chunks and the evidence for the choice of a mode.

    Attributes:
        messages: The chat that `prompt_ids` render, with retrieved chunks in place of its long
            parts.
        joined: As in `Search`, where something was searched.
        passages: Where the chunks stand in `prompt_ids`, each with the blank line behind it, if the
            answer is the same whatever is drafted.
    """

    prompt_ids: Int32Array
    chunks: tuple[Passage, ...]
    evidence: Evidence
    messages: tuple[Message, ...]
    joined: str | None = None
    passages: tuple[tuple[int, int], ...] = ()


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
        self._order = PassageOrder()

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

    def weigh(self, request: GenerateRequest) -> None:
        """Give the calls of a request's tenant the request's weight in the turns at threads."""
        self._threads.weigh(request.tenant, request.weight)

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
        asked = self.target, request, documents, max_context
        return as_prompt(await self._threads.run(request.tenant, encode_prompt, *asked))

    async def tokenize(self, request: GenerateRequest, max_context: int) -> TokenizedPrompt:
        """Return the tokens of a request's prompt, however long it is.

        Raises:
            BadRequest: The request has no such prompt.
            UnknownDocument: The text of a document is not known.
        """
        documents = await self._resolver.resolve(request.tenant, request.documents)

        def encode() -> TokenizedPrompt:
            token_ids = encode_prompt(self.target, request, documents, sys.maxsize)
            names = self.target.tokenizer.convert_ids_to_tokens(token_ids)
            return TokenizedPrompt(tuple(token_ids), tuple(names), max_context)

        return await self._threads.run(request.tenant, encode)

    async def detokenize(self, request: GenerateRequest) -> str:
        """Return the text of a prompt that is token ids, with the special ones.

        Raises:
            BadRequest: One is beyond the vocabulary.
        """

        def decode() -> str:
            token_ids = encode_raw(self.target, request, sys.maxsize)
            return self.target.decode(token_ids, shows_special=True)

        return await self._threads.run(request.tenant, decode)

    async def drop_turns(
        self, request: GenerateRequest, max_context: int, room: int
    ) -> tuple[Int32Array, tuple[int, ...]]:
        """Return a prompt for the target without the oldest turns, and their messages' places.

        Its documents, its system texts and its question are whole, even if they are too long.

        Args:
            request: The request with the chat.
            max_context: Longest prompt plus answer, in tokens.
            room: Longest prompt, in tokens.

        Raises:
            PromptTooLong: What is whole has certainly more than `max_context` tokens.
            UnknownDocument: The text of a document is not known.
        """
        documents = await self._resolver.resolve(request.tenant, request.documents)

        def encode(kept: tuple[Message, ...]) -> list[int]:
            asked = replace(request, messages=kept)
            return encode_prompt(self.target, asked, documents, max_context)

        more = request.messages, room, encode, self.target.count_tokens
        prompt_ids, places = await self._threads.run(request.tenant, drop_turns, *more)
        return as_prompt(prompt_ids), places

    async def shorten_prompt(
        self, request: GenerateRequest, max_context: int, room: int, *, tell: Tell | None = None
    ) -> tuple[Int32Array, tuple[ReadPart, ...]]:
        """Return a prompt for the target with the best passages of the documents, and which.

        They are in document order, as many as fit, best first; the rest of the chat is whole.

        Args:
            request: The request with the chat.
            max_context: Longest prompt plus answer, in tokens.
            room: Longest prompt, in tokens.
            tell: Is told how far the indexing of new documents is.

        Raises:
            PromptTooLong: The rest of the chat is too long already, or no passage of the documents
                has to do with the question.
            RetrievalUnavailable: Nothing can be retrieved now.
            UnknownDocument: The text of a document is not known.
        """
        documents = await self._resolver.resolve(request.tenant, request.documents)
        encode = functools.partial(encode_prompt, self.target)
        whole = await self._threads.run(request.tenant, encode, request, (), max_context)
        left = room - len(whole)
        last = next(each.text for each in reversed(request.messages) if each.role == "user")
        choose = functools.partial(choose_query, budget_tokens=max(1, left), query=request.query)
        query = await self._threads.run(request.tenant, choose, last, self.target.token_offsets)
        joined = None
        if request.query is None:
            join = functools.partial(join_earlier, budget_tokens=max(1, left))
            offsets = self.target.token_offsets
            joined = await self._threads.run(request.tenant, join, request.messages, offsets)
        passages: Sequence[Passage] = ()
        if left > 0:
            try:
                asked = request, documents, joined or query.text, left, tell
                passages = (await self._retrieve(*asked)).chunks
            except RapidError as error:
                logger.warning("request %s: no sections: %s", request.request_id, error)
                raise RetrievalUnavailable(
                    "The documents do not fit the target's context, and nothing can be retrieved "
                    "from them now: ask again."
                ) from None
        while passages:
            kept, sections = join_passages(documents, passages)
            prompt_ids = await self._threads.run(
                request.tenant, encode, request, kept, 2 * max_context
            )
            if (over := len(prompt_ids) - room) <= 0:
                return as_prompt(prompt_ids), sections
            passages = await self._threads.run(
                request.tenant, drop_worst, passages, over, self.target.count_tokens
            )
        raise PromptTooLong.of(
            max_context,
            "the documents do not fit beside the rest of the chat, and no passage of them that "
            "fits has to do with the question.",
        )

    async def drafter_prompt(
        self,
        request: GenerateRequest,
        answer: str = "",
        *,
        num_tokens: int | None = None,
        tell: Tell | None = None,
        ignores_drafts: bool = False,
    ) -> DrafterPrompt:
        """Return the drafter's prompt: the chat with retrieved chunks in place of its long parts.

        If retrieval fails, nothing is raised; `Evidence.is_lost` is then true.

        Args:
            request: The request with the chat.
            answer: The answer so far, with which retrieval searches as well.
            num_tokens: Length of the target's prompt, by which the budget is chosen; None, where
                there is no such prompt, counts the texts.
            tell: Is told how far the indexing of new documents is.
            ignores_drafts: Whether the answer is the same whatever is drafted. Then chunks of a
                document stand in an order by which engines find more of the prompt read.

        Raises:
            UnknownDocument: The text of a document is not known.
        """
        if request.prompts:  # which has no long parts: the drafter reads what the target reads
            asked = self.drafter, request, num_tokens or 0
            prompt_ids = await self._threads.run(request.tenant, encode_raw, *asked)
            return DrafterPrompt(as_prompt(prompt_ids), (), NOTHING, ())
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
        evidence = NOTHING
        if search.plan.documents:
            try:
                found = await self._retrieve(
                    request, search.plan.documents, search.query, search.budget_tokens, tell
                )
            except RetrievalPending:
                evidence = _PENDING
            except RapidError as error:
                # Logged, never returned: a store's error can hold its address, keys and replies.
                logger.warning("request %s: no retrieval: %s", request.request_id, error)
                evidence = _LOST
            else:
                chunks = tuple(found.passages)
                evidence = _evidence_of(found, len(chunks))
        shown = chunks
        if ignores_drafts:
            names = (name for turn in search.plan.turns for name in turn.document_names)
            ranks = {name: rank for rank, name in enumerate(names)}
            in_order = sorted(chunks, key=lambda each: ranks[each.document])
            shown = self._order.arrange((request.tenant, request.cache_salt), in_order)
        messages = drafter_messages(search.plan, shown)
        prompt_ids = await self._encode(self.drafter, request, messages)
        joined = search.joined if search.plan.documents else None
        places: tuple[tuple[int, int], ...] = ()
        if ignores_drafts and chunks:
            texts = [each.text.strip() for each in shown]
            places = await self._threads.run(
                request.tenant, find_passages, self.drafter, prompt_ids, texts
            )
        return DrafterPrompt(as_prompt(prompt_ids), chunks, evidence, messages, joined, places)

    async def witness_prompt(self, request: GenerateRequest, found: DrafterPrompt) -> Int32Array:
        """Return what the drafter reads, in the target's own template [tokens]."""
        return as_prompt(await self._encode(self.target, request, found.messages))

    async def answerable_prompt(self, request: GenerateRequest, found: DrafterPrompt) -> Int32Array:
        """Return the drafter's prompt with the question whether it can answer [tokens]."""
        thoughtless = replace(request, thinking=ThinkingRequest(is_on=False))
        asked = append_question(found.messages)
        prompt_ids = await self._encode(self.drafter, thoughtless, asked)
        marks = self.drafter.thinking_marks
        if isinstance(marks, ThinkingMarks) and self.drafter.find_thinking(prompt_ids):
            prompt_ids += [marks.closing, *self.drafter.encode("\n\n")]
        return as_prompt(prompt_ids)

    async def _encode(
        self, text: ChatText, request: GenerateRequest, messages: Sequence[Message]
    ) -> list[int]:
        encode, tools = text.encode_chat, request.tools.tools if request.tools else ()
        day, thinks = request.date, request.thinking.is_on
        return await self._threads.run(
            request.tenant, encode, messages, day=day, tools=tools, thinks=thinks
        )

    def longest_drafter_prompt(self, request: GenerateRequest, num_target_tokens: int) -> int:
        """Estimate the longest possible drafter prompt, in tokens, before retrieval."""
        budget = request.retrieval_tokens or self._budget_tokens
        longest = 2 * (budget or self._budget_for(num_target_tokens))
        described = sum(len(str(each)) for each in (request.tools.tools if request.tools else ()))
        return min(num_target_tokens, longest + described // _CHARACTERS_OF_JSON)

    async def _retrieve(
        self,
        request: GenerateRequest,
        documents: Sequence[Document],
        query: str,
        budget_tokens: int,
        tell: Tell | None,
    ) -> Found:
        if self._retrieval is None:
            raise RapidError("no retriever is deployed")
        asked = request.tenant, documents, query, budget_tokens
        return await self._retrieval.retrieve(*asked, weight=request.weight, tell=tell)


def _evidence_of(found: Found, num_passages: int) -> Evidence:
    if num_passages:
        return Evidence(num_passages, is_enough=found.is_evidence)
    return _NO_ROOM if found.cleared_floor else _BELOW_FLOOR

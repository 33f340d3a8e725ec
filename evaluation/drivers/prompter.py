"""Prompts of both models for an item under a condition: retrieval, corruption, truncation."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from time import perf_counter
from types import MappingProxyType

from evaluation.corruption import choose_unrelated, corrupt
from evaluation.items import Item
from evaluation.tasks import DAY, Condition, RetrievalSettings, Task
from rapid.answering.prompt.excerpts.search_plan import plan_search
from rapid.chat_messages import Document, Message
from rapid.checkpoints.text import ChatText
from rapid.errors import ConfigurationError
from rapid.messages import Int32Array, as_prompt
from rapid.prompts import DrafterPlan, drafter_messages, target_messages
from retrieval import (
    Chunk,
    Embedder,
    Embedding,
    RetrievalConfig,
    RetrievedChunk,
    Retriever,
    chunk_text,
    make_embedder,
    open_retriever,
)
from retrieval.chunking import TokenOffsets

_FIELD = re.compile(r"\{(\w+)\}")
_TENANT = "evaluation"
MISSED_SPARE = 4
"""How many times the budget is retrieved before the chunks with evidence are taken away."""


@dataclass(frozen=True, slots=True)
class ShortContext:
    """The short context of an item: what retrieval found for the drafter to read.

    Attributes:
        chunks: The chunks in document order, corrupted if the condition says so.
        context: The chunks joined by blank lines, for templates.
        evidence_found: Whether all of the item's evidence is in `context`; None if unknown.
    """

    chat: tuple[Message, ...]
    chunks: tuple[RetrievedChunk, ...]
    context: str
    evidence_found: bool | None
    retrieval_ms: float


class Prompter:
    """A builder of prompts for a task's items, for use on one event loop."""

    def __init__(
        self,
        task: Task,
        items: Sequence[Item],
        target: ChatText,
        drafter: ChatText,
        retriever: Retriever,
    ) -> None:
        """Create a prompter for a run of `items`, from which unrelated chunks are taken.

        The target's text counts tokens; the retriever has the task's retrieval settings.
        """
        self._task = task
        self._items = items
        self._target = target
        self._drafter = drafter
        self._retriever = retriever

    def context(self, item: Item, condition: Condition) -> Document | None:
        """Return the item's document as the target reads it, cut to task's and condition's limits.

        Raises:
            ConfigurationError: The item is a dialogue that exceeds the limit.
        """
        return self._cut(item, self._task.context_limit(condition))

    def _cut(self, item: Item, limit: int | None) -> Document | None:
        """Return the item's document without the middle beyond `limit` tokens."""
        if limit is None:
            return item.document
        if item.document is None:
            length = sum(self._target.count_tokens(message.text) for message in item.messages)
            if length > limit:
                raise ConfigurationError(
                    f"context_tokens {limit} cuts documents, and item {item.id} is a dialogue of "
                    f"{length} tokens: raise it, or make shorter dialogues"
                )
            return None
        text = truncate_middle(item.document.text, self._target.token_offsets, limit)
        return replace(item.document, text=text)

    def target_prompt(self, item: Item, condition: Condition) -> Int32Array:
        """Return the target's prompt, which has the whole context."""
        chat = target_chat(self._task, item, self.context(item, condition))
        return as_prompt(self._target.encode_chat(chat, day=DAY))

    def drafter_prompt(self, item: Item, condition: Condition) -> Int32Array:
        """Return the same for a drafter that answers alone."""
        chat = target_chat(self._task, item, self.context(item, condition))
        return as_prompt(self._drafter.encode_chat(chat, day=DAY))

    def encode(self, found: ShortContext, by_target: bool) -> Int32Array:
        """Return the retrieved text as a prompt for the drafter, or for the target to read."""
        reader = self._target if by_target else self._drafter
        return as_prompt(reader.encode_chat(found.chat, day=DAY))

    async def retrieve(self, item: Item, condition: Condition, answer: str = "") -> ShortContext:
        """Retrieve chunks for an item and corrupt them as the condition says.

        The task's limit is what the target can read. Retrieval searches beyond it, as RAPID's code
        does, with the budget of what the target reads. A condition's limit shortens the document
        itself, for retrieval as well.

        With `answer` retrieval searches with the answer so far as well.
        """
        began = perf_counter()
        document = self.context(item, condition)
        documents = () if document is None else (document,)
        search = plan_search(
            item.messages,
            documents,
            self._target,
            budget_tokens=condition.retrieval_tokens or self._task.retrieval.tokens,
            budget_for=RetrievalConfig().budget_for,
            query=item.query,
            answer=answer,
        )
        plan, budget = search.plan, search.budget_tokens
        most = None
        if self._task.retrieval.selection == "top-k":
            most = ceil(budget / self._task.retrieval.chunk_tokens)
            budget = most * self._task.retrieval.chunk_tokens  # holds them, however long they are
        searched = self._list_searched(plan, self._cut(item, condition.context_tokens))
        chunks: Sequence[RetrievedChunk] = ()
        if searched:
            # Where chunks will be taken away, others must be at hand to fill the budget.
            searched_for = budget * (MISSED_SPARE if condition.corruption == "missed" else 1)
            found = await self._retriever.retrieve(_TENANT, searched, search.query, searched_for)
            chunks = found.chunks if most is None else _best(found.chunks, most)
        retrieval_ms = (perf_counter() - began) * 1e3
        if condition.corruption != "none":
            spare = self._chunks(choose_unrelated(item, self._items), condition)
            count = self._target.count_tokens
            chunks = corrupt(
                chunks, condition, item, spare, budget_tokens=budget, count_tokens=count
            )
        context = "\n\n".join(chunk.text.strip() for chunk in chunks)
        if self._task.templates is None:
            chat = drafter_messages(plan, chunks)
        else:
            chat = _one_message(self._task.templates.drafter, item, {"context": context})
        return ShortContext(
            chat, tuple(chunks), context, evidence_found(item, context), retrieval_ms
        )

    def extraction_prompt(
        self, item: Item, condition: Condition, reasoning: str, found: ShortContext | None
    ) -> Int32Array:
        """Return the prompt that asks the target to extract its answer from `reasoning`.

        It has the whole context, or only that of `found` if given.

        Raises:
            ValueError: The task has no such second pass.
        """
        extraction = self._task.extraction
        if extraction is None:
            raise ValueError(f"task {self._task.name} has no second pass")
        document = self.context(item, condition) if found is None else None
        fields = {"reasoning": reasoning.strip()} | ({"context": found.context} if found else {})
        chat = target_chat(self._task, item, document, extraction, fields)
        return as_prompt(self._target.encode_chat(chat, day=DAY))

    async def close(self) -> None:
        """Release the retriever."""
        await self._retriever.close()

    def _list_searched(self, plan: DrafterPlan, document: Document | None) -> tuple[Document, ...]:
        """Return the documents to search: the item's own where templates show a single context."""
        if document is None:
            return plan.documents
        return (document,) if self._task.templates else (document, *plan.documents[1:])

    def _chunks(self, item: Item, condition: Condition) -> list[Chunk]:
        """Return all chunks of an item's text."""
        document = self._cut(item, condition.context_tokens)
        texts = [message.text for message in item.messages] if document is None else []
        return chunk_text(
            "\n\n".join(texts) if document is None else document.text,
            self._target.token_offsets,
            max_tokens=self._task.retrieval.chunk_tokens,
        )


async def open_prompter(
    task: Task, items: Sequence[Item], target: ChatText, drafter: ChatText
) -> Prompter:
    """Make a prompter with a retriever of its own; BGE-M3 takes a while to load."""
    config = retrieval_config(task.retrieval)
    embedder = await asyncio.to_thread(make_embedder, config.embedder)
    if task.retrieval.selection == "top-k":
        embedder = _DenseAlone(embedder)
    retriever = await open_retriever(
        config, target.token_offsets, embedder, tokenizer=target.fingerprint
    )
    return Prompter(task, items, target, drafter, retriever)


class _DenseAlone:
    """An embedder without its term weights, so that chunks are ranked by dense vectors alone."""

    def __init__(self, embedder: Embedder) -> None:
        self._embedder = embedder
        self.space = replace(embedder.space, sparse=False, idf=False)
        self.floor = embedder.floor

    def embed_passages(self, texts: Sequence[str]) -> list[Embedding]:
        return [replace(each, sparse=None) for each in self._embedder.embed_passages(texts)]

    def embed_query(self, text: str) -> Embedding:
        return replace(self._embedder.embed_query(text), sparse=None)

    def is_evidence(self, query: str, chunks: Sequence[RetrievedChunk]) -> bool:
        return self._embedder.is_evidence(query, chunks)


def _best(chunks: Sequence[RetrievedChunk], most: int) -> tuple[RetrievedChunk, ...]:
    """Return the `most` chunks of highest score, in their order."""
    best = sorted(chunks, key=lambda chunk: -chunk.score)[:most]
    return tuple(chunk for chunk in chunks if chunk in best)


def retrieval_config(settings: RetrievalSettings) -> RetrievalConfig:
    """Return the retriever's configuration for a task; budgets are passed with each question."""
    given = settings.model_dump(include={"chunk_tokens", "floor"})
    return RetrievalConfig.model_validate(given | {"embedder": {"kind": settings.embedder}})


def target_chat(
    task: Task,
    item: Item,
    document: Document | None,
    template: str | None = None,
    more: Mapping[str, str] = MappingProxyType({}),
) -> tuple[Message, ...]:
    """Return the chat that the target answers, with the item's document as far as it may be read.

    Without templates of the task the chat is the item's own; `template` goes before the task's.
    """
    if task.templates is None:
        return target_messages(item.messages, () if document is None else (document,))
    context = "" if document is None else document.text
    fields = {"context": context} | dict(more)
    return _one_message(template or task.templates.target, item, fields)


def truncate_middle(text: str, token_offsets: TokenOffsets, limit: int) -> str:
    """Return `text`, or its first and last ``limit / 2`` tokens if it is longer than `limit`."""
    offsets = token_offsets(text)
    if len(offsets) <= limit:
        return text
    head = limit // 2
    return text[: offsets[head][0]] + text[offsets[len(offsets) - (limit - head)][0] :]


def evidence_found(item: Item, context: str) -> bool | None:
    """Return whether all evidence is in `context`, whatever its line breaks; None if unknown."""
    if item.document is None or not item.evidence:
        return None
    found = " ".join(context.split())
    parts = (item.document.text[start:end] for start, end in item.evidence)
    return all(" ".join(part.split()) in found for part in parts)


def _one_message(template: str, item: Item, more: Mapping[str, str]) -> tuple[Message, ...]:
    fields = {"question": item.messages[-1].text} | dict(item.fields) | dict(more)

    def value(match: re.Match[str]) -> str:
        name = match.group(1)
        if name not in fields:
            raise ConfigurationError(
                f"a template names {{{name}}}, which item {item.id} has not; it has "
                f"{', '.join(sorted(fields))}"
            )
        return fields[name]

    return (Message("user", _FIELD.sub(value, template)),)

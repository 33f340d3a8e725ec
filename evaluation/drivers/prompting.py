"""What target and drafter read of an item, under a condition: retrieval, corruption, truncation.

With a task's templates a prompt is one user message; without, it is the product's own
(`rapid.prompts`), byte for byte what a server would make of the same request.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from types import MappingProxyType

from evaluation.corruption import corrupt, unrelated_item
from evaluation.items import Item
from evaluation.tasks import DAY, Condition, Retrieval, Task
from rapid.answering.prompting import plan_search
from rapid.checkpoints.text import ChatText
from rapid.errors import ConfigurationError
from rapid.messages import Document, Int32Array, Message, as_prompt
from rapid.prompts import DrafterPlan, drafter_messages, target_messages
from retrieval import (
    Chunk,
    RetrievalConfig,
    RetrievedChunk,
    Retriever,
    chunk_text,
    open_retriever,
)
from retrieval.chunking import TokenOffsets

_FIELD = re.compile(r"\{(\w+)\}")
_TENANT = "evaluation"


@dataclass(frozen=True, slots=True)
class Found:
    """What retrieval found for an item.

    Attributes:
        chat: what the drafter reads.
        context: the chunks joined by blank lines, as templates have them.
        evidence_found: all of the item's evidence is in `context`; None where it is not known.
    """

    chat: tuple[Message, ...]
    context: str
    evidence_found: bool | None
    retrieval_ms: float


class Prompter:
    """Makes the prompts of a task's items; use it on one event loop."""

    def __init__(
        self,
        task: Task,
        items: Sequence[Item],
        target: ChatText,
        drafter: ChatText,
        retriever: Retriever,
    ) -> None:
        """Take what is made once.

        Args:
            task: its retrieval, templates and limits.
            items: all of the run: unrelated chunks come from another one.
            target: its tokenizer counts tokens.
            drafter: renders what the drafter reads.
            retriever: made for the task's retrieval.
        """
        self._task = task
        self._items = items
        self._target = target
        self._drafter = drafter
        self._retriever = retriever

    def context(self, item: Item, condition: Condition) -> Document | None:
        """The item's document without what exceeds the limits of task and condition."""
        limits = [self._task.context_tokens, condition.context_tokens]
        limit = min((each for each in limits if each is not None), default=None)
        if limit is None:
            return item.document
        if item.document is None:
            length = sum(self._target.count_tokens(message.content) for message in item.messages)
            if length > limit:
                raise ConfigurationError(
                    f"context_tokens {limit} cuts documents, and item {item.id} is a dialogue of "
                    f"{length} tokens: raise it, or make shorter dialogues"
                )
            return None
        text = truncate_middle(item.document.text, self._target.token_offsets, limit)
        return replace(item.document, text=text)

    def target_prompt(self, item: Item, condition: Condition) -> Int32Array:
        """The whole context, for the target."""
        chat = target_chat(self._task, item, self.context(item, condition))
        return as_prompt(self._target.encode_chat(chat, day=DAY))

    def encode(self, found: Found, by_target: bool) -> Int32Array:
        """What was found, for the drafter or for a target that reads it alone."""
        reader = self._target if by_target else self._drafter
        return as_prompt(reader.encode_chat(found.chat, day=DAY))

    async def retrieve(self, item: Item, condition: Condition, answer: str = "") -> Found:
        """Retrieve, and make of it what the condition does.

        Args:
            item: whose question it is.
            condition: what becomes of what was found.
            answer: the answer so far, where something is to be found for it as well.
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
        searched = self._searched(plan, document)
        chunks: Sequence[RetrievedChunk] = ()
        if searched:
            found = await self._retriever.retrieve(_TENANT, searched, search.query, budget)
            chunks = found.chunks
        retrieval_ms = (perf_counter() - began) * 1e3
        if condition.corruption != "none":
            spare = self._chunks(unrelated_item(item, self._items), condition)
            chunks = corrupt(
                chunks,
                condition,
                item,
                spare,
                budget_tokens=budget,
                count_tokens=self._target.count_tokens,
            )
        context = "\n\n".join(chunk.text.strip() for chunk in chunks)
        if self._task.templates is None:
            chat = drafter_messages(plan, chunks)
        else:
            chat = _one_message(self._task.templates.drafter, item, {"context": context})
        return Found(chat, context, evidence_found(item, context), retrieval_ms)

    def extraction_prompt(
        self, item: Item, condition: Condition, reasoning: str, found: Found | None
    ) -> Int32Array:
        """The second pass; it reads the whole context, or where `found` is given only that."""
        templates = self._task.templates
        if templates is None or templates.extraction is None:
            raise ValueError(f"task {self._task.name} has no second pass")
        document = self.context(item, condition) if found is None else None
        fields = {"reasoning": reasoning.strip()} | ({"context": found.context} if found else {})
        chat = target_chat(self._task, item, document, templates.extraction, fields)
        return as_prompt(self._target.encode_chat(chat, day=DAY))

    async def close(self) -> None:
        """Release the retriever."""
        await self._retriever.close()

    def _searched(self, plan: DrafterPlan, document: Document | None) -> tuple[Document, ...]:
        """Templates show one context: that of the document, or all of a dialogue's."""
        if self._task.templates is None or document is None:
            return plan.documents
        return (document,)

    def _chunks(self, item: Item, condition: Condition) -> list[Chunk]:
        """All chunks of another item's text."""
        document = self.context(item, condition)
        texts = [message.content for message in item.messages] if document is None else []
        return chunk_text(
            "\n\n".join(texts) if document is None else document.text,
            self._target.token_offsets,
            max_tokens=self._task.retrieval.chunk_tokens,
        )


async def open_prompter(
    task: Task, items: Sequence[Item], target: ChatText, drafter: ChatText
) -> Prompter:
    """A prompter with a retriever of its own; BGE-M3 takes a while to load."""
    retriever = await open_retriever(retrieval_config(task.retrieval), target.token_offsets)
    return Prompter(task, items, target, drafter, retriever)


def retrieval_config(settings: Retrieval) -> RetrievalConfig:
    """A task's retrieval as the retriever has it; budgets are given with each question."""
    return RetrievalConfig.model_validate(
        {
            "embedder": {"kind": settings.embedder},
            "chunk_tokens": settings.chunk_tokens,
            "floor": settings.floor,
        }
    )


def target_chat(
    task: Task,
    item: Item,
    document: Document | None,
    template: str | None = None,
    more: Mapping[str, str] = MappingProxyType({}),
) -> tuple[Message, ...]:
    """The chat that the target answers, with its whole context.

    Args:
        task: without templates the chat is the item's own.
        item: who fills in the template.
        document: its document, as far as it may be read.
        template: another than the task's for the target.
        more: further fields of it.
    """
    if task.templates is None:
        return target_messages(item.messages, () if document is None else (document,))
    context = "" if document is None else document.text
    fields = {"context": context} | dict(more)
    return _one_message(template or task.templates.target, item, fields)


def truncate_middle(text: str, token_offsets: TokenOffsets, limit: int) -> str:
    """`text`, or its first and last ``limit / 2`` tokens."""
    offsets = token_offsets(text)
    if len(offsets) <= limit:
        return text
    head = limit // 2
    return text[: offsets[head][0]] + text[offsets[len(offsets) - (limit - head)][0] :]


def evidence_found(item: Item, context: str) -> bool | None:
    """Whether all evidence can be read in `context`, however it is broken into lines."""
    if item.document is None or not item.evidence:
        return None
    found = " ".join(context.split())
    parts = (item.document.text[start:end] for start, end in item.evidence)
    return all(" ".join(part.split()) in found for part in parts)


def _one_message(template: str, item: Item, more: Mapping[str, str]) -> tuple[Message, ...]:
    fields = {"question": item.messages[-1].content} | dict(item.fields) | dict(more)

    def value(match: re.Match[str]) -> str:
        name = match.group(1)
        if name not in fields:
            raise ConfigurationError(
                f"a template names {{{name}}}, which item {item.id} has not; it has "
                f"{', '.join(sorted(fields))}"
            )
        return fields[name]

    return (Message("user", _FIELD.sub(value, template)),)

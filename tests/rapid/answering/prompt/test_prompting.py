from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve.exceptions import DeploymentUnavailableError as NoPool

from deployments.orchestrator.ray_retrieval import RayRetrieval
from rapid.answering.prompt.prompting import RequestPrompts
from rapid.chat_messages import Document, DocumentRef, Message
from rapid.checkpoints.text import ChatText
from rapid.documents import InlineDocuments
from rapid.errors import PromptTooLong, RetrievalPending, UnknownDocument
from rapid.messages import GenerateRequest
from retrieval import RetrievalConfig, RetrievedChunk, StoreUnavailable

ATLAS = Document("atlas", "The lighthouse of Varo is white. " * 40)
FOUND = RetrievedChunk("d:0", "atlas", 0, 33, "The lighthouse of Varo is white. ", 9, 2.5)


class ScriptedRetriever:
    """A Serve handle whose answers are given; remembers what it was asked."""

    deployment_id = "Retriever"

    def __init__(self, answer: object, delay_s: float = 0.0) -> None:
        self.answer, self.delay_s = answer, delay_s
        self.asked: list[tuple[Any, ...]] = []
        self.num_cancelled = 0
        self.retrieve = self

    def options(self, **_: Any) -> Any:
        return self

    def remote(self, *args: Any) -> Any:
        _, *asked, self.wait_s, weight = args
        self.asked.append((*asked, weight))
        return self

    def cancel(self) -> None:
        self.num_cancelled += 1

    async def __anext__(self) -> Any:
        await asyncio.sleep(self.delay_s)
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


@pytest.fixture(scope="module")
def chat_text() -> ChatText:
    return ChatText.load("embedded:target")


def prompter(chat_text: ChatText, retriever: ScriptedRetriever) -> RequestPrompts:
    config = RetrievalConfig(chunk_tokens=32, budget_tokens=64)
    return RequestPrompts(
        chat_text,
        chat_text,
        RayRetrieval(retriever, timeout_s=0.2),
        budget_tokens=config.budget_tokens,
        budget_for=config.budget_for,
    )


def request(*documents: Document, **fields: Any) -> GenerateRequest:
    question = (Message("user", "Which colour?"),)
    return GenerateRequest("r", "acme", question, documents=documents, **fields)


def context(*chunks: RetrievedChunk, cleared_floor: bool = True, is_evidence: bool = True) -> Any:
    return SimpleNamespace(passages=chunks, cleared_floor=cleared_floor, is_evidence=is_evidence)


async def test_the_drafter_reads_what_retrieval_found_for_this_tenant(chat_text: ChatText) -> None:
    retriever = ScriptedRetriever(context(FOUND))
    prompt = await prompter(chat_text, retriever).drafter_prompt(request(ATLAS, weight=3))
    text = chat_text.decode(prompt.prompt_ids.tolist())
    assert "The lighthouse of Varo is white." in text
    assert "Which colour?" in text
    assert (prompt.chunks, prompt.evidence.num_chunks) == ((FOUND,), 1)
    ((tenant, documents, query, budget, weight),) = retriever.asked
    assert (tenant, documents, query, budget, weight) == ("acme", [ATLAS], "Which colour?", 64, 3)


@pytest.mark.parametrize("is_evidence", [True, False])
async def test_what_retrieval_takes_for_evidence_is_passed_on(
    chat_text: ChatText, is_evidence: bool
) -> None:
    retriever = ScriptedRetriever(context(FOUND, is_evidence=is_evidence))
    prompt = await prompter(chat_text, retriever).drafter_prompt(request(ATLAS))
    assert (prompt.chunks, prompt.evidence.is_enough) == ((FOUND,), is_evidence)


async def test_the_request_sets_query_and_budget(chat_text: ChatText) -> None:
    retriever = ScriptedRetriever(context(FOUND))
    await prompter(chat_text, retriever).drafter_prompt(
        request(ATLAS, query="lighthouse", retrieval_tokens=40)
    )
    assert retriever.asked[0][2:4] == ("lighthouse", 40)


async def test_without_documents_nobody_is_asked(chat_text: ChatText) -> None:
    retriever = ScriptedRetriever(context(FOUND))
    prompt = await prompter(chat_text, retriever).drafter_prompt(request())
    assert not retriever.asked
    assert prompt.evidence.why_none == "there is nothing to retrieve from"


@pytest.mark.parametrize(
    ("answer", "why", "is_lost"),
    [
        (context(cleared_floor=False), "nothing above its floor", False),
        (context(cleared_floor=True), "no retrieved chunk fits the budget", False),
        (StoreUnavailable("http://me:secret@qdrant is away."), "retrieval did not answer", True),
        (ValueError("a bug in the replica"), "retrieval did not answer", True),
        (NoPool("Retriever"), "retrieval did not answer", True),
        (RetrievalPending("Ask again."), "still being indexed", True),
    ],
)
async def test_no_chunk_is_no_evidence_and_says_why(
    chat_text: ChatText, answer: object, why: str, is_lost: bool
) -> None:
    prompt = await prompter(chat_text, ScriptedRetriever(answer)).drafter_prompt(request(ATLAS))
    assert prompt.evidence.num_chunks == 0
    assert why in prompt.evidence.why_none
    assert "secret" not in prompt.evidence.why_none
    assert prompt.evidence.is_lost == is_lost


async def test_a_retriever_that_hangs_is_not_waited_for(chat_text: ChatText) -> None:
    retriever = ScriptedRetriever(context(FOUND), delay_s=5)
    prompt = await prompter(chat_text, retriever).drafter_prompt(request(ATLAS))
    assert prompt.evidence.is_lost
    assert retriever.num_cancelled == 1


async def test_both_prompts_name_the_requests_day(chat_text: ChatText) -> None:
    """Whatever the clock says: yesterday's answer can be had again, and its prefix is cached."""
    tokenizer = copy.deepcopy(chat_text.tokenizer)
    tokenizer.chat_template = "{{ strftime_now('%d %B %Y') }}|" + tokenizer.chat_template
    dated = ChatText(tokenizer, chat_text.eos_ids)
    asked = request(ATLAS, date=date(2025, 3, 7))
    prompts = prompter(dated, ScriptedRetriever(context(FOUND)))
    both = (
        await prompts.target_prompt(asked, 4096),
        (await prompts.drafter_prompt(asked)).prompt_ids,
    )
    assert [dated.decode(ids.tolist()).partition("|")[0] for ids in both] == ["07 March 2025"] * 2


class Shelf:
    """A resolver of the documents of one tenant."""

    async def resolve(self, tenant: str, documents: Sequence[DocumentRef]) -> tuple[Document, ...]:
        if tenant != "acme" or any(each != ATLAS.ref for each in documents):
            raise UnknownDocument("no such document")
        return (ATLAS,) * len(documents)


async def test_a_request_may_name_a_document_whose_text_is_elsewhere(chat_text: ChatText) -> None:
    retriever = ScriptedRetriever(context(FOUND))
    carries, names = request(ATLAS), request(ATLAS.ref)
    inline, shelf = (
        RequestPrompts(
            chat_text,
            chat_text,
            RayRetrieval(retriever, timeout_s=0.2),  # type: ignore[arg-type]
            budget_tokens=64,
            budget_for=lambda _: 64,
            resolver=resolver,
        )
        for resolver in (InlineDocuments(), Shelf())
    )
    whole = await inline.target_prompt(carries, 4096)
    assert (await shelf.target_prompt(names, 4096)).tolist() == whole.tolist()
    assert (await shelf.drafter_prompt(names)).chunks == (FOUND,)
    for prompts, asked in ((inline, names), (shelf, replace(names, tenant="another"))):
        with pytest.raises(UnknownDocument):
            await prompts.target_prompt(asked, 4096)


class CountingText:
    """A chat text that counts the characters that it tokenizes."""

    def __init__(self, text: ChatText) -> None:
        self._text = text
        self.num_characters = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._text, name)

    def has_more_tokens(self, texts: Any, most: int) -> bool:
        return ChatText.has_more_tokens(self, texts, most)  # type: ignore[arg-type]

    def count_tokens(self, text: str) -> int:
        self.num_characters += len(text)
        return self._text.count_tokens(text)

    def encode_chat(self, messages: Any, **options: Any) -> list[int]:
        self.num_characters += sum(len(each.content) for each in messages)
        return self._text.encode_chat(messages, **options)


async def test_of_a_text_that_cannot_fit_only_the_beginning_is_tokenized(
    chat_text: ChatText,
) -> None:
    """Four megabytes took 3.3 s and half a gigabyte before they were refused."""
    counting = CountingText(chat_text)
    prompts = prompter(counting, ScriptedRetriever(context(FOUND)))  # type: ignore[arg-type]
    long = Document("long", "The lighthouse of Varo is white. " * 125_000)
    start = "^This model's maximum context length is 4096 tokens. "
    with pytest.raises(PromptTooLong, match=f"{start}.* more than the 4096 tokens"):
        await prompts.target_prompt(request(long), 4096)
    assert counting.num_characters < 200_000
    assert len(await prompts.target_prompt(request(ATLAS), 4096)) > 200


async def test_a_text_of_long_tokens_is_tokenized_after_all(chat_text: ChatText) -> None:
    """Its characters alone do not say that it is too long."""

    class Sparse(CountingText):
        def count_tokens(self, text: str) -> int:
            return len(text) // 100

    sparse = Sparse(chat_text)
    prompts = prompter(sparse, ScriptedRetriever(context(FOUND)))  # type: ignore[arg-type]
    assert len(await prompts.target_prompt(request(ATLAS), 140)) > 140  # refused by its tokens
    assert sparse.num_characters > len(ATLAS.text)


async def test_a_request_that_is_given_up_is_not_tokenized(chat_text: ChatText) -> None:
    """Whoever hangs up while others' prompts are read costs nothing more."""
    begun, ended, go = threading.Semaphore(0), threading.Semaphore(0), threading.Event()
    read: list[str] = []

    class Slow(CountingText):
        def encode_chat(self, messages: Any, **options: Any) -> list[int]:
            begun.release()
            go.wait(30)
            read.append(messages[0].content)
            ended.release()
            return [1]

    prompts = prompter(Slow(chat_text), ScriptedRetriever(context(FOUND)))  # type: ignore[arg-type]
    asked = [replace(request(), messages=(Message("user", f"{number}?"),)) for number in range(8)]
    reading = [asyncio.create_task(prompts.target_prompt(each, 4096)) for each in asked]
    for _ in range(2):
        await asyncio.to_thread(begun.acquire, timeout=30)
    for each in reading[1:]:
        each.cancel()
    await asyncio.wait(reading[1:])
    go.set()
    await reading[0]
    other = replace(asked[0], tenant="other", messages=(Message("user", "Other?"),))
    await prompts.target_prompt(other, 4096)
    for _ in range(3):  # the second was given up while it was read: nobody waits for its thread
        assert await asyncio.to_thread(ended.acquire, timeout=30)
    assert sorted(read) == ["0?", "1?", "Other?"]

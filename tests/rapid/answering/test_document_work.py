"""How often a question reads the text of its document: to tokenize it, and to name it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest

from deployments.orchestrator.ray_retrieval import affinity
from rapid import messages
from rapid.answering.document_keys import affinity_of
from rapid.answering.prompting import RequestPrompts
from rapid.answering.readings import Readings
from rapid.answering.request_plan import RequestPlan
from rapid.answering.run import Run
from rapid.answering.session import Role
from rapid.checkpoints.text import ChatText
from rapid.config import AnsweringConfig, SpeculationConfig
from rapid.messages import Document, GenerateRequest, Message
from retrieval import LexicalEmbedder, RetrievalConfig, Retriever
from tests.retrieval.plain_store import PlainChunkStore

LONG = "The lighthouse of Varo is white. " * 40
work = Counter[str]()


class CountingText:
    """A chat text that counts how often it tokenizes the document."""

    def __init__(self, text: ChatText) -> None:
        self._text = text

    def __getattr__(self, name: str) -> Any:
        return getattr(self._text, name)

    def count_tokens(self, text: str) -> int:
        work["counted"] += LONG in text
        return self._text.count_tokens(text)

    def token_offsets(self, text: str) -> list[tuple[int, int]]:
        work["cut"] += LONG in text
        return self._text.token_offsets(text)

    def encode_chat(self, chat: Sequence[Message], **options: Any) -> list[int]:
        work["read"] += any(LONG in each.content for each in chat)
        return self._text.encode_chat(chat, **options)


class PoolsOfOne:
    drafter = object()
    max_context: ClassVar = {"target": 4096, "drafter": 1024}


LENGTHS: dict[Role, int] = {"target": 8192, "drafter": 8192}


class Shared:
    """What requests share, as far as their readings need it."""

    config = AnsweringConfig()
    pools = PoolsOfOne

    def __init__(self, prompts: RequestPrompts) -> None:
        self.prompts = prompts


async def test_a_question_tokenizes_and_hashes_its_document_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The passages are cut by the retriever with the first question alone."""
    work.clear()
    hash_text = messages.blake2b

    def count_hash(content: bytes, **options: Any) -> Any:
        work["hashed"] += LONG.encode() in content
        return hash_text(content, **options)

    monkeypatch.setattr(messages, "blake2b", count_hash)
    text: Any = CountingText(ChatText.load("embedded:target"))
    config = RetrievalConfig(chunk_tokens=32)
    embedder = LexicalEmbedder()
    retriever = Retriever(config, embedder, PlainChunkStore(embedder.space), text.token_offsets)
    prompts = RequestPrompts(
        text, text, retriever, budget_tokens=None, budget_for=lambda num_tokens: num_tokens // 4
    )
    for question, cut in (("Which colour is the lighthouse?", 1), ("Whose is it?", 0)):
        ask = GenerateRequest(
            "r", "acme", (Message("user", question),), documents=(Document("atlas", LONG),)
        )
        plan = RequestPlan.of(
            ask, SpeculationConfig(), LENGTHS, 64, looks_up=False, vocab_size=prompts.vocab_size
        )
        readings = Readings(Run(Shared(prompts), ask, plan))  # type: ignore[arg-type]
        await readings.render_chat()
        assert affinity_of(ask)
        assert affinity("acme", ask.documents)
        await readings.find()
        assert work == {"hashed": 1, "read": 1, "cut": cut, "counted": 0}
        work.clear()
    prompts.close()
    await retriever.close()

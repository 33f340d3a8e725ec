"""How often a question reads the text of its document: to tokenize, to name and to send it."""

from __future__ import annotations

import asyncio
import pickle
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any, ClassVar

import pytest

from deployments.orchestrator.ray_retrieval import RayRetrieval, affinity
from deployments.pools import retriever_replica
from rapid import chat_messages
from rapid.answering.leases.document_keys import affinity_of
from rapid.answering.leases.session import Role
from rapid.answering.prompt.prompting import DrafterPrompt, RequestPrompts
from rapid.answering.readings import Readings
from rapid.answering.run import Run
from rapid.chat_messages import Document, DocumentRef, Message
from rapid.checkpoints.text import ChatText
from rapid.config import AnsweringConfig, SpeculationConfig
from rapid.messages import GenerateRequest
from retrieval import LexicalEmbedder, RetrievalConfig, Retriever
from tests.retrieval.plain_store import PlainChunkStore

PHRASE = "The lighthouse of Varo is white. "
LONG = PHRASE * (1_000_000 // len(PHRASE))
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


LENGTHS: dict[Role, int] = {"target": 2**20, "drafter": 2**20}


class PoolsOfOne:
    drafter = object()
    max_context: ClassVar = LENGTHS
    own_drafting = None
    vllm_drafts = False


class Shared:
    """What requests share, as far as their readings need it."""

    config = AnsweringConfig()
    speculation = SpeculationConfig()
    pools = PoolsOfOne

    def __init__(self, prompts: RequestPrompts) -> None:
        self.prompts = prompts


class Replica(retriever_replica.RetrieverReplica):
    def __del__(self) -> None:
        """Do nothing: only Serve would await it."""


class Handle:
    """A Serve handle of one replica, to and from which everything is pickled."""

    deployment_id = "Retriever"

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self.retrieve = self

    def options(self, **_: Any) -> Any:
        return self

    def remote(self, *args: Any) -> Any:
        packed = pickle.dumps(args)
        work["calls"] += 1
        work["texts"] += PHRASE.encode() in packed
        work["bytes"] += len(packed)
        return Response(self._replica.retrieve(*pickle.loads(packed)))


class Response:
    def __init__(self, said: AsyncIterator[Any]) -> None:
        self._said = said

    async def __anext__(self) -> Any:
        return pickle.loads(pickle.dumps(await anext(self._said)))

    def cancel(self) -> None:
        raise AssertionError("nothing is given up")


class Application:
    """The parts of an application that read documents."""

    def __init__(self, retriever: Retriever, text: Any) -> None:
        self.retriever = retriever
        remote: Any = Handle(Replica(RetrievalConfig(), "embedded:target"))
        self.prompts = RequestPrompts(
            text,
            text,
            RayRetrieval(remote, timeout_s=60.0),
            budget_tokens=None,
            budget_for=lambda num_tokens: num_tokens // 400,
        )

    async def ask(self, question: str) -> DrafterPrompt:
        ask = GenerateRequest(
            "r", "acme", (Message("user", question),), documents=(Document("atlas", LONG),)
        )
        readings = Readings(Run(Shared(self.prompts), ask))  # type: ignore[arg-type]
        await readings.render_chat()
        assert affinity_of(ask)
        return await readings.find()


@pytest.fixture
async def application(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Application]:
    work.clear()
    hash_text = chat_messages.blake2b

    def count_hash(content: bytes, **options: Any) -> Any:
        work["hashed"] += LONG.encode() in content
        return hash_text(content, **options)

    monkeypatch.setattr(chat_messages, "blake2b", count_hash)
    text: Any = CountingText(ChatText.load("embedded:target"))
    embedder = LexicalEmbedder()
    store = PlainChunkStore(embedder.space)
    retriever = Retriever(RetrievalConfig(), embedder, store, text.token_offsets)

    async def open_retriever(*_: Any, **__: Any) -> Retriever:
        return retriever

    monkeypatch.setattr(retriever_replica, "open_retriever", open_retriever)
    application = Application(retriever, text)
    yield application
    application.prompts.close()
    await retriever.close()


def take_work() -> dict[str, int]:
    """Return what was done since the last time."""
    done = {name: number for name, number in work.items() if number}
    work.clear()
    return done


async def test_a_question_tokenizes_and_hashes_its_document_once(application: Application) -> None:
    """With the first question alone, the text is sent to a retriever, which tokenizes it to cut.

    For that it needs offsets, with which every prompt would take a third longer to tokenize.
    """
    assert (await application.ask("Which colour is the lighthouse?")).chunks
    first = take_work()
    assert len(LONG) < first.pop("bytes") < len(LONG) + 2_000
    assert first == {"hashed": 1, "read": 1, "cut": 1, "calls": 2, "texts": 1}
    assert (await application.ask("What is white?")).chunks
    later = take_work()
    assert later.pop("bytes") < 500
    assert later == {"hashed": 1, "read": 1, "calls": 1}


async def test_two_who_ask_at_once_share_what_the_retriever_does(application: Application) -> None:
    asked = [application.ask(question) for question in ("Which lighthouse?", "What is white?")]
    assert all(found.chunks for found in await asyncio.gather(*asked))
    done = take_work()
    assert (done["hashed"], done["read"], done["cut"]) == (2, 2, 1)


async def test_a_text_that_the_retriever_has_forgotten_is_sent_again(
    application: Application,
) -> None:
    first = await application.ask("What is white?")
    assert first.chunks
    for tenant, document_id in list(application.retriever._entries):
        await application.retriever.forget(tenant, document_id)
    take_work()
    assert (await application.ask("What is white?")).chunks == first.chunks
    assert take_work()["texts"] == 1


async def test_the_digest_names_the_text() -> None:
    text, reference = Document("atlas", LONG), Document("atlas", LONG).ref
    assert reference == text.ref == DocumentRef("atlas", text.digest, len(LONG))
    assert affinity("acme", [text]) != affinity("acme", [Document("atlas", LONG + ".")])

"""What a streamed answer says while its documents are embedded, and what is refused before."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

import pytest

from rapid.chat_messages import Document, Tool, Tools
from rapid.errors import PromptTooLong, TargetUnavailable
from rapid.events import Finished, GenerationEvent, Reading, Started
from tests.answered import ATLAS
from tests.local_pools import FOUND, LocalApplication
from tests.ray_cluster import question

SAID = Reading(412, 1130, "passages")


@pytest.fixture(autouse=True)
def says_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rapid.answering.readings._SAY_S", 0.001)


def indexing(**settings: Any) -> LocalApplication:
    """An application whose retriever says how far it is, and waits until it may go on."""
    app = LocalApplication(**settings)
    app.retriever.progress = [SAID]
    app.retriever.indexing = asyncio.Event()
    return app


@pytest.mark.parametrize("mode", ["auto", "rag", "fused", "lossless"])
async def test_the_answer_begins_with_how_far_its_documents_are_embedded(mode: Any) -> None:
    app = indexing()
    request = question("r", mode=mode, documents=ATLAS, seed=5, max_tokens=12)
    answer = app.generate(replace(request, is_streamed=True))
    assert await anext(answer) == SAID
    app.retriever.indexing.set()
    events: list[GenerationEvent] = [event async for event in answer]
    assert isinstance(events[0], Started)
    assert isinstance(events[-1], Finished)


async def test_an_answer_that_is_not_streamed_says_nothing_of_it() -> None:
    app = indexing()
    request = question("r", mode="rag", documents=ATLAS, seed=5, max_tokens=12)
    answering = asyncio.create_task(app.answered(request))
    while app.retriever.progress:  # noqa: ASYNC110 (the retriever takes it)
        await asyncio.sleep(0.001)
    app.retriever.indexing.set()
    assert isinstance((await answering)[0], Started)


async def test_what_can_be_refused_before_retrieval_is_refused_before_anything_is_said() -> None:
    long = (Document("long", "word " * 50_000),)
    app = indexing(target_wait_s=0.05)
    request = replace(question("r", mode="auto", documents=long), is_streamed=True)
    with pytest.raises(PromptTooLong):
        await anext(app.generate(request))

    app.target.engine.kill()
    request = replace(question("r", mode="auto", documents=ATLAS), is_streamed=True)
    with pytest.raises(TargetUnavailable):
        await anext(app.generate(request))


async def test_the_drafters_grammar_of_calls_is_compiled_aside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The drafter answers where the target's prompt is too long, in its own form of calls."""
    threads = list[int]()

    def compile_calls(*_: Any) -> None:
        threads.append(threading.get_ident())

    monkeypatch.setattr("rapid.answering.run.compile_calls", compile_calls)
    long = (Document("atlas", FOUND.text * 5_000),)
    given: dict[str, Any] = {"documents": long, "tools": Tools((Tool("f", "{}"),)), "seed": 5}
    request = question("r", mode="fused", rapid={"too_long": "rag"}, **given)
    events = await LocalApplication().answered(request)
    assert isinstance(events[-1], Finished)
    assert len(threads) == 2
    assert threading.get_ident() not in threads


async def test_who_leaves_while_documents_are_embedded_ends_the_call() -> None:
    for mode in ("rag", "auto"):
        app = indexing()
        request = question("r", mode=mode, documents=ATLAS)  # type: ignore[arg-type]
        answer = app.generate(replace(request, is_streamed=True))
        assert await anext(answer) == SAID
        await answer.aclose()
        assert app.retriever.num_cancelled == 1
        engine = app.target.engine.actor._engine
        async with asyncio.timeout(10):
            while engine.status().leases_open:  # noqa: ASYNC110 (nobody waits for a release)
                await asyncio.sleep(0.001)

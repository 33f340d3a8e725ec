"""Two models that share one drafter: real engines, asked at once, each as if it were alone."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator
from typing import Any

import pytest

from deployments.config.named_models import read_application
from deployments.orchestrator.ray_services import RayServices
from deployments.pools.engine_actor import load_engine
from rapid.answering.request import RequestRun
from rapid.chat_messages import Document, Message
from rapid.checkpoints.text import ChatText
from rapid.events import Finished, TextDelta
from rapid.messages import GenerateRequest
from tests.local_pools import LocalPool, LocalRetriever

ENGINE = {
    "max_context": 1024,
    "kv_cache_tokens": 8192,
    "max_leases": 8,
    "threads": 1,
    "deterministic": True,  # who else is in a step changes no number
}
ARGS: dict[str, Any] = {
    "engine_pools": {"quick": {"engine": {"model": "embedded:drafter", **ENGINE}}},
    "models": {
        name: {"target": {"engine": {"model": model, **ENGINE}}, "drafter": "quick"}
        for name, model in (("small", "embedded:drafter"), ("large", "embedded:target"))
    },
    "retriever": {"retrieval": {"chunk_tokens": 32, "budget_tokens": 128}},
    "orchestrator": {"draft_length": "fixed"},
}
STORY = "The lighthouse of Varo is white. The well of Ruki is dry. " * 6


class Application:
    """The orchestrators of both models over the pools of their engines."""

    def __init__(self) -> None:
        config = read_application(ARGS)
        pools = {
            part.name: LocalPool(part.name, functools.partial(load_engine, part.settings.engine))
            for part in config.engine_parts.values()
        }
        self._pools, self.quick = pools.values(), pools["Engines-quick"]
        retriever, text = LocalRetriever(), ChatText.load("embedded:target")
        self._services = {}
        for model in config.served:
            assert model.drafter is not None
            handles = pools[model.target.name], pools[model.drafter.name], retriever
            shared = RayServices(*handles, text, text)  # type: ignore[arg-type]
            self._services[model.name] = shared.under(model.config)

    async def ask(self, model: str, question: str) -> tuple[str, int, str]:
        """The answer, how many drafted tokens were kept of it, and its mode."""
        request = GenerateRequest(
            "r",
            "local",
            (Message("user", question),),
            (Document("atlas", STORY),),
            temperature=0.8,
            seed=7,
            max_tokens=24,
        )
        text = ""
        async for event in RequestRun(self._services[model], request).events():
            if isinstance(event, TextDelta):
                text += event.text
            elif isinstance(event, Finished):
                (choice,) = event.receipt.choices
                return text, choice.accepted, event.receipt.mode
        raise AssertionError("the answer has no end")

    def close(self) -> None:
        for pool in self._pools:
            pool.engine.actor._engine.close()


@pytest.fixture
async def application() -> AsyncIterator[Application]:
    application = Application()
    yield application
    application.close()


async def test_models_that_share_a_drafter_answer_at_once_as_each_does_alone(
    application: Application,
) -> None:
    asked = [
        (model, question)
        for model in ("small", "large")
        for question in ("Which lighthouse is white?", "Which well is dry?")
    ]
    alone = [await application.ask(*each) for each in asked]
    opened_alone = application.quick.num_streams
    at_once = await asyncio.gather(*(application.ask(*each) for each in asked))
    assert at_once == alone
    assert application.quick.num_streams == 2 * opened_alone == 2 * len(asked)
    assert {mode for _, _, mode in alone} == {"fused"}
    assert all(accepted for _, accepted, _ in alone)
    small, large = alone[: len(alone) // 2], alone[len(alone) // 2 :]
    assert small != large

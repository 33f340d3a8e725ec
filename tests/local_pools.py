"""Pools without Ray: the real leases, loop and engine actors, called within the test's process.

Handles and actors look as Ray's do, as far as the code under test looks. Every engine is a
`FakeEngine` unless a test puts another in; `fail` makes a pool raise instead of answering.
"""

from __future__ import annotations

import asyncio
import copy
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from types import SimpleNamespace
from typing import Any, Literal

from ray.exceptions import ActorUnavailableError, TaskCancelledError

from cluster.leases import LeasingReplica
from deployments.config.serve_config import ServeConfig
from deployments.orchestrator.ray_services import RayServices
from deployments.pools.engine_actor import EngineActor
from rapid.answering.raw_prompts import answer_prompts
from rapid.checkpoints.text import ChatText
from rapid.config import SERVED_DRAFTINGS, EngineConfig, ServedDrafting
from rapid.engines.kv.cache import PagePool
from rapid.engines.kv.leases.lease_ledger import LeaseLedger
from rapid.events import GenerationEvent, Reading
from rapid.messages import GenerateRequest, LeaseRequest
from retrieval import RetrievedChunk
from tests.fakes import FakeEngine
from tests.ray_cluster import FAKE_CONFIG

FOUND = RetrievedChunk("d:0", "atlas", 0, 33, "The lighthouse of Varo is white. ", 9, 2.5)


class LocalActor:
    """An actor handle: calls run as tasks, and arguments that are references are awaited first."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self._id = os.urandom(16)
        self._actor_id = SimpleNamespace(hex=self._id.hex)
        self.is_dead = False
        self.is_stopped = False
        self._gone = asyncio.Event()
        self._running: set[asyncio.Task[Any]] = set()

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *args: self._start(name, args))

    def kill(self) -> None:
        """Die: calls in progress and calls to come fail with this actor's id."""
        self.is_dead = True
        self._gone.set()
        for task in self._running:
            task.cancel()

    def stop(self) -> None:
        """Stop, as by SIGSTOP: no call is answered any more."""
        self.is_stopped = True

    async def _hang(self, name: str) -> None:
        """Wait until the stopped actor is killed."""
        await self._gone.wait()
        raise ActorUnavailableError(f"{name}: died", self._id)

    def _start(self, name: str, args: tuple[Any, ...]) -> Any:
        """Start a call and return its reference, or those of a method with several returns."""
        task = _started(self._call(name, args))
        num_returns = getattr(getattr(self.actor, name), "__ray_num_returns__", 1)
        if num_returns == 1:
            return task

        async def part(index: int) -> Any:
            return (await task)[index]

        return [_started(part(index)) for index in range(num_returns)]

    async def _call(self, name: str, args: tuple[Any, ...]) -> Any:
        if self.is_stopped:
            await self._hang(name)
        ready = [await arg if isinstance(arg, asyncio.Future) else arg for arg in args]
        call = asyncio.ensure_future(getattr(self.actor, name)(*ready))
        self._running.add(call)
        try:
            if self.is_dead:
                call.cancel()
            answer = await call
            if self.is_stopped:
                await self._hang(name)
            return answer
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if caller is not None and caller.cancelling():  # who called has given up
                raise
            if self.is_dead:
                raise ActorUnavailableError(f"{name}: died", self._id) from None
            raise TaskCancelledError from None  # the actor has cancelled what it did
        finally:
            self._running.discard(call)


def _started(running: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    task = asyncio.ensure_future(running)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return task


class LocalPool:
    """A Serve handle to one replica; `fail` is raised by every new lease."""

    def __init__(self, name: str, load: Callable[[], Any]) -> None:
        self.deployment_name = self.deployment_id = name
        self.load = load
        self.fail: Exception | None = None
        self.num_streams = 0
        self.start()

    def start(self) -> None:
        """A new replica with a new engine."""
        self.engine = LocalActor(EngineActor(None, lambda _: self.load()))  # type: ignore[arg-type]
        self.replica = LeasingReplica(lambda: self.engine)

    def options(self, **_: Any) -> LocalPool:
        return self

    def remote(self, request: Any) -> LocalStream:
        self.num_streams += 1
        return LocalStream(self._lease(request))

    async def _lease(self, request: Any) -> AsyncIterator[Any]:
        if self.fail is not None:
            raise self.fail
        async for engine in self.replica.lease(request):
            yield engine


class LocalStream:
    """The caller's end of a streaming call; cancelling it closes the generator."""

    def __init__(self, items: Any) -> None:
        self._items = items
        self._pending: asyncio.Task[Any] | None = None

    async def __anext__(self) -> Any:
        item = await anext(self._items)
        if item is not None:  # the engine, after which nothing more comes
            self._pending = asyncio.ensure_future(self._drain())
            self._pending.add_done_callback(lambda done: done.cancelled() or done.exception())
        return item

    async def _drain(self) -> None:
        async for _ in self._items:
            pass

    def cancel(self) -> None:
        if self._pending is not None:
            self._pending.cancel()


class QueueingEngine(FakeEngine):
    """A fake whose room is kept by the real ledger, in its order."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.ledger = LeaseLedger(
            PagePool(self.pages_total),
            config.page_tokens,
            config.max_leases,
            config.max_context or config.kv_cache_tokens,
            config.lease_ttl_s,
            time.monotonic,
        )

    async def open(self, request: LeaseRequest) -> None:
        admitted = asyncio.get_running_loop().create_future()
        waiter = self.ledger.prepare(request, admitted.set_result)
        self.ledger.submit(waiter)
        try:
            await admitted
        except asyncio.CancelledError:
            self.ledger.withdraw(waiter)
            raise
        await super().open(request)

    def release(self, lease_id: str) -> None:
        super().release(lease_id)
        self.ledger.release(lease_id)

    def forgo_companion(self, lease_id: str) -> None:
        self.ledger.forgo_companion(lease_id)


class LocalRetriever:
    """Finds one chunk, or fails; remembers what it was asked.

    Attributes:
        chunk: what it finds.
        finds_nothing: whether it finds nothing from then on.
        chunk_again: what it finds for another query than the first one; None: the same.
        progress: what it says of documents that it indexes.
        indexing: what it waits for after that, if anything.
    """

    deployment_id = "Retriever"

    def __init__(self) -> None:
        self.fail: Exception | None = None
        self.chunk = FOUND
        self.chunk_again: RetrievedChunk | None = None
        self.finds_nothing = False
        self.queries: list[str] = []
        self.progress: list[Reading] = []
        self.indexing: asyncio.Event | None = None
        self.num_cancelled = 0
        self.retrieve = self

    def options(self, **_: Any) -> Any:
        return self

    def remote(self, call_id: str, tenant: str, documents: Any, query: str, *_: Any) -> Any:
        self.queries.append(query)
        return self

    def cancel(self) -> None:
        self.num_cancelled += 1

    async def __anext__(self) -> Any:
        await asyncio.sleep(0)
        if self.progress:
            return self.progress.pop(0)
        if self.indexing is not None:
            await self.indexing.wait()
        if self.fail is not None:
            raise self.fail
        if self.finds_nothing:
            return SimpleNamespace(chunks=(), passages=(), cleared_floor=False, is_evidence=False)
        chunk = self.chunk
        if self.chunk_again is not None and self.queries[-1] != self.queries[0]:
            chunk = self.chunk_again
        return SimpleNamespace(
            chunks=(chunk,), passages=(chunk,), cleared_floor=True, is_evidence=True
        )


class LocalApplication:
    """The orchestrator's work over two local pools, or over one where `drafter` names no other."""

    def __init__(
        self,
        *,
        drafter: Literal["target", ServedDrafting] | None = None,
        engine: dict[str, Any] | None = None,
        drafts: dict[str, Any] | None = None,
        speculation: dict[str, Any] | None = None,
        load: Callable[[EngineConfig], Any] = FakeEngine,
        **orchestrator: Any,
    ) -> None:
        settings = copy.deepcopy(FAKE_CONFIG)
        settings.setdefault("speculation", {}).update(speculation or {})
        settings["orchestrator"].update(orchestrator)
        settings["target"]["engine"].update(engine or {})
        settings["drafter"]["engine"] = drafts or settings["drafter"]["engine"]
        if drafter:
            settings["drafter"] = drafter
        if drafter in SERVED_DRAFTINGS:
            del settings["retriever"]
        self.config = ServeConfig.model_validate(settings)
        self.target = LocalPool("Target", lambda: load(self.config.target.engine))
        self.drafter = self.target
        if not drafter:
            self.drafter = LocalPool("Drafter", lambda: load(self.config.drafter_pool.engine))
        self.retriever = LocalRetriever()
        text = ChatText.load("embedded:target")
        reads = not self.config.own_drafting
        handles = (self.drafter, self.retriever) if reads else (None, None)
        self._services = RayServices(self.target, *handles, text, text).under(self.config)  # type: ignore[arg-type]

    def generate(self, request: GenerateRequest) -> Any:
        return answer_prompts(self._services, request)

    async def answered(
        self, request: GenerateRequest, *, target_dies_after: int | None = None
    ) -> list[GenerationEvent]:
        """All events of a request, whose target dies after so many of them and is replaced."""
        events: list[GenerationEvent] = []
        async for event in self.generate(request):
            events.append(event)
            if len(events) == target_dies_after:
                dead = self.target.engine
                self.target.start()
                dead.kill()
        return events

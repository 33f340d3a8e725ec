"""Reports of replicas: how much room an engine has, and how much work waits.

Serve's controller collects them and hands them to the routers (`cluster.affinity`) and to the
autoscaling policies (`cluster.autoscaling`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Self

from rapid.engine_status import EngineStatus
from rapid.estimators import RunningMean
from rapid.messages import LeaseRequest
from rapid.ports import Clock

if TYPE_CHECKING:  # `benchmarks/fleet/fleet.py` runs without Ray
    from ray.actor import ActorHandle

logger = logging.getLogger(__name__)

REPORTS_STALE_S = 5.0  # age from which a report says nothing about the present
_POLL_S = 0.5  # between two questions to an engine for its status
_MOST_DOCUMENTS = 32  # more make the reports of a large pool long
_BEAT_S = 0.1  # between two measurements of how late an event loop is
_NOT_NUMBERS = ("at", "documents", "in_use")


@dataclass(frozen=True)
class EngineReport:
    """An engine's `EngineStatus` at one moment, as routers and autoscaling policies get it.

    Attributes:
        at: When the engine was asked, in seconds since the epoch.
        pages_free: Pages that a new lease could have, idle prefixes included; without those kept
            for second leases that are still expected.
        leases_free: Leases that could still open, by number.
        num_requests: Requests at the replica, those that wait for their lease included.
        documents: Tokens of the longest prompt about each document that the engine probably still
            holds, by its name (`document_name`).
        in_use: Names of those that open leases read; the pages of the others count as free.
    """

    at: float
    pages_free: int
    pages_total: int
    page_tokens: int
    leases_free: int
    num_requests: int = 0
    leases_waiting: int = 0
    tokens_waiting: int = 0
    prefill_tokens_per_s: float = 0.0
    step_s: float = 0.0
    documents: Mapping[str, int] = field(default_factory=dict)
    in_use: Sequence[str] = ()

    @classmethod
    def from_stats(cls, stats: Mapping[str, Any], now: float) -> Self | None:
        """Return the report in a replica's routing stats; None if there is none or it is stale."""
        if not stats or now - stats["at"] > REPORTS_STALE_S:
            return None
        return cls(**stats)


class EngineWatch:
    """The latest report of one engine, renewed in the background: Serve waits for no engine.

    Which documents an engine holds is estimated from the leases that its replica saw: those used
    last, as many as the KV pool can hold, as the engine evicts the least recently used pages first.
    """

    def __init__(self, engine: ActorHandle, now: Clock = time.time) -> None:
        self._engine = engine
        self._now = now
        self._documents: OrderedDict[str, int] = OrderedDict()  # least recently used first
        self._num_requests = 0
        self._readers = Counter[str]()
        self._report: EngineReport | None = None
        self._watching: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to watch; only the first call has an effect."""
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch())

    @contextmanager
    def counting(self, request: LeaseRequest) -> Iterator[None]:
        """Count a request while the context lasts, and remember which document it reads."""
        name = document_name(request.affinity) if request.affinity else ""
        if name:
            longest = max(self._documents.pop(name, 0), len(request.prompt_ids))
            self._documents[name] = longest
            while len(self._documents) > _MOST_DOCUMENTS:
                self._documents.popitem(last=False)
        self._num_requests += 1
        self._readers[name] += 1
        try:
            yield
        finally:
            self._num_requests -= 1
            self._readers[name] -= 1

    def routing_stats(self) -> dict[str, Any]:
        """Return the latest report for Serve's routers; empty before the first."""
        return asdict(self._report) if self._report else {}

    def autoscaling_stats(self) -> dict[str, float]:
        """Return the numbers of the latest report for Serve's autoscaler; empty if it is stale."""
        stats = self.routing_stats()
        if EngineReport.from_stats(stats, self._now()) is None:
            return {}
        return {name: value for name, value in stats.items() if name not in _NOT_NUMBERS}

    async def _watch(self) -> None:
        while True:
            await self._look()
            await asyncio.sleep(_POLL_S)

    async def _look(self) -> None:
        asked_at = self._now()
        try:
            async with asyncio.timeout(REPORTS_STALE_S):
                status: EngineStatus = await self._engine.status.remote()
        except Exception as error:  # its replica's health check says what becomes of the engine
            logger.info("the engine does not report: %s", type(error).__name__)
            return
        num_tokens = status.kv_pages_total * status.page_tokens
        documents = list_held_documents(self._documents, num_tokens)
        self._report = EngineReport(
            at=asked_at,
            pages_free=status.kv_pages_total - status.kv_pages_in_use - status.kv_pages_kept,
            pages_total=status.kv_pages_total,
            page_tokens=status.page_tokens,
            leases_free=status.max_leases - status.leases_open - status.leases_kept,
            num_requests=self._num_requests,
            leases_waiting=status.leases_waiting,
            tokens_waiting=status.tokens_waiting,
            prefill_tokens_per_s=round(status.prefill_tokens_per_s, 1),
            step_s=round(status.step_s, 6),
            documents=documents,
            in_use=[name for name in documents if self._readers[name]],
        )


class LoopWatch:
    """The lateness of this event loop, of a task that is woken every tenth of a second."""

    def __init__(self) -> None:
        self._lag_s = RunningMean()
        self._watching: asyncio.Task[None] | None = None

    def autoscaling_stats(self) -> dict[str, float]:
        """Return ``loop_lag_s`` for Serve's autoscaler; the first call begins to measure."""
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch())
        lag_s = self._lag_s.value
        return {} if lag_s is None else {"loop_lag_s": lag_s}

    async def _watch(self) -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(_BEAT_S)
            self._lag_s.add(max(time.monotonic() - began - _BEAT_S, 0.0))


def list_held_documents(used: OrderedDict[str, int], num_tokens: int) -> dict[str, int]:
    """Return the documents used last that fit into a KV pool of `num_tokens`, the last in part.

    `used` has the tokens of each document, the least recently used first.
    """
    held: dict[str, int] = {}
    for name in reversed(used):
        if num_tokens <= 0:
            break
        # An engine evicts the end of a prompt first.
        held[name] = min(used[name], num_tokens)
        num_tokens -= used[name]
    return held


def document_name(affinity: str) -> str:
    """Return a name of eight characters for what a lease request's ``affinity`` names.

    It only guides routing: two documents with one name share a replica and nothing else.
    """
    return blake2b(affinity.encode(), digest_size=4).hexdigest()

"""An open-loop load of seeded questions, and what becomes of each request.

Requests arrive as a Poisson process, whether or not earlier ones are answered. Every request has a
seed, so that its text can be compared with that of the same request on a quiet server.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

from rapid.embedded.generator import generate_document

MODES = ("auto", "plain", "lossless", "fused", "rag")
NUM_QUESTIONS = 20
PATIENCE_S = 60.0
HEALTH_S = 1.0  # between two checks
HEALTH_TIMEOUT_S = 1.0
SILENCE_S = 15.0  # three of the server's heartbeats
WITHOUT = ("the target went on alone", "retrieval did not answer", "still being indexed")

Phase = Literal["standard", "overflow", "recovery"]
End = Literal["answered", "refused", "failed", "unanswered", "left"]


@dataclass(frozen=True)
class Arrival:
    """One request: when it comes (seconds), which question it is, and when its client leaves."""

    at: float
    phase: Phase
    question: int
    leaves_after_s: float | None = None

    @property
    def is_streamed(self) -> bool:
        """Whether the answer is asked for as a stream: every other question's is."""
        return self.question % 2 == 0


@dataclass
class Outcome:
    """What became of one request.

    Attributes:
        began, first, ended: Times on the monotonic clock; `first` is that of the first text.
        heard: When text came.
        text: The answer's text, where it was answered.
        is_declared: Whether the receipt says that it went on without its drafter or its documents,
            so that its text may be another.
        num_broken: Connections that broke before the answer was complete.
        num_malformed: Errors that are not OpenAI's, such as those of a proxy whose ingress died;
            the client asks again, as after a broken connection.
        why: What the server said, where it did not answer.
    """

    arrival: Arrival
    began: float
    end: End = "unanswered"
    first: float | None = None
    ended: float = 0.0
    heard: list[float] = field(default_factory=list)
    text: str = ""
    is_declared: bool = False
    num_broken: int = 0
    num_malformed: int = 0
    why: str = ""

    @property
    def pause_s(self) -> float:
        """The longest time without text, from the request to the end of its answer."""
        times = [self.began, *self.heard, self.ended]
        return max(after - before for before, after in itertools.pairwise(times))

    def hear(self, text: str) -> None:
        """Take note of text that came just now."""
        self.heard.append(time.monotonic())
        self.first = self.first or self.heard[0]
        self.text += text


def body(question: int) -> dict[str, Any]:
    """One of the `NUM_QUESTIONS` requests: modes take turns, every other one is streamed."""
    document = generate_document(question, 200 + 100 * (question % 5))
    return {
        "model": "rapid-embedded",
        "messages": [{"role": "user", "content": document.questions[question % 3].question}],
        "temperature": 1.5 if question % 3 else 0.0,
        "seed": question,
        "max_tokens": 32 + 16 * (question % 4),
        "stream": Arrival(0.0, "standard", question).is_streamed,
        "rapid": {
            "mode": MODES[question % len(MODES)],
            "documents": [{"name": document.name, "text": document.text}],
        },
    }


def arrivals(
    phases: Sequence[tuple[Phase, float, float]],
    burst_at: float,
    seed: int,
    *,
    share_leaving: float = 0.0,
) -> list[Arrival]:
    """Return Poisson arrivals over phases of (name, seconds, requests a second).

    Six more streams begin together just before `burst_at`, so that a fault meets some in flight.
    """
    rng = random.Random(seed)

    def leaving() -> float | None:
        return rng.uniform(0.02, 1.0) if rng.random() < share_leaving else None

    found = [
        Arrival(max(0.0, burst_at - 0.3), "standard", 2 * rng.randrange(NUM_QUESTIONS // 2))
        for _ in range(6)
    ]
    at = 0.0
    for phase, seconds, rate in phases:
        end = at + seconds
        while (at := at + rng.expovariate(rate)) < end:
            found.append(Arrival(at, phase, rng.randrange(NUM_QUESTIONS), leaving()))
        at = end
    return sorted(found, key=lambda each: each.at)


@dataclass
class Clients:
    """Clients with one key, of one server or of several as behind a load balancer.

    With `others` each question comes with one of several keys, always the same.

    They take turns with the servers, and go to the next where nobody takes the connection or where
    it broke. The load balancer asks every server for its health once a second, and sends nothing
    new to one that has failed twice. If nothing was said at all, it also breaks the connections: a
    host that is gone does not close them, while one that is drained finishes what it has.
    """

    urls: Sequence[str]
    key: str
    others: Sequence[str] = ()
    bodies: list[bytes] = field(
        default_factory=lambda: [json.dumps(body(each)).encode() for each in range(NUM_QUESTIONS)]
    )
    _attempts: dict[str, set[asyncio.Future[bool]]] = field(
        default_factory=lambda: defaultdict(set), init=False
    )
    _out: set[str] = field(default_factory=set, init=False)

    async def run(self, load: Sequence[Arrival]) -> list[Outcome]:
        """Send every request when it is due, and return what became of each."""
        began = time.monotonic()
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(limits=limits) as http, self._balanced(http):

            async def due(arrival: Arrival) -> Outcome:
                await asyncio.sleep(began + arrival.at - time.monotonic())
                return await self.ask(http, arrival)

            return list(await asyncio.gather(*map(due, load)))

    @asynccontextmanager
    async def _balanced(self, http: httpx.AsyncClient) -> AsyncIterator[None]:
        """Break the connections to servers that fail, if there are several."""
        watching = [
            asyncio.create_task(self._watch(http, url)) for url in self.urls if len(self.urls) > 1
        ]
        try:
            yield
        finally:
            for task in watching:
                task.cancel()

    async def _watch(self, http: httpx.AsyncClient, url: str) -> None:
        num_failed = 0
        while True:
            status = 0
            with suppress(httpx.HTTPError):
                status = (await http.get(f"{url}/-/healthz", timeout=HEALTH_TIMEOUT_S)).status_code
            num_failed = 0 if status == 200 else num_failed + 1
            if num_failed == 0:
                self._out.discard(url)
            elif num_failed >= 2:
                self._out.add(url)
                for attempt in [*self._attempts[url]] if status == 0 else ():
                    attempt.cancel()
            await asyncio.sleep(HEALTH_S)

    async def ask(self, http: httpx.AsyncClient, arrival: Arrival) -> Outcome:
        """Ask one question; a stream that breaks is continued by `Last-Event-ID`."""
        outcome = Outcome(arrival, time.monotonic())
        try:
            async with asyncio.timeout(arrival.leaves_after_s or PATIENCE_S):
                await self._until_answered(http, outcome)
        except TimeoutError:
            outcome.end = "left" if arrival.leaves_after_s else "unanswered"
        outcome.ended = time.monotonic()
        return outcome

    async def _until_answered(self, http: httpx.AsyncClient, outcome: Outcome) -> None:
        content = self.bodies[outcome.arrival.question]
        key = (self.key, *self.others)[outcome.arrival.question % (1 + len(self.others))]
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        for url in itertools.islice(itertools.cycle(self.urls), outcome.arrival.question, None):
            if url in self._out and not self._out.issuperset(self.urls):
                continue
            attempt = asyncio.ensure_future(self._attempt(http, url, content, headers, outcome))
            self._attempts[url].add(attempt)
            attempt.add_done_callback(self._attempts[url].discard)
            try:
                if await attempt:
                    return
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                outcome.why = type(error).__name__
                if len(self.urls) > 1:  # a load balancer would do the same
                    await asyncio.sleep(0.1)
                    continue
            except httpx.TransportError as error:
                outcome.why = type(error).__name__
            except asyncio.CancelledError:
                this = asyncio.current_task()
                if this is None or this.cancelling():
                    raise
                outcome.why = "the server is down"
            outcome.num_broken += outcome.end != "refused"
            outcome.end = "unanswered"
            await asyncio.sleep(0.5)

    async def _attempt(
        self,
        http: httpx.AsyncClient,
        url: str,
        content: bytes,
        headers: dict[str, str],
        outcome: Outcome,
    ) -> bool:
        """Ask one server once; return whether the request has come to an end."""
        timeout = httpx.Timeout(PATIENCE_S, connect=5.0)
        where = f"{url}/v1/chat/completions"
        async with http.stream(
            "POST", where, content=content, headers=headers, timeout=timeout
        ) as response:
            return await self._read(response, headers, outcome)

    async def _read(
        self, response: httpx.Response, headers: dict[str, str], outcome: Outcome
    ) -> bool:
        """Read one response; return whether the request has come to an end."""
        is_again = outcome.num_broken > 0
        if response.status_code != 200:
            said = await response.aread()
            is_shed = response.status_code in (429, 503) and "retry-after" in response.headers
            outcome.why = f"{response.status_code} {said[:200]!r}"
            if not is_well_formed(said):
                outcome.num_malformed += 1
                return False
            if b'"ingress_lost"' in said:  # a connection that broke, in the proxy's words
                return False
            outcome.end = "refused" if is_shed else "failed"
            return not (is_again and is_shed)
        if not response.headers["content-type"].startswith("text/event-stream"):
            answer = json.loads(await response.aread())
            outcome.hear(answer["choices"][0]["message"]["content"])
            self._end(outcome, answer["rapid"])
            return True
        async for line in _unless_silent(response.aiter_lines()):
            name, _, value = line.partition(": ")
            if name != "data":
                continue
            if value == "[DONE]":
                return True
            chunk = json.loads(value)
            if "error" in chunk:
                outcome.why = value[:200]
                is_shed = outcome.first is None and chunk["error"].get("retryable")
                outcome.end = "refused" if is_shed else "failed"
                outcome.num_malformed += not is_well_formed(value.encode())
                return True
            headers["last-event-id"] = chunk["rapid_event_id"]
            for choice in chunk["choices"]:
                if said := choice["delta"].get("content"):
                    outcome.hear(said)
            if receipt := chunk.get("rapid"):
                self._end(outcome, receipt)
        return False  # the stream ended without [DONE]

    def _end(self, outcome: Outcome, receipt: dict[str, Any]) -> None:
        outcome.end = "answered"
        has_lost_drafter = any(each is not None for each in receipt["plain_from"])
        is_without = any(said in receipt["reason"] for said in WITHOUT)
        outcome.is_declared = has_lost_drafter or is_without


async def _unless_silent(lines: AsyncIterator[str]) -> AsyncIterator[str]:
    """Pass lines on; the server sends heartbeats, without which it counts as gone."""
    while True:
        try:
            async with asyncio.timeout(SILENCE_S):
                line = await anext(lines)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise httpx.ReadTimeout(f"nothing came for {SILENCE_S:g} s") from None
        yield line


def is_well_formed(said: bytes) -> bool:
    """Return whether this is OpenAI's error body."""
    try:
        error = json.loads(said)["error"]
    except (ValueError, KeyError, TypeError):
        return False
    return isinstance(error, dict) and {"message", "type", "param", "code"} <= set(error)

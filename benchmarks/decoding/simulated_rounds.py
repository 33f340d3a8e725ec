"""Rounds of many answers in simulated time: the real loop, controller and scheduler, no forward.

Users ask, wait for the answer and think. Each answer runs `rapid.speculation.loop.speculate` with
the `Controller` of a server, over two engines whose steps are selected by the real `Scheduler` and
take the seconds that `Costs` says. Which drafts are accepted, and where answers end, comes from one
seed; so does everything else, and two runs are the same.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

from rapid.engines.attention.batch import Feed
from rapid.engines.execution.scheduling import Scheduled, Scheduler
from rapid.messages import Verdict
from rapid.speculation.controller import Controller
from rapid.speculation.loop import speculate
from rapid.speculation.round_costs import RoundCosts

Step = list[tuple[int, bool]]  # of each sequence its rows, and whether any of them wants logits
Mode = Literal["lossless", "fused", "plain"]  # `fused` cannot rest: its contract needs the drafter
MAX_DRAFT = 10
STEP_TOKENS, PREFILL_SLOWDOWN = 512, 4.0  # the defaults of `EngineConfig`


@dataclass(frozen=True)
class Costs:
    """Seconds of an engine's step: a start, and more for each row and for each key read."""

    start_s: float
    row_s: float
    key_s: float

    def step_s(self, scheduled: Scheduled) -> float:
        rows = sum(len(feed.token_ids) for _, feed in scheduled)
        keys = sum(feed.position + len(feed.token_ids) for _, feed in scheduled)
        return self.start_s + self.row_s * rows + self.key_s * keys


@dataclass(frozen=True)
class Load:
    """What users ask.

    Attributes:
        users: users, each with one answer at a time.
        think_s: mean seconds between an answer and the next question.
        call_s: seconds on the way of each call between loop and engine.
        document: median tokens of a prompt, and of the part that the drafter reads.
        known: share of prompts of which all but the question is cached.
        answer: mean tokens of an answer; its `max_tokens` is twice that.
        modes: how answers are decoded, drawn for each.
    """

    users: int
    target: Costs
    drafter: Costs
    think_s: float = 0.5
    call_s: float = 1.5e-3
    document: tuple[int, int] = (8000, 2000)
    known: float = 0.5
    answer: int = 200
    modes: tuple[Mode, ...] = ("lossless", "lossless", "fused", "plain")


class World:
    """Simulated time: what happens next, and coroutines that wait for it."""

    def __init__(self) -> None:
        self.now = 0.0
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    def clock(self) -> float:
        return self.now

    def at(self, time: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._numbers), do))

    def run(self, until: Callable[[], bool]) -> None:
        while self._events and not until():
            self.now, _, do = heapq.heappop(self._events)
            do()

    def start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine up to its next `Wait`, and on from there when that ends."""
        try:
            wait: Wait = coroutine.send(None)
        except StopIteration:
            return
        wait.begin(lambda: self.start(coroutine))


@dataclass
class Wait:
    """What a simulated coroutine awaits: `begin` is given the function that goes on with it."""

    begin: Callable[[Callable[[], None]], None]

    def __await__(self) -> Generator[Wait, None, None]:
        yield self


class SimulatedLease:
    """A lease that only has a tenant."""

    def __init__(self, tenant: str) -> None:
        self.request = SimpleNamespace(tenant=tenant)


class Calls:
    """A call in progress: rows for each of its steps (of a prefill: all its rows, in chunks)."""

    next_page, choices = None, (0,)

    def __init__(self, kind: str, lease: SimulatedLease, position: int, steps: list[int]) -> None:
        self.kind, self.lease, self.began = kind, lease, 0.0
        self._position, self._steps = position, steps

    @property
    def depth(self) -> int:
        return self._position

    @property
    def is_done(self) -> bool:
        return not self._steps

    def feed(self, limit: int) -> Feed:
        is_prefill = self.kind == "prefill"
        self._fed = min(limit, self._steps[0]) if is_prefill else self._steps[0]
        return Feed(range(self._fed), self._position, None, 0 if is_prefill else 1)  # type: ignore[arg-type]

    def take(self) -> None:
        self._position += self._fed
        self._steps[0] -= self._fed
        if not self._steps[0]:
            self._steps.pop(0)


class SimulatedEngine:
    """An engine's scheduler, with steps of known seconds.

    Attributes:
        steps: steps so far.
        busy_s: seconds of all steps.
    """

    def __init__(self, world: World, costs: Costs, scheduler: Scheduler) -> None:
        self.steps: list[Step] = []
        self.busy_s = 0.0
        self._world, self._costs, self._scheduler = world, costs, scheduler
        self._on_done: dict[Calls, Callable[[], None]] = {}
        self._is_running = False
        self._turn = 0

    def call(self, call_s: float, work: Calls) -> Wait:
        """Return the wait for a call, which takes `call_s` on its way there and back."""

        def begin(go_on: Callable[[], None]) -> None:
            def arrive() -> None:
                work.began = self._world.now
                self._scheduler.add(work)  # type: ignore[arg-type]
                self._on_done[work] = lambda: self._world.at(self._world.now + call_s / 2, go_on)
                self._step()

            self._world.at(self._world.now + call_s / 2, arrive)

        return Wait(begin)

    def end(self, lease: SimulatedLease) -> None:
        self._scheduler.forget(lease)  # type: ignore[arg-type]

    def _step(self) -> None:
        if self._is_running:
            return
        self._turn += 1
        scheduled = self._scheduler.select()
        if not scheduled:
            turn = self._turn
            if self._on_done:
                self._world.at(
                    self._world.now + min(max(self._scheduler.rest_s, 1e-6), 1.0),
                    lambda: self._step() if turn == self._turn else None,
                )
            return
        self._is_running = True
        self.steps.append([(len(feed.token_ids), feed.num_wanted > 0) for _, feed in scheduled])
        seconds = self._costs.step_s(scheduled)
        self.busy_s += seconds
        self._world.at(self._world.now + seconds, lambda: self._end(seconds, scheduled))

    def _end(self, seconds: float, scheduled: Scheduled) -> None:
        self._is_running = False
        works: list[Calls] = [work for work, _ in scheduled]  # type: ignore[misc]
        for work in works:
            work.take()
        self._scheduler.observe(seconds, scheduled)
        for work in works:
            if work.is_done:
                self._scheduler.drop(work)  # type: ignore[arg-type]
                self._on_done.pop(work)()
        self._step()


class SimulatedAnswer:
    """Drafter and verifier of one answer, whose tokens are only counted."""

    def __init__(self, run: Run, mode: Mode) -> None:
        self._run, self._random = run, random.Random(run.random.random())
        load = run.load
        scale = self._random.lognormvariate(0.0, 0.7)
        self.num_prompt, self.num_read = (int(scale * length) + 50 for length in load.document)
        self.is_known = self._random.random() < load.known
        self.length = 1 + int(self._random.expovariate(1 / load.answer))
        self._rate = self._random.uniform(0.5, 0.95)
        self._num_tokens = 0
        self._num_in_drafter = 0
        self._agreed: list[bool] = []
        self._draft_s = 0.0
        self.has_read = False
        self.mode = mode
        self._leases = [SimulatedLease(f"user {run.random.random()}") for _ in range(2)]

    async def read(self) -> None:
        """Read the prompts: the answer waits for the target, and not for the drafter."""
        if self.mode != "plain":
            self._run.world.start(self._read_drafter())
        await self._target("prefill", 0, [50 if self.is_known else self.num_prompt - 1])

    async def _read_drafter(self) -> None:
        await self._drafter("prefill", 0, [self.num_read - 1])
        self.has_read = True

    def end(self) -> None:
        """End the leases."""
        for engine, lease in zip((self._run.target, self._run.drafter), self._leases, strict=True):
            engine.end(lease)

    def _target(self, kind: str, position: int, steps: list[int]) -> Wait:
        return self._run.target.call(
            self._run.load.call_s, Calls(kind, self._leases[0], position, steps)
        )

    def _drafter(self, kind: str, position: int, steps: list[int]) -> Wait:
        return self._run.drafter.call(
            self._run.load.call_s, Calls(kind, self._leases[1], position, steps)
        )

    async def draft(self, verdict: Verdict | None, num_tokens: int) -> int:
        """Draft a block, and return its length."""
        while not self.has_read:
            await Wait(lambda go_on: self._run.world.at(self._run.world.now + 1e-3, go_on))
        began = self._run.world.now
        if self._random.random() < 0.05:  # the text turns from copying to telling, or back
            self._rate = self._random.uniform(0.5, 0.97)
        self._agreed = []
        while len(self._agreed) < num_tokens:
            self._agreed.append(self._random.random() < self._rate)
            if self._agreed[-1] and self._num_tokens + len(self._agreed) == self.length:
                break  # an end-of-sequence token ends the block
        num_pending = self._num_tokens + 1 - self._num_in_drafter
        position = self.num_read + self._num_in_drafter
        await self._drafter("draft", position, [num_pending, *[1] * (len(self._agreed) - 1)])
        self._draft_s = self._run.world.now - began
        return len(self._agreed)

    async def verify(self, block: Coroutine[Any, Any, int]) -> Verdict:
        num_drafted = await block
        await self._target("step", self.num_prompt + self._num_tokens, [num_drafted])
        num_accepted = [*self._agreed, False].index(False)
        verdict = self._verdict(min(num_accepted + 1, num_drafted), num_drafted, num_accepted)
        self._num_in_drafter = self._num_tokens
        return verdict

    async def decode(self, num_tokens: int) -> Verdict:
        num_tokens = min(num_tokens, self.length - self._num_tokens)
        await self._target("step", self.num_prompt + self._num_tokens, [1] * num_tokens)
        return self._verdict(num_tokens, 0, 0)

    def _verdict(self, num_tokens: int, num_drafted: int, num_accepted: int) -> Verdict:
        num_tokens = min(num_tokens, self.length - self._num_tokens)
        position, self._num_tokens = self._num_tokens, self._num_tokens + num_tokens
        return Verdict(
            "simulated", 0, position, (0,) * num_tokens, num_drafted,
            min(num_accepted, num_tokens), self._num_tokens == self.length,
            draft_ms=1e3 * self._draft_s,
        )  # fmt: skip


class Run:
    """One simulated run of a load.

    Attributes:
        decoding_s: seconds of each finished answer after its prompt was read, and its tokens.
    """

    def __init__(self, load: Load, seed: int = 0, *, joins: bool = True) -> None:
        self.load, self.world, self.random = load, World(), random.Random(seed)
        self.target, self.drafter = (
            SimulatedEngine(
                self.world,
                costs,
                Scheduler(STEP_TOKENS, PREFILL_SLOWDOWN, self.world.clock, joins=joins),
            )
            for costs in (load.target, load.drafter)
        )
        self.decoding_s: list[tuple[float, int]] = []
        self._costs = RoundCosts()
        self._num_open = 0

    def until(self, num_answers: int) -> Run:
        """Run until so many answers are finished."""
        for _ in range(self.load.users):
            self.world.start(self._user())
        self.world.run(lambda: len(self.decoding_s) >= num_answers)
        return self

    async def _user(self) -> None:
        while True:
            think_s = self.random.expovariate(1 / self.load.think_s)
            await Wait(lambda go_on, s=think_s: self.world.at(self.world.now + s, go_on))  # type: ignore[misc]
            await self._answer(SimulatedAnswer(self, self.random.choice(self.load.modes)))

    async def _answer(self, answer: SimulatedAnswer) -> None:
        await answer.read()
        max_tokens = 2 * self.load.answer
        answer.length = min(answer.length, max_tokens)
        pace = Controller(
            self._costs,
            answer.num_prompt,
            MAX_DRAFT,
            can_rest=answer.mode == "lossless",
            num_left=max_tokens,
            is_read=lambda: answer.has_read or answer.mode == "fused",
            clock=self.world.clock,
        )
        began = self.world.now
        rounds = speculate(
            None if answer.mode == "plain" else answer,
            answer,
            max_tokens=max_tokens,
            max_draft=MAX_DRAFT,
            is_streamed=True,
            pace=pace,
        )
        with self._costs.growing(1):
            async for _ in rounds:
                pass
        self.decoding_s.append((self.world.now - began, answer.length))
        answer.end()

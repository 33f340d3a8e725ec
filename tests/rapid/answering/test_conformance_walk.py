"""A random walk through the lives of requests: at every call of an engine, a lease may be struck.

Each answer must be the specification's up to where its receipt says that the drafter was lost, and
the target's own on the same prefix from there; receipts tell what happened, and nothing is left.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import pytest

from rapid.answering.leases.pair_pools import Pools
from rapid.answering.mode.decisions import FUSING
from rapid.answering.request import RequestRun
from rapid.answering.services import Services
from rapid.chat_messages import Message
from rapid.config import EngineConfig
from rapid.engines.local_ports import LocalPool
from rapid.errors import EngineFailed, OutOfStep, RapidError
from rapid.events import Finished, GenerationEvent
from rapid.messages import GenerateRequest, SpeculationRequest
from rapid.receipt import Receipt
from tests.answered import ATLAS
from tests.local_pools import FOUND, LocalActor, LocalApplication
from tests.rapid.answering.conformance import Specification
from tests.toy_engine import ToyEngine
from tests.virtual_time import VirtualLoop

NUM_STEPS = int(os.environ.get("RAPID_WALK_STEPS", "10000"))  # of all walks together
SEEDS = range(2)
PLACES = ("in process", "over ray")
OURS = re.compile("/rapid/answering/|/orchestrator/|/cluster/leases")
TTL_S = 60.0
HANGS_S = 30.0
SILENT_S = 15.0  # longer than a request waits for a sign of life
AGAIN = replace(FOUND, id="d:1", start=40, end=80, text="Its keeper of Tezawe counts ships. ")


@dataclass
class Fault:
    """What befell a lease: it failed, expired, died or hung."""

    role: str
    kind: str


class FaultInjector:
    """Delays and faults of one pair of engines: none, delays alone, or up to `num_left` faults."""

    def __init__(self, random: Random, *, is_remote: bool) -> None:
        self._random, self._is_remote = random, is_remote
        self.num_steps = self.num_left = 0
        self.is_slow = self.is_rag = False
        self.faults: list[Fault] = []
        self.app: LocalApplication | None = None
        self._never = asyncio.Event()
        self._dead: list[LocalActor] = []  # asyncio itself keeps no task that waits for ever

    def draw(self) -> None:
        """Draw what may befall the next request."""
        self.faults = []
        self.is_slow = self._random.random() < 0.5
        self.num_left = self._random.choice((0, 0, 1, 1, 1, 2, 3, 4))
        self._rate = self._random.choice((0.02, 0.1, 0.3))

    async def visit(self, engine: ToyEngine, method: str, lease_id: str) -> None:
        self.num_steps += 1
        await asyncio.sleep(self._random.choice((0.0, 0.01, 0.1)))
        if self.is_slow and self._random.random() < 0.2:
            await asyncio.sleep(self._random.uniform(0, self._longest_s(lease_id, method)))
        if self.num_left and self._random.random() < self._rate:
            await self._strike(engine, method, lease_id)

    def read_s(self, engine: ToyEngine, lease_id: str) -> float:
        is_struck = self.num_left and self._random.random() < self._rate
        if is_struck and role_of(lease_id) in self._hanging:
            self._note(lease_id, "hang")
            return float("inf")
        return self._random.uniform(0, 0.8 * HANGS_S) if self.is_slow else 0.0

    @property
    def _hanging(self) -> tuple[str, ...]:
        """Roles whose prefill is given up when it hangs, but for the drafter's in `rag`."""
        return () if self.is_rag else ("drafter", "witness")

    def _longest_s(self, lease_id: str, method: str) -> float:
        """Longest delay that is no hang: the target's may be any."""
        if method in ("open", "draft"):
            return HANGS_S / 8
        return 2 * HANGS_S if role_of(lease_id) == "target" else HANGS_S / 8

    async def _strike(self, engine: ToyEngine, method: str, lease_id: str) -> None:
        kinds = [] if method == "open" else ["fail", "expire"]
        if self._is_remote:
            kinds += ["die"]
            if method == "open":
                kinds += ["fail"]
            else:
                kinds += ["stop"]
            if method == "draft":
                kinds += ["hang"]
        if not kinds:
            return
        kind = self._random.choice(kinds)
        self._note(lease_id, kind)
        if kind == "fail":
            engine.release(lease_id)
            raise EngineFailed("a step failed")
        if kind == "expire":
            engine.release(lease_id)
        elif kind == "hang":
            await self._never.wait()
        else:
            assert self.app is not None
            pool = self.app.target if engine.name == "target" else self.app.drafter
            dead = pool.engine
            if dead.actor._engine is not engine:
                return  # it is replaced already
            pool.start()
            self._dead.append(dead)
            if kind == "die":
                dead.kill()
            else:
                dead.stop()
                asyncio.get_running_loop().call_later(SILENT_S, dead.kill)  # by its replica
            await asyncio.sleep(0)

    def _note(self, lease_id: str, kind: str) -> None:
        self.num_left -= 1
        self.faults.append(Fault(role_of(lease_id), kind))


def role_of(lease_id: str) -> str:
    return lease_id.rsplit("/", 1)[1].split("-")[0]


class Walk:
    """Random requests, one after the other, of one application at a time."""

    def __init__(self, loop: VirtualLoop, seed: int, place: str, num_steps: int) -> None:
        self._loop, self._random, self._place = loop, Random(f"{seed} {place}"), place
        self._num_left = num_steps
        self._engines: list[ToyEngine] = []
        self.seen: dict[str, int] = {}

    async def go(self) -> None:
        while self._num_left > 0:
            await self._open()
            for _ in range(4):
                before = self._injector.num_steps
                await self._ask()
                self._num_left -= self._injector.num_steps - before

    async def _open(self) -> None:
        """Another application, with other settings."""
        random = self._random
        self._engines = []
        self._injector = FaultInjector(random, is_remote=self._place == "over ray")
        drafter = random.choice((None, None, None, "target", "prompt_lookup"))
        app = LocalApplication(
            drafter=drafter,  # type: ignore[arg-type]
            load=self._load,
            engine={"lease_ttl_s": TTL_S},
            draft_length=random.choice(("fixed", "measured")),
            drafter_hangs_s=HANGS_S,
            acceptance_site=random.choice(("target", "target", "orchestrator")),
        )
        app.retriever.chunk_again = AGAIN
        self._injector.app = app
        self._services: Services = app._services
        if self._place == "in process":
            pools = [LocalPool(each.engine.actor._engine) for each in (app.target, app.drafter)]
            target, other = pools[0], pools[0] if drafter == "target" else pools[1]
            drafts = app._services.pools.own_drafting or other
            pools_here = Pools(target, drafts, other, app._services.pools.max_context)
            self._services = replace(app._services, pools=pools_here)
        self._drafter = drafter

    def _load(self, config: EngineConfig) -> Any:
        name = config.model.removeprefix("embedded:")
        engine = ToyEngine(name, config, self._injector, self._loop.time)
        self._engines.append(engine)
        return engine

    def _request(self) -> GenerateRequest:
        random = self._random
        modes = ("fused", "fused", "fused", "auto", "lossless", "paper", "plain", "rag")
        if self._drafter == "prompt_lookup":
            modes = ("auto", "lossless", "plain")  # type: ignore[assignment]
        mode = random.choice(modes)
        temperature = random.choice((0.0, 0.7, 1.0)) if mode != "paper" else 0.8
        is_model = self._drafter != "prompt_lookup" and mode != "paper"
        num_choices = random.choice((1, 1, 2, 3))
        asked: dict[str, Any] = {"mode": mode, "max_draft": random.choice((1, 2, 4))}
        if is_model:
            asked["refresh"] = num_choices == 1 and random.random() < 0.6
            asked["transfer"] = random.choice((None, None, "boost", "distill", "mixture"))
            asked["coupling"] = random.choice((None, "maximal"))
        return GenerateRequest(
            "walk",
            "local",
            (Message("user", "What does the lighthouse of Varo guard?"),),
            ATLAS,
            temperature=temperature,
            top_k=random.choice((None, None, 4)),
            top_p=random.choice((1.0, 1.0, 0.8)),
            seed=random.randrange(1000),
            max_tokens=random.randint(4, 16),
            num_choices=num_choices,
            is_streamed=random.random() < 0.5,
            speculation=SpeculationRequest(**asked),
            explain=True,
        )

    async def _ask(self) -> None:
        request, injector = self._request(), self._injector
        injector.draw()
        injector.is_rag = request.speculation.mode == "rag"
        events: list[GenerationEvent] = []
        story = (
            self._place,
            self._drafter,
            request.speculation,
            request.temperature,
            injector.faults,
        )
        error: RapidError | None = None
        try:
            async with asyncio.timeout(100_000):
                run = RequestRun(self._services, request).events()
                async for event in run:
                    events.append(event)
        except RapidError as raised:
            error = raised
        except TimeoutError:
            raise AssertionError(f"it hangs: {story}") from None
        faults, injector.num_left, injector.is_slow = list(injector.faults), 0, False
        if error is not None:
            self._count("refused")
            assert not isinstance(error, OutOfStep), (story, error)
            assert faults, (story, error)
            is_explicit = request.speculation.mode in FUSING
            assert is_explicit or len(faults) > 2, (story, repr(error))
        else:
            await self._check(request, events, faults, story)
        await self._check_nothing_is_left(story)

    async def _check(
        self,
        request: GenerateRequest,
        events: list[GenerationEvent],
        faults: list[Fault],
        story: Any,
    ) -> None:
        last = events[-1]
        assert isinstance(last, Finished)
        receipt = last.receipt
        told = (*story, receipt.mode, receipt.plain_from, receipt.failovers)
        assert receipt.explanation is not None
        for choice, tokens in enumerate(receipt.explanation.token_ids):
            specification = Specification(self._services, request, receipt)
            expected = await specification.tokens(choice)
            assert tokens == expected, (told, choice)
            self._check_counts(receipt, choice, told)
            if receipt.contract == "fused" and request.speculation.refresh:
                self._check_refreshes(receipt, choice, specification, told)
        if not faults:
            assert not receipt.failovers, told
            assert not receipt.is_fallback, told
            assert set(receipt.plain_from) == {None}, told
            self._count("undisturbed")
        if request.speculation.mode in FUSING:
            assert receipt.contract == request.speculation.mode, told
            assert any(each != 0 for each in receipt.plain_from), told
        has_lost = any("drafter" in each for each in receipt.failovers)
        assert has_lost == any(each is not None for each in receipt.plain_from), told
        assert len(receipt.failovers) <= len(faults), told
        for failover in receipt.failovers:
            self._count(failover)
        self._count("refreshed", sum(each.refreshes for each in receipt.choices))

    def _check_counts(self, receipt: Receipt, choice: int, told: Any) -> None:
        """Each token's origin, and where there is no drafter."""
        assert receipt.explanation is not None
        origins, counts = receipt.explanation.origins[choice], receipt.choices[choice]
        assert counts.completion_tokens == len(origins), told
        assert counts.accepted == origins.count("drafted"), told
        assert counts.corrected == origins.count("corrected"), told
        plain_from = receipt.plain_from[choice]
        if plain_from is not None and receipt.mode != "lossless":  # there the text drafts on
            assert set(origins[plain_from:]) <= {"target"}, told
        if receipt.contract == "fused":
            assert "target" not in origins[:plain_from], told

    def _check_refreshes(
        self, receipt: Receipt, choice: int, specification: Specification, told: Any
    ) -> None:
        """All that were due were made, perhaps without the one at which the drafter was lost."""
        due, made = specification.refreshed_at, receipt.choices[choice].refreshes
        assert made in (len(due), len(due) + (receipt.plain_from[choice] is not None)), (told, due)

    async def _check_nothing_is_left(self, story: Any) -> None:
        await asyncio.sleep(1000)
        for engine in self._engines:
            engine.check_integrity()
            is_alive = engine in self._living
            assert not (is_alive and engine.ledger.leases()), story
        files = [task.get_coro().cr_code.co_filename for task in asyncio.all_tasks()]  # type: ignore[union-attr]
        ours = [each for each in files if "/tests/" not in each and OURS.search(each)]
        assert not ours, (story, ours)
        hanging = asyncio.all_tasks() - {asyncio.current_task()}
        for task in hanging:
            task.cancel()
        await asyncio.gather(*hanging, return_exceptions=True)

    @property
    def _living(self) -> list[ToyEngine]:
        app = self._injector.app
        assert app is not None
        return [each.engine.actor._engine for each in (app.target, app.drafter)]

    def _count(self, what: str, number: int = 1) -> None:
        self.seen[what] = self.seen.get(what, 0) + number


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("seed", SEEDS)
def test_every_answer_is_the_specifications_whatever_befalls_its_leases(
    seed: int,
    place: str,
    virtual_loop: VirtualLoop,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.CRITICAL)  # what is lost here is meant to be
    walk = Walk(virtual_loop, seed, place, NUM_STEPS // len(SEEDS) // len(PLACES))
    with asyncio.Runner(loop_factory=lambda: virtual_loop) as runner:
        runner.run(walk.go())
    happened = {
        "undisturbed",
        "target lost",
        "drafter lost",
        "drafter hung",
        "refreshed",
        "refused",
    }
    if place == "over ray":
        happened.add("target hung")
    assert happened <= set(walk.seen)

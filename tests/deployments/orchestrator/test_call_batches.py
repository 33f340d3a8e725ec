"""Calls of several loops in one actor call: who shares, and that nothing else is shared."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, ObjectLostError

from cluster.leases import HeldLease
from deployments.orchestrator.call_batches import CallSlot, SharedCalls, find_shared_calls
from deployments.orchestrator.lease_queue import LeaseQueue
from deployments.orchestrator.ray_pools import RayLease
from deployments.orchestrator.ray_verifiers import RayDrafter, RayVerifier, VerifierSettings
from deployments.pools.shared_calls import Mailboxes
from rapid.config import SpeculationConfig
from rapid.errors import DrafterUnavailable, EngineFailed, LeaseNotFound, RapidError
from rapid.estimators import Patience
from tests.deployments.pools.test_shared_calls import SteppingEngine
from tests.rapid.tiny_models import lease_request

DRAFTER, TARGET = bytes(range(16)), bytes(range(16, 32))


class Actor:
    """An engine's actor handle without Ray: arguments are awaited first, then the method runs."""

    def __init__(self, actor_id: bytes, engine: object) -> None:
        self._actor_id = SimpleNamespace(hex=actor_id.hex)
        self.engine, self.boxes = engine, Mailboxes(engine)
        self.calls: list[str] = []
        self.death: Exception | None = None
        self.holds_back: asyncio.Event | None = None  # drafted blocks, until it is set
        self.late: asyncio.Event | None = None  # answers that are asked for now, until it is set
        for method in ("draft", "verify", "decode"):
            setattr(self, method, SimpleNamespace(remote=partial(self._alone, method)))
        self.exchange = SimpleNamespace(remote=self._together)
        self.ping = SimpleNamespace(remote=lambda: asyncio.sleep(0, 1))

    def _alone(self, method: str, *arguments: Any) -> asyncio.Future[Any]:
        self.calls.append(method)
        return self._running(lambda *ready: getattr(self.engine, method)(*ready), arguments)

    def _together(self, caller: str, calls: list[Any], blocks: Any) -> list[asyncio.Future[Any]]:
        self.calls.append(f"{len(calls)} together")
        answer = self._running(self.boxes.exchange, (caller, calls, blocks))
        waits = (self.late, self.holds_back or self.late)
        return [_quiet(_item(answer, place, wait)) for place, wait in enumerate(waits)]

    def _running(
        self, method: Callable[..., Any], arguments: tuple[Any, ...]
    ) -> asyncio.Future[Any]:
        async def run() -> Any:
            ready = [await each if asyncio.isfuture(each) else each for each in arguments]
            if self.death is not None:
                raise self.death
            return await method(*ready)

        return _quiet(run())


async def _item(answer: asyncio.Future[Any], place: int, wait: asyncio.Event | None) -> Any:
    item = (await answer)[place]
    if wait is not None:
        await wait.wait()
    return item


def _quiet(running: Coroutine[Any, Any, Any]) -> asyncio.Future[Any]:
    """Begin a call whose error may remain unread, as Ray lets it."""
    task = asyncio.ensure_future(running)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return task


@pytest.fixture
def engine() -> SteppingEngine:
    return SteppingEngine()


@pytest.fixture
def actor(engine: SteppingEngine) -> Actor:
    return Actor(TARGET, engine)


@pytest.fixture
def calls(actor: Actor) -> SharedCalls:
    return SharedCalls(actor)


@pytest.fixture
def blamed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr("cluster.leases.CIRCUITS", SimpleNamespace(put=found.append))
    return found


async def turns(number: int = 10) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


def asked(calls: SharedCalls, *lease_ids: str) -> list[asyncio.Future[Any]]:
    """Ask for each lease in this turn."""
    return [asyncio.ensure_future(calls.ask("decode", each, 0, 4)) for each in lease_ids]


async def test_a_call_that_is_alone_in_its_turn_goes_by_itself(
    engine: SteppingEngine, actor: Actor, calls: SharedCalls
) -> None:
    for lease_id in "ab":
        (alone,) = asked(calls, lease_id)
        await turns()
        engine.end(**{lease_id: "verdict"})
        assert await alone == "verdict"
    assert actor.calls == ["decode", "decode"]


async def test_calls_of_one_turn_travel_together_and_a_late_one_holds_up_no_other(
    engine: SteppingEngine, actor: Actor, calls: SharedCalls
) -> None:
    a, late, c = asked(calls, "a", "late", "c")
    await turns()
    engine.end(a="A", c="C")
    assert [await a, await c] == ["A", "C"]
    assert actor.calls == ["3 together", "0 together"]  # the second one waits for the late call
    again = asked(calls, "a", "c")
    await turns()
    engine.end(a="A2", c="C2")
    assert await asyncio.gather(*again) == ["A2", "C2"]
    assert not late.done()
    engine.end(late="B")
    assert await late == "B"


async def test_an_error_is_of_its_call_alone(engine: SteppingEngine, calls: SharedCalls) -> None:
    fine, failed = asked(calls, "a", "b")
    await turns()
    engine.end(a="A", b=LeaseNotFound("expired"))
    assert await fine == "A"
    with pytest.raises(LeaseNotFound, match="expired"):
        await failed


async def test_the_death_of_an_engine_ends_every_call_and_later_calls_find_it_dead(
    engine: SteppingEngine, actor: Actor, calls: SharedCalls
) -> None:
    for death in (ActorUnavailableError("gone", TARGET), ActorDiedError()):
        waiting = asked(calls, "a", "b")
        await turns()
        actor.death = death
        waiting += asked(calls, "c", "d")
        for call in waiting:
            with pytest.raises(type(death)):
                await call
        actor.death = None
        engine.end(a="too late", b="too late")
        await turns()


async def test_calls_that_the_engine_does_not_know_do_not_wait_for_ever(
    actor: Actor, calls: SharedCalls
) -> None:
    """This process stood still for so long that the engine has forgotten it."""
    waiting = asked(calls, "a", "b")
    await turns()
    (box,) = actor.boxes._boxes.values()
    box._running.clear()
    box._news.set()
    for call in waiting:
        with pytest.raises(EngineFailed, match="no answer"):
            await call


async def test_who_hangs_up_cancels_its_own_call_and_leaves_nothing_behind(
    engine: SteppingEngine, calls: SharedCalls
) -> None:
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, told: complaints.append(told))
    stays, leaves = asked(calls, "a", "b")
    await turns()
    leaves.cancel()
    await turns()
    engine.end(b=LeaseNotFound("released"))
    await turns()
    assert not stays.done()
    engine.end(a="A")
    assert await stays == "A"
    await turns()
    gc.collect()
    assert complaints == []
    assert calls._waiting == {}
    assert asyncio.all_tasks() == {asyncio.current_task()}


# --- rounds of draft and verdict ------------------------------------------------------------------


class Pair:
    """A drafter's and a target's engine, and loops over leases on both."""

    def __init__(self) -> None:
        self.drafting, self.judging = SteppingEngine(), SteppingEngine()
        self.drafter, self.target = Actor(DRAFTER, self.drafting), Actor(TARGET, self.judging)
        self._calls = [SharedCalls(each) for each in (self.drafter, self.target)]

    def round(
        self,
        name: str,
        patience: float = 30,
        *,
        is_large: bool = False,
        drafter: Actor | None = None,
        drafts: SharedCalls | None = None,
    ) -> asyncio.Task[Any]:
        own, judges = self._calls
        drafts = drafts or own
        lease = HeldLease(f"d{name}", drafter or self.drafter, 0.0, "drafter")
        target = HeldLease(f"t{name}", self.target, 0.0, "target")
        verifier = RayVerifier(target, lambda: lease, Patience(patience), calls=judges)
        proposer = RayDrafter(lease, 0, None if is_large else drafts)
        return asyncio.create_task(verifier.verify(proposer.draft(None, 4)))


async def test_blocks_that_were_drafted_together_are_judged_together() -> None:
    pair = Pair()
    rounds = [pair.round(name) for name in "abc"]
    await turns()
    pair.drafting.end(da="A", db="B", dc="C")
    await turns(20)
    assert sorted(block for _, block in pair.judging.blocks) == ["A", "B", "C"]
    pair.judging.end(ta=1, tb=2, tc=3)
    assert await asyncio.gather(*rounds) == [1, 2, 3]
    assert pair.drafter.calls == pair.target.calls == ["3 together"]


async def test_blocks_of_several_drafters_reach_their_own_targets() -> None:
    pair, drafting = Pair(), SteppingEngine()
    other = Actor(bytes(range(32, 48)), drafting)
    drafts = SharedCalls(other)
    rounds = [pair.round(name) for name in "ab"]
    rounds += [pair.round(name, drafter=other, drafts=drafts) for name in "cd"]
    await turns()
    pair.drafting.end(da="A", db="B")
    drafting.end(dc="C", dd="D")
    await turns(20)
    assert sorted(block for _, block in pair.judging.blocks) == ["A", "B", "C", "D"]
    pair.judging.end(ta=1, tb=2, tc=3, td=4)
    assert await asyncio.gather(*rounds) == [1, 2, 3, 4]


async def test_a_round_that_is_alone_goes_as_two_calls_one_upon_the_other() -> None:
    pair = Pair()
    alone = pair.round("a")
    await turns()
    assert pair.target.calls == ["verify"]  # before its block is there
    pair.drafting.end(da="A")
    await turns()
    pair.judging.end(ta="verdict")
    assert await alone == "verdict"


async def test_a_late_block_is_overdue_for_its_own_round_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("deployments.orchestrator.engine_calls._LOOK_S", 0.01)
    pair = Pair()
    prompt, late = pair.round("a"), pair.round("b", patience=0.05)
    await turns()
    pair.drafting.end(da="A")
    await turns(20)
    pair.judging.end(ta="verdict")
    assert await prompt == "verdict"
    with pytest.raises(RapidError, match="has not answered"):
        await late


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        (DrafterUnavailable("no lease"), DrafterUnavailable),
        (ActorUnavailableError("gone", DRAFTER), DrafterUnavailable),
    ],
)
async def test_a_drafter_that_fails_is_to_blame_and_not_the_target(
    failure: Exception, kind: type[RapidError], blamed: list[str]
) -> None:
    pair = Pair()
    if not isinstance(failure, RapidError):
        pair.drafter.death = failure
    rounds = [pair.round(name) for name in "ab"]
    await turns()
    if isinstance(failure, RapidError):
        pair.drafting.end(da=failure, db=failure)
    for each in rounds:
        with pytest.raises(kind):
            await each
    assert blamed == ["drafter", "drafter"]


async def test_a_drafter_that_has_forgotten_its_calls_costs_its_help_and_no_target(
    blamed: list[str],
) -> None:
    pair = Pair()
    rounds = [pair.round(name) for name in "ab"]
    await turns()
    (box,) = pair.drafter.boxes._boxes.values()
    box._running.clear()
    box._news.set()
    for each in rounds:
        with pytest.raises(DrafterUnavailable, match="did not answer"):
            await each
    assert blamed == ["drafter", "drafter"]


async def test_a_block_whose_bytes_do_not_come_is_overdue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The drafter has answered, and its machine cannot deliver what it drafted."""
    monkeypatch.setattr("deployments.orchestrator.engine_calls._LOOK_S", 0.01)
    pair = Pair()
    pair.drafter.holds_back = asyncio.Event()
    rounds = [pair.round(name, patience=0.5) for name in "ab"]
    await turns()
    pair.drafting.end(da="A", db="B")
    for each in rounds:
        with pytest.raises(RapidError, match="has not answered"):
            await each


async def test_an_answer_that_is_late_and_empty_ends_no_call_that_the_engine_works_on(
    engine: SteppingEngine, actor: Actor, calls: SharedCalls
) -> None:
    first = asked(calls, "a", "b")
    await turns()
    actor.late = asyncio.Event()  # the answer of the next exchange is under way for long
    second = asked(calls, "c", "d")
    await turns()
    late, actor.late = actor.late, None
    engine.end(a=1, b=2, c=3, d=4)
    assert await asyncio.gather(*first, *second) == [1, 2, 3, 4]
    slow, quick = asked(calls, "x", "y")
    await turns()
    engine.end(y=5)
    assert await quick == 5
    late.set()
    await turns()
    assert not slow.done()
    engine.end(x=6)
    assert await slow == 6


async def test_an_exchange_that_cannot_be_sent_leaves_nobody_waiting(
    engine: SteppingEngine, actor: Actor, calls: SharedCalls
) -> None:
    def refused(*_: object) -> None:
        raise ValueError("not sent")

    quick, slow = asked(calls, "a", "b")
    await turns()
    actor.exchange = SimpleNamespace(remote=refused)
    engine.end(a="A")
    assert await quick == "A"
    with pytest.raises(ValueError, match="not sent"):
        await slow


async def test_a_block_that_goes_by_itself_meets_a_target_whose_calls_are_shared() -> None:
    """As large ones do: Ray gives a call the block only if its reference is an argument."""
    pair = Pair()
    rounds = [pair.round(name, is_large=True) for name in "ab"]
    await turns()
    pair.drafting.end(da="A", db="B")
    await turns()
    assert sorted(block for _, block in pair.judging.blocks) == ["A", "B"]
    pair.judging.end(ta=1, tb=2)
    assert await asyncio.gather(*rounds) == [1, 2]
    assert pair.drafter.calls == ["draft", "draft"]
    assert pair.target.calls == ["verify", "verify"]


async def test_blocks_lost_with_their_machine_are_lost_to_their_own_rounds(
    engine: SteppingEngine, actor: Actor, calls: SharedCalls
) -> None:
    waiting = asked(calls, "a", "b")
    await turns()
    lost = asyncio.get_running_loop().create_future()
    lost.set_exception(ObjectLostError("0" * 56, None, ""))
    judged = [calls.ask("verify", lease_id, 0, block=CallSlot(lost, 0)) for lease_id in "cd"]
    for call in judged:
        with pytest.raises(ObjectLostError):
            await call
    engine.end(a="A", b="B")
    assert await asyncio.gather(*waiting) == ["A", "B"]


@pytest.mark.parametrize(
    ("speculation", "are_shared"),
    [
        ({}, True),
        ({"max_draft": 64, "draft_top_k": 128}, True),  # 64 KB at most
        ({"max_draft": 64, "draft_top_k": 129}, False),
        ({"draft_top_k": None}, False),
    ],
)
def test_drafts_share_calls_where_their_blocks_are_small(
    actor: Actor, speculation: dict[str, Any], are_shared: bool
) -> None:
    settings = VerifierSettings(Patience(30), "target", frozenset())
    request = lease_request(speculation=SpeculationConfig(**speculation))
    held, queue = HeldLease("d", actor, 0.0, "drafter"), LeaseQueue(1)
    lease = RayLease(held, request, settings, DrafterUnavailable, queue)
    assert (lease.drafter(0)._calls is not None) == are_shared


async def test_all_who_ask_for_an_engine_get_the_same_calls_while_one_keeps_them(
    actor: Actor,
) -> None:
    first = find_shared_calls(actor)
    assert find_shared_calls(Actor(TARGET, None)) is first
    assert find_shared_calls(Actor(DRAFTER, None)) is not first

"""The router between Serve and `cluster.routing`: what it knows, and what it remembers."""

from __future__ import annotations

import asyncio
import pickle
import time
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import ReplicaID, RequestRouter

from cluster import affinity
from cluster.affinity import AffinityRouter
from cluster.circuit_breaker import CircuitBreaker
from cluster.leases import hold
from cluster.placement import PoolConfig, deployment_options
from cluster.reports import EngineReport, document_name
from cluster.routing import weight
from deployments.pools.leasing_replica import EngineReplica
from rapid.config import EngineConfig, SamplingConfig, SpeculationConfig
from rapid.messages import GenerateRequest, LeaseRequest, Terms, as_prompt
from tests.fakes import FakeEngine

EMPTY = EngineReport(0.0, 256, 256, 16, 16)


@pytest.fixture(autouse=True)
def blame(monkeypatch: pytest.MonkeyPatch) -> CircuitBreaker:
    """Nobody is blamed for what another test saw."""
    blame = CircuitBreaker()
    monkeypatch.setattr("cluster.affinity.CIRCUITS", blame)
    return blame


@dataclass(frozen=True)
class Replica:
    replica_id: ReplicaID
    routing_stats: dict[str, Any] = field(default_factory=dict)
    max_ongoing_requests: int = 8


def replica(name: str, report: EngineReport | None = None, age_s: float = 0.0) -> Any:
    stats = asdict(replace(report, at=time.time() - age_s)) if report else {}
    return Replica(SimpleNamespace(unique_id=name), stats)  # type: ignore[arg-type]


SILENT = [replica(name) for name in "abcd"]
RANKS = sorted("abcd", key=lambda name: weight(document_name("x"), name), reverse=True)


def router(ongoing: dict[str, int] | None = None) -> AffinityRouter:
    """A router that knows how much each replica has to do, without Serve around it."""
    router = object.__new__(AffinityRouter)
    known = ongoing or {}
    cache = SimpleNamespace(get=lambda replica_id: known.get(replica_id.unique_id))
    router._replica_queue_len_cache = cache
    router._deployment_id, router._replicas_list = "Pool", []
    router.initialize_state(target_ongoing_requests=2, first_token_goal_s=10)
    return router


def pending(request_id: str, argument: Any = None, name: str = "") -> Any:
    metadata = SimpleNamespace(session_id=name, internal_request_id=request_id)
    return SimpleNamespace(metadata=metadata, args=[argument])


def lease(num_tokens: int, affinity: str = "") -> LeaseRequest:
    return LeaseRequest(
        "lease",
        Terms("local", SamplingConfig(), SpeculationConfig(max_draft=10), 50),
        as_prompt(range(num_tokens)),
        affinity=affinity,
    )


def pass_time(router: AffinityRouter, seconds: float) -> None:
    now = router._clock() + seconds
    router._clock = lambda: now


async def groups(router: AffinityRouter, replicas: list[Any], request: Any) -> list[list[str]]:
    chosen = await router.choose_replicas(replicas, request)
    return [[each.replica_id.unique_id for each in group] for group in chosen]


def test_the_router_that_serve_copies_shares_its_variables_with_its_process() -> None:
    options = deployment_options(PoolConfig(), has_affinity=True)["request_router_config"]
    copied = RequestRouterConfig(**options).get_request_router_class()
    assert issubclass(copied, AffinityRouter)
    for method in (copied.choose_replicas, copied.can_move, copied.is_stranded):
        assert method.__globals__ is vars(affinity)


async def test_a_name_is_tried_at_its_replicas_one_by_one_then_at_all_others() -> None:
    tried = await groups(router(), SILENT, pending("1", name="x"))
    assert tried == [[RANKS[0]], [RANKS[1]], [RANKS[2]], [RANKS[3]]]
    five = [*SILENT, replica("e")]
    assert [len(group) for group in await groups(router(), five, pending("1", name="x"))] == [
        1,
        1,
        1,
        2,
    ]


async def test_a_busy_owner_is_not_waited_for() -> None:
    ask = pending("1", name="x")
    assert (await groups(router({RANKS[0]: 1}), SILENT, ask))[0] == [RANKS[0]]
    assert (await groups(router({RANKS[0]: 2}), SILENT, ask))[0] == [RANKS[1]]


async def test_an_owner_that_has_just_failed_a_request_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    blame = CircuitBreaker()
    monkeypatch.setattr("cluster.affinity.CIRCUITS", blame)
    ask = pending("1", name="x")
    assert (await groups(router(), SILENT, ask))[0] == [RANKS[0]]
    blame.put(RANKS[0])
    assert (await groups(router(), SILENT, ask))[0] == [RANKS[1]]
    assert all(RANKS[0] not in each for each in await groups(router(), SILENT, pending("2")))


async def test_without_a_name_or_a_replica_there_is_still_an_answer() -> None:
    assert sum(map(len, await groups(router(), SILENT, pending("1")))) == 4
    assert await groups(router(), SILENT[:1], pending("1")) == [["a"]]
    assert await router().choose_replicas([], None) == []


async def test_a_small_request_does_not_go_to_a_replica_that_one_lease_has_filled() -> None:
    replicas = [replica("a", replace(EMPTY, pages_free=5)), replica("b", EMPTY)]
    for number in range(20):
        assert await groups(router(), replicas, pending(str(number), lease(100))) == [["b"]]


async def test_a_replica_that_reports_no_more_is_left_alone_while_there_is_another() -> None:
    """It stands still, and would look idle for as long as Serve takes it to be well."""
    one = router()
    stopped = [replica(name, EMPTY) for name in "ab"]
    assert len(await groups(one, stopped, pending("1", lease(100)))) == 2
    pass_time(one, 6)
    # Where none reports, Serve's controller may be away: then the reports say nothing.
    assert len(await groups(one, stopped, pending("1", lease(100)))) == 2
    full = replica("c", replace(EMPTY, leases_free=0))
    for others in ([full], [replica("new")]):
        tried = await groups(one, [*stopped, *others], pending("1", lease(100)))
        assert tried == [[each.replica_id.unique_id for each in others]]
    again = [replica(name, EMPTY) for name in "ab"]
    assert len(await groups(one, again, pending("1", lease(100)))) == 2


async def test_a_machine_whose_clock_is_late_is_not_taken_for_one_that_stands_still() -> None:
    one = router()
    for late_s in (90.0, 89.0, 90.5, 88.0):
        replicas = [replica("late", EMPTY, late_s), replica("b", EMPTY)]
        tried = await groups(one, replicas, pending("1", lease(100)))
        assert sorted(tried) == [["b"], ["late"]]
        pass_time(one, 4)


async def test_a_lease_that_was_sent_to_a_replica_that_stands_still_can_move() -> None:
    one, waits = router(), lease(100)
    stopped, full = replica("a", EMPTY), replica("b", replace(EMPTY, leases_free=0))
    one._replicas_list = [stopped, full]
    assert await groups(one, [stopped], pending("1", waits)) == [["a"]]
    assert not one.can_move(waits)
    pass_time(one, 6)
    one._replicas_list = [stopped, replica("b", replace(EMPTY, leases_free=0))]
    assert not one.can_move(waits)  # there is no room
    one._replicas_list = [stopped, replica("b", EMPTY)]
    assert one.can_move(waits)
    one.on_request_completed(stopped.replica_id, "1")
    assert not one.can_move(waits)


@pytest.mark.parametrize(
    ("waited_s", "is_taken", "leases_free", "moves"),
    [
        (2.0, False, 16, False),
        (3.1, False, 16, True),
        (3.1, True, 16, False),
        (3.1, False, 0, False),
    ],
)
async def test_a_lease_that_nobody_takes_moves_where_there_is_room(
    waited_s: float, is_taken: bool, leases_free: int, moves: bool, blame: CircuitBreaker
) -> None:
    """Both replicas report to the controller; the network from here to one of them is cut."""
    one, waits = router(), lease(100)
    cut, other = replica("a", EMPTY), replica("b", replace(EMPTY, leases_free=leases_free))
    one._replicas_list = [cut, other]
    await one.choose_replicas([cut], pending("1", waits))
    if is_taken:
        one.on_request_routed(pending("1", waits), cut.replica_id, None)
    pass_time(one, waited_s / 2)
    if not is_taken:
        await one.choose_replicas([cut], pending("1", waits))  # Serve tries again
    pass_time(one, waited_s / 2)
    assert one.can_move(waits) == moves
    assert (blame.spare([cut, other]) == [other]) == moves


async def test_who_has_just_failed_is_better_than_who_takes_nothing(blame: CircuitBreaker) -> None:
    one, waits = router(), lease(100)
    one._replicas_list = [replica("a", EMPTY), replica("b", EMPTY)]
    await one.choose_replicas(one._replicas_list[:1], pending("1", waits))
    blame.put("b")
    assert not one.can_move(waits)
    pass_time(one, 4)
    assert one.can_move(waits)


async def test_a_replica_that_is_full_is_not_blamed_for_what_waits(blame: CircuitBreaker) -> None:
    """What it cannot take stays, and does not go to one that has just failed a step."""
    one, waits = router(), lease(100)
    blame.put("b")
    for _ in range(3):  # Serve tries again and again, and both report
        full = replica("a", replace(EMPTY, leases_free=0))
        one._replicas_list = [full, replica("b", EMPTY)]
        assert not one.can_move(waits)
        pass_time(one, 4)
        assert not one.can_move(waits)
        await one.choose_replicas([full], pending("1", waits))
    one._replicas_list = [replica("a", EMPTY), replica("b", EMPTY)]  # it has room now
    assert not one.can_move(waits)
    pass_time(one, 4)
    assert one.can_move(waits)


async def test_orchestrators_at_their_limit_are_not_blamed(blame: CircuitBreaker) -> None:
    request = GenerateRequest("caller-7", "local", ())
    one = router({"a": 8, "b": 1})
    busy, other = replica("a"), replica("b")
    one._replicas_list = [busy, other]
    for _ in range(2):
        await one.choose_replicas([busy], pending("1", request))
        pass_time(one, 10)
        assert not one.can_move(request)
    assert blame.spare([busy, other]) == [busy, other]


async def test_the_newest_of_two_notes_counts() -> None:
    """A request that was given up may have been sent again."""
    one, request = router(), GenerateRequest("caller-7", "local", ())
    one._replicas_list = [replica("a"), replica("b")]
    await one.choose_replicas(one._replicas_list[:1], pending("given up", request))
    pass_time(one, 60)
    one.on_request_routed(pending("2", request), one._replicas_list[1].replica_id, None)
    assert not one.can_move(request)
    assert one.replica_of(request) == "b"


async def test_a_request_that_no_orchestrator_takes_moves_and_is_forgotten() -> None:
    one, request = router({"b": 1}), GenerateRequest("caller-7", "local", ())
    namesake = GenerateRequest("caller-7", "local", ())
    cut, other = replica("a"), replica("b")
    one._replicas_list = [cut, other]
    await one.choose_replicas([cut], pending("1", request))
    assert one.replica_of(request) is None
    one.on_request_routed(pending("2", namesake), other.replica_id, None)
    assert one.replica_of(namesake) == "b"
    pass_time(one, 4)
    assert one.can_move(request)
    assert not one.can_move(namesake)
    one.forget(request)
    assert not one.can_move(request)
    assert one.replica_of(namesake) == "b"


async def test_a_request_is_known_by_its_id_and_not_by_its_place_in_memory() -> None:
    one, request = router(), GenerateRequest("caller-7", "local", ())
    other = replica("b")
    one.on_request_routed(pending("1", request), other.replica_id, None)
    assert one.replica_of(pickle.loads(pickle.dumps(request))) == "b"
    assert one.replica_of(GenerateRequest("caller-7", "local", ())) is None
    one.on_request_routed(pending("2", "a call of the retriever's"), other.replica_id, None)
    assert one.replica_of("a call of the retriever's") == "b"
    assert one.replica_of("another") is None


async def test_a_call_is_stranded_once_every_replica_was_silent(blame: CircuitBreaker) -> None:
    one, call = router(), "a call of the retriever's"
    lost, lost_too = one._replicas_list = [replica("a"), replica("b")]
    await one.choose_replicas([lost], pending("1", call))
    pass_time(one, 3.1)
    assert not one.is_stranded(call)
    assert one.can_move(call)
    await one.choose_replicas([lost_too], pending("2", call))
    pass_time(one, 2)
    assert not one.is_stranded(call)
    pass_time(one, 1.1)
    assert one.is_stranded(call)
    await one.choose_replicas([lost], pending("3", "the next call"))
    pass_time(one, 1.1)  # who has just failed has one second
    assert one.is_stranded("the next call")
    one.on_request_routed(pending("3", "the next call"), lost.replica_id, None)
    assert not one.is_stranded("the next call")


async def test_a_call_that_waits_for_room_is_not_stranded(blame: CircuitBreaker) -> None:
    one, call = router({"a": 8, "b": 8}), "a call of the retriever's"
    busy, busy_too = one._replicas_list = [replica("a"), replica("b")]
    blame.put("b")
    await one.choose_replicas([busy], pending("1", call))
    pass_time(one, 60)
    assert not one.is_stranded(call)
    assert blame.spare([busy, busy_too]) == [busy]


async def test_a_call_is_stranded_where_no_replica_runs() -> None:
    one = router()
    pass_time(one, 2.9)
    assert not one.is_stranded("a call")
    pass_time(one, 0.2)
    assert one.is_stranded("a call")


async def test_a_request_that_a_leaving_replica_has_not_taken_moves_at_once(
    blame: CircuitBreaker,
) -> None:
    one, request, taken = router({"b": 1}), *(GenerateRequest(each, "local", ()) for each in "12")
    leaving, other = replica("a"), replica("b")
    one._replicas_list = [leaving, other]
    await one.choose_replicas([leaving], pending("1", request))
    one.on_request_routed(pending("2", taken), leaving.replica_id, None)
    assert not one.can_move(request)  # it has three seconds
    one._replicas_list = [other]
    assert one.can_move(request)
    assert not one.can_move(taken)  # which the replica finishes
    assert blame.spare([leaving, other]) == [leaving, other]


async def test_a_router_forgets_the_oldest_of_the_leases_that_were_never_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cluster.affinity._MOST_SENT", 3)
    one = router()
    for number in range(9):
        await one.choose_replicas([replica("a", EMPTY)], pending(str(number), lease(100)))
    assert list(one._sent) == ["6", "7", "8"]


async def test_what_was_assigned_counts_until_a_report_knows_it() -> None:
    one = router()
    a, b = replica("a", EMPTY), replica("b", EMPTY)
    large = pending("large", lease(3900))
    await one.choose_replicas([a], large)
    assert await groups(one, [a, b], pending("1", lease(100))) == [["b"]]
    one.on_request_routed(large, b.replica_id, None)
    assert await groups(one, [a, b], pending("1", lease(100))) == [["a"]]
    one.on_request_completed(b.replica_id, "large")
    assert len(await groups(one, [a, b], pending("1", lease(100)))) == 2
    await one.choose_replicas([a], large)
    later = replace(EMPTY, at=time.time() + 1)  # the engine was asked after it had the request
    newer = [Replica(each.replica_id, asdict(later)) for each in (a, b)]
    assert len(await groups(one, newer, pending("1", lease(100)))) == 2


async def test_a_lease_that_waits_can_move_once_another_replica_has_room() -> None:
    one = router()
    waits = lease(100)
    queue = replica("a", replace(EMPTY, pages_free=5, leases_waiting=1))
    assert affinity.find_router("Pool") is one
    one._replicas_list = [queue, replica("b", replace(EMPTY, pages_free=5))]
    assert not one.can_move(waits)  # nobody has taken it
    one.on_request_routed(pending("1", waits), queue.replica_id, None)
    assert not one.can_move(waits)
    one._replicas_list = [queue, replica("b", EMPTY)]
    assert one.can_move(waits)
    one._replicas_list = [queue, replica("b", EMPTY, age_s=6)]
    assert not one.can_move(waits)
    one._replicas_list = [replica("a", EMPTY), replica("b", EMPTY)]
    assert not one.can_move(waits)  # it is opening
    one._replicas_list = [replica("b", replace(EMPTY, pages_free=5))]
    assert not one.can_move(waits)
    one._replicas_list = [replica("b", EMPTY)]
    assert one.can_move(waits)  # its replica has left the pool
    one._replicas_list = [queue, replica("b", EMPTY)]
    one.on_request_completed(queue.replica_id, "1")
    assert not one.can_move(waits)


def test_a_router_that_is_new_does_not_take_its_pool_for_empty() -> None:
    one = router()
    assert not one.is_empty
    one._created -= 3
    assert one.is_empty
    one._replicas_list = SILENT
    assert not one.is_empty


def test_a_router_counts_since_when_its_pool_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    def update(self: RequestRouter, replicas: list[Any]) -> None:
        self._replicas_list = replicas

    monkeypatch.setattr(RequestRouter, "update_replicas", update)
    one, now = router(), 100.0
    one._clock = lambda: now
    one._empty_since = now
    now += 40
    assert one.empty_s == 40
    one.update_replicas(SILENT)
    assert one.empty_s is None
    now += 60
    one._replicas_list = []  # as Serve leaves out one that died
    assert one.empty_s == 0
    now += 5
    assert one.empty_s == 5


@pytest.mark.ray
async def test_serve_sends_a_name_to_its_owner_until_that_is_busy(ray_cluster: str) -> None:
    class Pool:
        async def who(self, seconds: float) -> str:
            await asyncio.sleep(seconds)
            return serve.get_replica_context().replica_id.unique_id

    pool = PoolConfig(min_replicas=2, max_replicas=2, target_ongoing_requests=2, num_cpus=0.01)
    application = serve.deployment(Pool).options(**deployment_options(pool, max_leases=8)).bind()
    handle: DeploymentHandle = serve.run(application, name="affinity", route_prefix=None)

    def who(name: str, seconds: float = 0.0) -> Any:
        return handle.options(method_name="who", session_id=name).remote(seconds)

    try:
        alone: dict[str, set[str]] = {}
        for name in map(str, range(64)):  # until both own a name: which does, is chance
            # A replica that does not say in time how busy it is may be passed over.
            ((owner, times),) = Counter([await who(name) for _ in range(7)]).most_common(1)
            assert times >= 5
            alone[name] = {owner}
            if len(alone) >= 4 and len(set.union(*alone.values())) == 2:
                break
        assert len(set.union(*alone.values())) == 2
        await asyncio.sleep(1.0)  # Serve's count of what is going on lags
        busy = [asyncio.ensure_future(who("0", 3.0)) for _ in range(2)]
        await asyncio.sleep(1.0)
        elsewhere = {await who("0") for _ in range(5)}
        assert elsewhere - alone["0"]
        assert set(await asyncio.gather(*busy)) == alone["0"]
    finally:
        serve.delete("affinity")


@pytest.mark.ray
@pytest.mark.slow
async def test_no_lease_waits_behind_one_that_fills_its_replica(ray_cluster: str) -> None:
    """Two replicas of 64 pages each; a large lease takes 60, a small one 9."""
    pool = PoolConfig(min_replicas=2, max_replicas=2, num_cpus=0.01)
    engine = EngineConfig(model="fake", kv_cache_tokens=1024, max_leases=8)
    deployment = serve.deployment(EngineReplica).options(**deployment_options(pool, max_leases=8))
    application = deployment.bind(engine, pool, FakeEngine)
    handle: DeploymentHandle = serve.run(application, name="rooms", route_prefix=None)

    def taken(lease_id: str, num_tokens: int, timeout_s: float = 60) -> Any:
        request = replace(lease(num_tokens), lease_id=lease_id)
        return hold(handle, request, timeout_s=timeout_s, renew_every_s=5)

    async def small(number: int) -> Any:
        async with taken(f"small-{number}", 80) as held:
            await asyncio.sleep(1)
            return held.engine._actor_id

    try:
        async with AsyncExitStack() as held, AsyncExitStack() as other:
            filled = await held.enter_async_context(taken("large", 850))
            await asyncio.sleep(4)  # until the router knows
            takers = await asyncio.gather(*map(small, range(5)))
            assert filled.engine._actor_id not in takers
            await asyncio.sleep(4)
            second = await other.enter_async_context(taken("second", 850))
            assert second.engine._actor_id != filled.engine._actor_id
            await asyncio.sleep(4)  # now both are full: five wait, in whichever queue is shorter
            waiting = [asyncio.ensure_future(small(number)) for number in range(5, 10)]
            await asyncio.sleep(4)
            assert not any(each.done() for each in waiting)
            await other.aclose()
            assert set(await asyncio.gather(*waiting)) == {second.engine._actor_id}
    finally:
        serve.delete("rooms")

from __future__ import annotations

import asyncio
import gc
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ray.exceptions import ActorUnavailableError, ObjectLostError, RayTaskError

from cluster.circuit_breaker import CircuitBreaker
from cluster.leases import HeldLease
from deployments.orchestrator.ray_verifiers import JudgingVerifier, RayDrafter, RayVerifier
from rapid.config import SamplingConfig, SpeculationConfig
from rapid.errors import (
    BadRequest,
    DrafterUnavailable,
    EngineFailed,
    GrammarTooComplex,
    LeaseNotFound,
    OutOfStep,
    RapidError,
    TargetHangs,
    TargetUnavailable,
)
from rapid.estimators import Patience
from rapid.messages import (
    DraftBlock,
    LeaseRequest,
    TargetLogits,
    Terms,
    TokenLogprobs,
    Verdict,
    as_prompt,
)

DRAFTER, TARGET = bytes(range(16)), bytes(range(16, 32))


class ScriptedEngine:
    """An engine's actor handle whose methods all answer alike."""

    def __init__(self, actor_id: bytes, answer: object = None) -> None:
        self._actor_id = SimpleNamespace(hex=actor_id.hex)
        self.answer = answer
        self.calls: list[tuple[Any, ...]] = []
        self.draft = self.verify = self.decode = self

    def remote(self, *args: Any) -> Any:
        self.calls.append(args)

        async def answered() -> object:
            if isinstance(self.answer, BaseException):
                raise self.answer
            return self.answer

        return answered() if self.answer is not None else "reference"


def drafting() -> HeldLease:
    return HeldLease("d", ScriptedEngine(DRAFTER), 0.0)


def verifier(answer: object) -> RayVerifier:
    target = HeldLease("t", ScriptedEngine(TARGET, answer), 0.0)
    return RayVerifier(target, drafting, Patience(30))


def remote(cause: Exception) -> BaseException:
    return RayTaskError("verify", "Traceback ...", cause).as_instanceof_cause()


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        (ActorUnavailableError("gone", DRAFTER), DrafterUnavailable),
        (ActorUnavailableError("gone", TARGET), TargetUnavailable),
        (ObjectLostError("0" * 56, None, ""), DrafterUnavailable),
        (remote(DrafterUnavailable("the drafter failed")), DrafterUnavailable),
        (remote(LeaseNotFound("expired")), LeaseNotFound),
        (remote(ValueError("a bug")), EngineFailed),
        (remote(OutOfStep("a verdict for another position")), OutOfStep),
        (remote(BadRequest("the block holds a token id beyond the vocabulary")), EngineFailed),
        (remote(GrammarTooComplex("too many states")), GrammarTooComplex),
    ],
)
async def test_a_failed_verify_tells_whose_failure_it_is(
    failure: BaseException, kind: type[RapidError]
) -> None:
    with pytest.raises(kind) as raised:
        await verifier(failure).verify("block")
    assert type(raised.value) is kind


async def test_a_target_that_drafts_for_itself_and_dies_is_a_lost_target() -> None:
    target = HeldLease("t", ScriptedEngine(TARGET, ActorUnavailableError("gone", TARGET)), 0.0)
    beside = HeldLease("d", target.engine, 0.0)
    with pytest.raises(TargetUnavailable):
        await RayVerifier(target, lambda: beside, Patience(30)).verify("block")


@pytest.mark.parametrize(
    "failure", [ObjectLostError("0" * 56, None, ""), ActorUnavailableError("gone", DRAFTER)]
)
async def test_a_block_that_is_lost_on_its_way_here_is_a_lost_drafter(failure: Exception) -> None:
    """Judged in the orchestrator, a block is fetched a second time."""
    target = ScriptedEngine(TARGET, "logits")
    target.score = target
    judging = JudgingVerifier(
        HeldLease("t", target, 0.0),
        drafting,
        Patience(30),
        0,
        LeaseRequest("t", Terms("acme", SamplingConfig(), SpeculationConfig(), 8), as_prompt([1])),
        {2},
    )
    with pytest.raises(DrafterUnavailable):
        await judging.verify(ScriptedEngine(DRAFTER, failure).remote())


async def test_judged_in_the_orchestrator_too_a_block_meets_the_log_odds_of_the_text_before() -> (
    None
):
    logits = TargetLogits("t", 0, 0, np.zeros((1, 4), dtype=np.float32), 0.0)
    target = ScriptedEngine(TARGET, logits)
    target.score = target.commit = target
    adaptive = SpeculationConfig(transfer="adaptive")
    request = LeaseRequest(
        "t",
        Terms("acme", SamplingConfig(temperature=0), adaptive, 8),
        as_prompt([1]),
        log_odds=(10.0,),
    )
    judging = JudgingVerifier(
        HeldLease("t", target, 0.0), drafting, Patience(30), 0, request, set()
    )
    sure = DraftBlock(
        lease_id="d",
        choice=0,
        position=0,
        token_ids=np.array([3], dtype=np.int32),
        candidate_ids=np.array([[3]], dtype=np.int32),
        candidate_probs=np.ones((1, 1), dtype=np.float32),
    )
    told = [(await judging.verify(sure)).log_odds for _ in range(2)]
    first = 8.5 + math.log(4)
    assert told == pytest.approx([first, 0.85 * first + math.log(4)])


async def test_a_block_is_judged_with_the_witness_that_is_held_at_the_time() -> None:
    """A refresh replaces the witness in mid-answer."""
    target = ScriptedEngine(TARGET, "verdict")
    held = HeldLease("t", target, 0.0)
    witnesses = [None, HeldLease("w", target, 0.0), HeldLease("w2", target, 0.0)]
    asking = RayVerifier(held, drafting, Patience(30), 0, lambda: witnesses.pop(0))
    for _ in range(3):
        await asking.verify("block")
    assert target.calls == [("t", 0, "block"), ("t", 0, "block", "w"), ("t", 0, "block", "w2")]


async def test_judged_in_the_orchestrator_a_witness_is_scored_and_told_the_verdict() -> None:
    sure_of = {"t": 1, "w": 3}  # the document's reading and the witness's

    class Reads(ScriptedEngine):
        def remote(self, lease_id: str, *args: Any) -> Any:
            self.calls.append((lease_id, *args))

            async def answered() -> object:
                logits = np.full((1, 4), -50, dtype=np.float32)
                logits[0, sure_of[lease_id]] = 50
                return TargetLogits(lease_id, 0, 0, logits, 0.0)

            return answered()

    target = Reads(TARGET)
    target.score = target
    target.commit = told = ScriptedEngine(TARGET, "done")
    adaptive = SpeculationConfig(transfer="adaptive")
    request = LeaseRequest(
        "t",
        Terms("acme", SamplingConfig(temperature=0), adaptive, 8),
        as_prompt([1]),
        log_odds=(10.0,),
    )
    held, witness = HeldLease("t", target, 0.0), HeldLease("w", target, 0.0)
    judging = JudgingVerifier(held, drafting, Patience(30), 0, request, set(), lambda: witness)
    block = DraftBlock(
        lease_id="d",
        choice=0,
        position=0,
        token_ids=np.array([2], dtype=np.int32),
        candidate_ids=np.array([[2, 3]], dtype=np.int32),
        candidate_probs=np.array([[0.6, 0.4]], dtype=np.float32),
    )
    verdict = await judging.verify(block)
    assert verdict.token_ids == (3,)  # s = (0.7, 0.3) for 3 and 2; without the witness, 2
    assert told.calls == [("t", verdict), ("w", verdict)]


async def test_a_caller_that_leaves_in_mid_round_leaves_nothing_behind() -> None:
    """The call fails once its lease is released, when nobody waits for it any more."""
    released = asyncio.Event()
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, told: complaints.append(told))

    class Waiting(ScriptedEngine):
        def remote(self, *args: Any) -> Any:
            async def answered() -> object:
                await released.wait()
                raise remote(LeaseNotFound("released"))

            return answered()

    asking = RayVerifier(HeldLease("t", Waiting(TARGET), 0.0), drafting, Patience(30))
    round_ = asyncio.create_task(asking.verify("block"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    round_.cancel()
    released.set()
    with pytest.raises(asyncio.CancelledError):
        await round_
    await asyncio.sleep(0.01)
    gc.collect()
    assert complaints == []
    assert asyncio.all_tasks() == {asyncio.current_task()}


class Slow(ScriptedEngine):
    """It answers after a while; a sign of life it gives at once, or never."""

    def __init__(self, *, is_alive: bool) -> None:
        super().__init__(TARGET)
        self.ping = SimpleNamespace(remote=lambda: self._sign(is_alive))
        self.num_signs = 0

    async def _sign(self, is_alive: bool) -> None:
        self.num_signs += 1
        if not is_alive:
            await asyncio.Event().wait()

    def remote(self, *args: Any) -> Any:
        return asyncio.sleep(0.3, "verdict")


@pytest.mark.parametrize("call", ["verify", "decode"])
async def test_a_round_may_take_as_long_as_the_target_gives_signs_of_life(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.orchestrator.engine_calls._LOOK_EVERY_S", 0.02)
    blame = CircuitBreaker()
    monkeypatch.setattr("cluster.leases.CIRCUITS", blame)
    for is_alive in (True, False):
        target = Slow(is_alive=is_alive)
        held = HeldLease("t", target, 0.0, "replica-1")
        asking = RayVerifier(held, drafting, Patience(30, silent_s=0.1))
        asked = asking.verify(block()) if call == "verify" else asking.decode(4)
        if is_alive:
            assert await asked == "verdict"
            assert target.num_signs > 1
            assert blame._until == {}
        else:
            with pytest.raises(TargetHangs):
                await asked
            assert list(blame._until) == ["replica-1"]


@pytest.mark.parametrize(
    ("failure", "blamed"),
    [
        (ActorUnavailableError("gone", TARGET), "target"),
        (remote(EngineFailed("The engine is closed.")), "target"),
        (ActorUnavailableError("gone", DRAFTER), "drafter"),
        (remote(DrafterUnavailable("the drafter failed")), "drafter"),
        (remote(LeaseNotFound("expired")), None),
        (remote(OutOfStep("a verdict for another position")), None),
    ],
)
async def test_the_replica_whose_engine_failed_is_blamed_and_no_other(
    failure: BaseException, blamed: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    blame = CircuitBreaker()
    monkeypatch.setattr("cluster.leases.CIRCUITS", blame)
    target = HeldLease("t", ScriptedEngine(TARGET, failure), 0.0, "target")
    drafter = HeldLease("d", ScriptedEngine(DRAFTER), 0.0, "drafter")
    with pytest.raises(RapidError):
        await RayVerifier(target, lambda: drafter, Patience(30)).verify("block")
    assert list(blame._until) == ([blamed] if blamed else [])


def block() -> DraftBlock:
    ids = np.array([3], dtype=np.int32)
    return DraftBlock("d", 0, 0, ids, ids[:, None], np.ones((1, 1), dtype=np.float32))


async def test_a_block_is_a_reference_that_nobody_opens_here() -> None:
    engine = ScriptedEngine(DRAFTER)
    logprobs = (TokenLogprobs(5, -0.1),)
    verdict = Verdict("t", 2, 0, (5,), 1, 1, False, logprobs)
    assert RayDrafter(HeldLease("d", engine, 0.0), choice=2).draft(verdict, 10) == "reference"
    ((lease_id, choice, sent, num_tokens),) = engine.calls
    assert (lease_id, choice, num_tokens) == ("d", 2, 10)
    assert sent.token_ids == (5,)
    assert sent.logprobs == ()  # a drafter has no use for them

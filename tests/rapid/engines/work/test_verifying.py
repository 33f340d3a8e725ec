"""A block that is judged with a witness: one call and one forward, on both leases or on neither."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rapid.config import SpeculationConfig
from rapid.engines.engine import Engine
from rapid.engines.execution import compute
from rapid.engines.local_ports import EngineDrafter, EngineVerifier, LocalLease
from rapid.errors import EngineFailed, LeaseNotFound, OutOfStep
from rapid.messages import DraftBlock, Verdict
from rapid.speculation.fast.step import answer_questions
from rapid.speculation.loop import speculate
from rapid.speculation.questions import Question, ToJudge
from tests.rapid.engines.gate import PROMPT, Gate, opened
from tests.rapid.tiny_models import lease_request, random_prompt, tiny_engine

SHORT = random_prompt(9, seed=5)  # what drafter and witness read
ADAPTIVE: dict[str, Any] = {
    "max_tokens": 24,
    "temperature": 1.0,
    "speculation": SpeculationConfig(transfer="adaptive", eta=8),
}


@pytest.fixture
def engine_settings() -> dict[str, Any]:
    return {"step_tokens": 64, "max_leases": 32, "kv_cache_tokens": 4096, "draft_ahead": False}


async def open_both(engine: Engine, name: str = "a", **settings: object) -> tuple[str, str]:
    """Take the lease of a target and that of its witness; return their ids."""
    target = await opened(engine, f"{name} target", **ADAPTIVE | settings)
    witness = await opened(engine, f"{name} witness", **ADAPTIVE | settings, prompt=SHORT)
    return target, witness


async def draft(engine: Engine, num_tokens: int = 4, name: str = "a") -> DraftBlock:
    drafter = await opened(engine, f"{name} drafter", **ADAPTIVE, prompt=SHORT)
    return await engine.draft(drafter, 0, None, num_tokens)


async def answer(engine: Engine, other: Engine, **settings: object) -> list[Verdict]:
    """Answer with the target on one engine and its witness on the other."""
    await opened(engine, "target", **ADAPTIVE | settings)
    await opened(other, "witness", **ADAPTIVE | settings, prompt=SHORT)
    await opened(engine, "drafter", **ADAPTIVE | settings, prompt=SHORT)
    witness = LocalLease(other, "witness")
    verifier = EngineVerifier(engine, "target", witness=lambda: witness)
    rounds = speculate(EngineDrafter(engine, "drafter"), verifier, max_tokens=24, max_draft=4)
    verdicts = [verdict async for verdict in rounds]
    for lease_id in ("target", "witness", "drafter"):
        engine.release(lease_id)
        other.release(lease_id)
    return verdicts


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("coupling", ["maximal", "shared_noise"])
@pytest.mark.parametrize("seed", [1, 2])
async def test_one_engine_judges_as_two_engines_do(
    coupling: Any, temperature: float, seed: int
) -> None:
    speculation = SpeculationConfig(transfer="adaptive", eta=8, coupling=coupling)
    settings = {"temperature": temperature, "seed": seed, "speculation": speculation}
    # Else a row's last bits depend on how many others are in its forward.
    engine, apart = (tiny_engine(deterministic=True) for _ in range(2))
    together = await answer(engine, engine, **settings)
    expected = await answer(engine, apart, **settings)
    engine.close()
    apart.close()
    assert [verdict.token_ids for verdict in together] == [one.token_ids for one in expected]
    assert [verdict.log_odds for verdict in together] == [one.log_odds for one in expected]
    assert any(verdict.num_drafted > verdict.num_accepted for verdict in together)


async def test_a_witnessed_block_takes_one_call_and_one_step(engine: Engine) -> None:
    target, witness = await open_both(engine)
    block = await draft(engine)
    before = engine.status()
    await engine.verify(target, 0, block, (engine, witness))
    after = engine.status()
    assert (after.steps - before.steps, after.step_calls - before.step_calls) == (1, 1)
    assert after.step_tokens - before.step_tokens == 2 * len(block)
    num_judged = after.tokens_drawn - before.tokens_drawn
    # So short a vocabulary is left to the specification.
    assert 1 <= num_judged == after.tokens_specified - before.tokens_specified <= len(block)


async def test_witnessed_blocks_are_judged_with_the_other_blocks_of_the_step(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged: list[int] = []

    def count(questions: list[Question]) -> Any:
        judged.append(sum(isinstance(question, ToJudge) for question in questions))
        return answer_questions(questions)

    blocks = {name: (await open_both(engine, name), await draft(engine, 4, name)) for name in "abc"}
    monkeypatch.setattr(compute, "answer_questions", count)
    gate = Gate(engine)
    first = asyncio.ensure_future(engine.decode("a drafter", 0, 1))
    await gate.forward_started()  # meanwhile all blocks arrive
    verifying = [
        asyncio.ensure_future(engine.verify(target, 0, block, (engine, witness)))
        for (target, witness), block in blocks.values()
    ]
    await asyncio.sleep(0)
    gate.open()
    await asyncio.gather(first, *verifying)
    assert judged == [0, 3]


async def test_both_readings_catch_up_before_the_block_is_judged(engine: Engine) -> None:
    """Tokens that were committed elsewhere are more than one step has room for."""
    settings = {"max_tokens": 160, "committed": (tuple(random_prompt(100, seed=8).tolist()),)}
    target, witness = "a target", "a witness"
    await engine.open(lease_request(target, PROMPT, **ADAPTIVE | settings))
    await engine.open(lease_request(witness, SHORT, **ADAPTIVE | settings))
    await engine.prefill(target)
    await engine.prefill(witness)
    drafter = await opened(engine, "a drafter", **ADAPTIVE | settings, prompt=SHORT)
    block = await engine.draft(drafter, 0, None, 4)
    for lease_id, num_missing in ((target, 90), (witness, 40)):  # as after a call that was lost
        engine._state.ledger.get(lease_id).sequences[0].num_computed -= num_missing
    gate = Gate(engine)
    gate.open()
    verdict = await engine.verify(target, 0, block, (engine, witness))
    wanted = [[feed.num_wanted for feed in feeds] for feeds in gate.feeds]
    assert wanted == [[0, 0], [0], [4, 4]]  # the witness waits for the target
    again = (await open_both(engine, "b", **settings), block)
    assert (
        verdict.token_ids
        == (await engine.verify(again[0][0], 0, again[1], (engine, again[0][1]))).token_ids
    )


@pytest.mark.parametrize("lost", ["a target", "a witness"])
async def test_a_lease_that_ends_ends_the_call_and_changes_nothing_on_the_other(
    engine: Engine, lost: str
) -> None:
    target, witness = await open_both(engine)
    block = await draft(engine)
    gate = Gate(engine)
    verifying = asyncio.ensure_future(engine.verify(target, 0, block, (engine, witness)))
    await gate.forward_started()
    engine.release(lost)
    gate.open()
    with pytest.raises(LeaseNotFound, match=lost):
        await verifying
    left = witness if lost == target else target
    assert (await engine.decode(left, 0, 1)).position == 0
    with pytest.raises(LeaseNotFound, match=lost):
        await engine.verify(target, 0, block, (engine, witness))


async def test_a_call_on_the_witness_is_refused_while_a_block_is_judged(engine: Engine) -> None:
    target, witness = await open_both(engine)
    block = await draft(engine)
    gate = Gate(engine)
    verifying = asyncio.ensure_future(engine.verify(target, 0, block, (engine, witness)))
    await gate.forward_started()
    with pytest.raises(OutOfStep, match="a witness"):
        await engine.decode(witness, 0, 1)
    verifying.cancel()
    await asyncio.wait([verifying])
    gate.open()
    assert (await engine.decode(witness, 0, 1)).position == 0
    assert (await engine.verify(target, 0, block)).position == 0


@pytest.mark.parametrize("stage", ["take", "use"])
async def test_a_block_that_fails_ends_both_leases(
    engine: Engine, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no memory")

    target, witness = await open_both(engine)
    block = await draft(engine)
    monkeypatch.setattr(f"rapid.engines.work.verifying.Witness.{stage}", fail, raising=False)
    if stage == "use":
        monkeypatch.setattr("rapid.engines.work.verifying.Witness.commit", fail)
    with pytest.raises(EngineFailed):
        await engine.verify(target, 0, block, (engine, witness))
    assert engine.status().leases_open == 1  # the drafter's
    engine.release("a drafter")


async def test_a_block_of_another_text_is_refused_before_either_reading_changes(
    engine: Engine,
) -> None:
    target, witness = await open_both(engine)
    block = await draft(engine)
    await engine.commit(witness, Verdict(witness, 0, 0, (9,), 0, 0, False))
    with pytest.raises(OutOfStep):
        await engine.verify(target, 0, block, (engine, witness))
    assert (await engine.verify(target, 0, block)).position == 0

"""Drafting on while a block is judged: the same tokens, sooner, and never in anybody's way."""

from __future__ import annotations

import asyncio
from functools import partial

import numpy as np
import pytest

from rapid.config import SpeculationConfig
from rapid.engines.engine import Engine
from rapid.engines.kv.sequences import Gap
from rapid.engines.local_ports import EngineDrafter, EngineVerifier
from rapid.errors import LeaseNotFound
from rapid.messages import DraftBlock, Verdict
from rapid.speculation.loop import speculate
from tests.rapid.engines import gate as gates
from tests.rapid.engines.gate import Gate
from tests.rapid.tiny_models import (
    EOS,
    engine_config,
    lease_request,
    loaded,
    random_prompt,
    reference_greedy,
    tiny_engine,
)

PROMPT = random_prompt(37, seed=1)
opened = partial(gates.opened, prompt=PROMPT)
EXPECTED = reference_greedy(PROMPT.tolist(), 16)


@pytest.fixture(autouse=True)
def gap_of_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if every block were judged for as long as it takes to draft one."""
    monkeypatch.setattr(Gap, "num_steps", lambda *_, at_most: at_most)


@pytest.fixture
def engine_settings() -> dict[str, object]:
    return {"draft_ahead": True}


async def rested(engine: Engine) -> None:
    """Let the engine draft ahead as far as it wants to."""
    while is_ahead(engine):  # noqa: ASYNC110
        await asyncio.sleep(0.001)


def is_ahead(engine: Engine) -> bool:
    """Whether it drafts ahead; under the guard, where an answer and what follows it are one."""
    with engine._state.guard:
        return bool(engine._state._ahead)


def accepted(block: DraftBlock) -> Verdict:
    """All of a block is kept."""
    token_ids = tuple(block.token_ids.tolist())
    return Verdict("a", block.choice, block.position, token_ids, len(block), len(block), False)


def rejected(block: DraftBlock, num_accepted: int, token: int) -> Verdict:
    """Some of a block is kept, then a token of the target's own."""
    token_ids = (*block.token_ids.tolist()[:num_accepted], token)
    return Verdict("a", block.choice, block.position, token_ids, len(block), num_accepted, False)


# --- the same tokens ------------------------------------------------------------------------------

RULES = {
    "greedy": (0.0, {"eta": 0.0}),
    "greedy-fused": (0.0, {"eta": 10.0}),
    "shared_noise": (1.0, {"eta": 0.0, "coupling": "shared_noise"}),
    "shared_noise-fused": (1.0, {"eta": 10.0, "coupling": "shared_noise"}),
    "maximal": (1.0, {"eta": 0.0, "coupling": "maximal"}),
    "maximal-fused": (1.0, {"eta": 10.0, "coupling": "maximal"}),
    "paper": (1.0, {"eta": 5.0, "rule": "paper"}),
}


async def answers(
    *, draft_ahead: bool, eos: int, temperature: float, speculation: SpeculationConfig
) -> tuple[list[list[int]], list[DraftBlock], int, int]:
    """Two requests of two choices each, at once: answers, blocks, hits and misses.

    The first request's drafter reads all that its target does, the second's only a part.
    """
    target = tiny_engine(eos=eos)
    drafter = tiny_engine(eos=eos, draft_ahead=draft_ahead)
    blocks: dict[str, list[DraftBlock]] = {}

    class Verifier(EngineVerifier):
        """Judges when the drafter has gone as far ahead as it will."""

        async def verify(self, block: asyncio.Task[DraftBlock]) -> Verdict:
            drafted = await block
            blocks[f"{drafted.lease_id}/{drafted.choice}"].append(drafted)
            await rested(drafter)
            return await super().verify(drafted)

    async def ask(number: int, choice: int) -> list[int]:
        lease_id = str(number)
        blocks[f"{lease_id}/{choice}"] = []
        rounds = speculate(
            EngineDrafter(drafter, lease_id, choice),
            Verifier(target, lease_id, choice),
            max_tokens=11,
            max_draft=3,
        )
        return [token async for verdict in rounds for token in verdict.token_ids]

    for number, short in enumerate((PROMPT, PROMPT[-9:])):
        settings = {
            "temperature": temperature,
            "speculation": speculation,
            "max_tokens": 11,
            "num_choices": 2,
            "seed": number,
        }
        for engine, prompt in ((target, PROMPT), (drafter, short)):
            await opened(engine, str(number), prompt=prompt, **settings)
    got = await asyncio.gather(*(ask(number, choice) for number in range(2) for choice in range(2)))
    status = drafter.status()
    for engine in (target, drafter):
        engine.close()
        engine.check_integrity()
    ordered = [block for key in sorted(blocks) for block in blocks[key]]
    return got, ordered, status.ahead_hits, status.ahead_misses


def check_same_candidates(one: DraftBlock, other: DraftBlock) -> None:
    """Raise unless both propose the same tokens in the same order, but for ties.

    Which rows share a forward moves float32 logits by up to 3e-5. So of two tokens whose
    probabilities differ by less than 1e-4 of themselves either may come first, and where the
    proposal is cut either may be the last that stays.
    """
    assert one.candidate_ids.shape == other.candidate_ids.shape
    for ids, other_ids, probs in zip(
        one.candidate_ids.tolist(), other.candidate_ids.tolist(), other.candidate_probs, strict=True
    ):
        known = dict(zip(other_ids, probs, strict=True))
        at_the_cut = probs[probs > 0].min()
        in_this_order = [known.get(token_id, at_the_cut) for token_id in ids]
        np.testing.assert_allclose(in_this_order, probs, rtol=1e-4)


def test_candidates_in_another_order_are_seen_unless_they_are_tied() -> None:
    def block(ids: list[int], probs: list[float]) -> DraftBlock:
        row = np.array([ids], np.int32), np.array([probs], np.float32)
        return DraftBlock("a", 0, 0, np.array([4], np.int32), *row)

    plain = block([4, 5, 6, -1], [0.5, 0.3, 0.2, 0.0])
    check_same_candidates(plain, plain)
    check_same_candidates(block([4, 5, 7, -1], [0.5, 0.3, 0.2, 0.0]), plain)  # tied at the cut
    tied = block([4, 5, 6, -1], [0.4, 0.300001, 0.3, 0.0])
    check_same_candidates(block([4, 6, 5, -1], [0.4, 0.300001, 0.3, 0.0]), tied)
    for ids in ([5, 4, 6, -1], [4, 6, 5, -1], [4, 7, 6, -1], [4, 5, -1, -1], [4, 5, 6, 7]):
        with pytest.raises(AssertionError):
            check_same_candidates(block(ids, [0.5, 0.3, 0.2, 0.0]), plain)


@pytest.mark.parametrize("rule", RULES)
async def test_it_changes_no_token_and_no_proposal(
    rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the depth: none, less than a block, a block; also at the end of the answer."""
    rng = np.random.default_rng(0)
    monkeypatch.setattr(Gap, "num_steps", lambda *_, at_most: int(rng.integers(0, at_most + 1)))
    temperature, settings = RULES[rule]
    speculation = SpeculationConfig(max_draft=3, **settings)
    num_hits = num_misses = 0
    for eos in (EOS, EXPECTED[5]):
        ask = {"eos": eos, "temperature": temperature, "speculation": speculation}
        plain, plain_blocks, *none = await answers(draft_ahead=False, **ask)
        ahead, ahead_blocks, hits, misses = await answers(draft_ahead=True, **ask)
        assert none == [0, 0]
        assert ahead == plain
        for one, other in zip(ahead_blocks, plain_blocks, strict=True):
            assert (one.choice, one.position) == (other.choice, other.position)
            assert one.token_ids.tolist() == other.token_ids.tolist()
            check_same_candidates(one, other)
            np.testing.assert_allclose(one.candidate_probs, other.candidate_probs, atol=1e-5)
        num_hits += hits
        num_misses += misses
    assert num_hits > 0
    assert num_misses > 0


async def test_a_hit_is_answered_without_a_forward(engine: Engine) -> None:
    await opened(engine)
    first = await engine.draft("a", 0, None, 4)
    await rested(engine)
    gate = Gate(engine)  # no forward gets through
    second = await asyncio.wait_for(engine.draft("a", 0, accepted(first), 4), 10)
    assert second.position == 4
    assert [*first.token_ids, *second.token_ids] == EXPECTED[:8]
    assert engine.status().ahead_hits == 1
    gate.open()
    await rested(engine)
    assert [len(feed.token_ids) for feeds in gate.feeds for feed in feeds] == [1] * 4


async def test_what_was_prepared_is_handed_out_in_whatever_portions(engine: Engine) -> None:
    await opened(engine)
    block, got = await engine.draft("a", 0, None, 5), list[int]()
    for num_tokens in (2, 1, 4, 3):
        await rested(engine)
        got += block.token_ids.tolist()
        block = await engine.draft("a", 0, accepted(block), num_tokens)
        assert len(block) == num_tokens
    assert [*got, *block.token_ids] == EXPECTED[:15]


async def test_a_miss_rolls_back(engine: Engine) -> None:
    await opened(engine)
    first = await engine.draft("a", 0, None, 4)
    await rested(engine)
    wrong = 5 if EXPECTED[3] != 5 else 6  # the last one: all but what was drafted ahead is right
    second = await engine.draft("a", 0, rejected(first, 3, wrong), 4)
    prefix = [*PROMPT.tolist(), *EXPECTED[:3], wrong]
    assert second.token_ids.tolist() == reference_greedy(prefix, 4)
    assert engine.status().ahead_misses == 1


async def test_a_bonus_token_that_was_drafted_ahead_is_a_hit(engine: Engine) -> None:
    await opened(engine)
    first = await engine.draft("a", 0, None, 3)
    await rested(engine)
    verdict = Verdict("a", 0, 0, tuple(EXPECTED[:4]), 3, 3, False)
    assert (await engine.draft("a", 0, verdict, 3)).token_ids.tolist() == EXPECTED[4:7]
    assert engine.status().ahead_hits == 1
    assert first.token_ids.tolist() == EXPECTED[:3]


@pytest.mark.parametrize("call", ["verify", "score", "decode", "commit", "draft", "prefill"])
async def test_any_other_call_finds_the_sequence_as_if_nothing_had_been_prepared(
    engine: Engine, call: str
) -> None:
    await opened(engine)
    block = await engine.draft("a", 0, None, 4)
    await rested(engine)
    after = 4
    if call == "verify":
        assert (await engine.verify("a", 0, block)).token_ids == tuple(EXPECTED[:4])
    elif call == "score":
        await engine.score("a", 0, block)
        await engine.commit("a", accepted(block))
    elif call == "decode":
        assert (await engine.decode("a", 0, 4)).token_ids == tuple(EXPECTED[:4])
    elif call == "commit":
        await engine.commit("a", accepted(block))
    elif call == "draft":  # the block is forgotten
        again = await engine.draft("a", 0, None, 5)
        assert (again.position, again.token_ids.tolist()) == (0, EXPECTED[:5])
        after = 0
    else:
        await engine.prefill("a")
        after = 0
    assert (await engine.decode("a", 0, 6)).token_ids == tuple(EXPECTED[after : after + 6])


# --- where it ends --------------------------------------------------------------------------------


async def test_it_ends_with_the_answer(engine: Engine) -> None:
    await opened(engine, max_tokens=6)
    gate = Gate(engine)
    gate.open()
    await engine.draft("a", 0, None, 4)
    await rested(engine)
    assert len(gate.feeds) == 6


@pytest.mark.parametrize(("eos_at", "num_forwards"), [(2, 3), (5, 6)])
async def test_it_ends_at_an_end_of_sequence_token(eos_at: int, num_forwards: int) -> None:
    """In the block, so that nothing is drafted behind it; or drafted ahead."""
    eos = EXPECTED[eos_at]
    assert eos not in EXPECTED[:eos_at]
    engine = tiny_engine(eos=eos, draft_ahead=True)
    await opened(engine)
    gate = Gate(engine)
    gate.open()
    block = await engine.draft("a", 0, None, 4)
    await rested(engine)
    assert len(gate.feeds) == num_forwards
    if eos_at >= 4:
        second = await engine.draft("a", 0, accepted(block), 4)
        assert second.token_ids.tolist() == EXPECTED[4 : eos_at + 1]
    engine.close()


async def test_an_engine_that_drafts_for_itself_does_not(engine: Engine) -> None:
    await opened(engine, companion_tokens=9)
    await opened(engine, "b", prompt=PROMPT[-9:], beside="a")
    await engine.draft("b", 0, None, 4)
    assert not is_ahead(engine)


async def test_it_is_a_setting() -> None:
    engine = tiny_engine(draft_ahead=False)
    await opened(engine)
    await engine.draft("a", 0, None, 4)
    assert not is_ahead(engine)
    engine.close()


# --- in nobody's way ------------------------------------------------------------------------------


async def test_leases_are_drafted_ahead_in_one_batch(engine: Engine) -> None:
    for lease_id in "abc":
        await opened(engine, lease_id)
    gate = Gate(engine)
    drafts = [asyncio.ensure_future(engine.draft(lease_id, 0, None, 4)) for lease_id in "abc"]
    await gate.forward_started()
    await asyncio.sleep(0)
    gate.open()
    await asyncio.gather(*drafts)
    await rested(engine)
    assert max(map(len, gate.feeds)) == 3
    assert len(gate.feeds) <= 2 * 4 + 1  # not one after the other


async def test_a_call_that_comes_during_a_forward_ahead_takes_what_is_there(
    engine: Engine,
) -> None:
    await opened(engine)
    gate = Gate(engine)
    drafting = asyncio.ensure_future(engine.draft("a", 0, None, 2))
    for _ in range(3):  # two of the block, one ahead
        gate.let_one_through()
        await gate.forward_started()
    block = await drafting
    await gate.forward_started()  # the second ahead is running
    drafting = asyncio.ensure_future(engine.draft("a", 0, accepted(block), 4))
    await asyncio.sleep(0)
    gate.open()
    assert (await drafting).token_ids.tolist() == EXPECTED[2:6]


async def test_it_does_not_keep_a_lease_alive() -> None:
    now = [0.0]
    config = engine_config(draft_ahead=True, lease_ttl_s=60.0)
    engine = Engine(loaded(), config, clock=lambda: now[0])
    await opened(engine)
    gate = Gate(engine)
    drafting = asyncio.ensure_future(engine.draft("a", 0, None, 1))
    await gate.forward_started()
    gate.let_one_through()
    await drafting
    await gate.forward_started()  # one ahead
    now[0] = 61.0
    assert engine.status().leases_open == 0
    assert engine.status().kv_pages_in_use == 0
    gate.open()
    with pytest.raises(LeaseNotFound):
        await engine.draft("a", 0, None, 1)
    assert not is_ahead(engine)
    engine.close()


async def test_release_during_a_forward_ahead_frees_the_pages_at_once(engine: Engine) -> None:
    await opened(engine)
    gate = Gate(engine)
    drafting = asyncio.ensure_future(engine.draft("a", 0, None, 1))
    await gate.forward_started()
    gate.let_one_through()
    await drafting
    await gate.forward_started()
    engine.release("a")
    assert engine.status().kv_pages_in_use == 0
    await engine.open(lease_request("b", PROMPT))  # gets the very same pages
    gate.open()
    await engine.prefill("b")
    assert (await engine.decode("b", 0, 6)).token_ids == tuple(EXPECTED[:6])


async def test_a_forward_ahead_that_raises_ends_its_lease_and_nothing_else(engine: Engine) -> None:
    await opened(engine, "b")
    await opened(engine)
    gate = Gate(engine)
    drafting = asyncio.ensure_future(engine.draft("a", 0, None, 1))
    await gate.forward_started()
    gate.let_one_through()
    await drafting
    await gate.forward_started()
    ended = asyncio.ensure_future(engine.wait_closed("a"))
    await asyncio.sleep(0)

    def explode() -> None:
        gate.before = lambda: None
        raise RuntimeError("no memory")

    gate.before = explode
    gate.open()
    assert await ended == "failed"
    assert not is_ahead(engine)
    assert (await engine.decode("b", 0, 6)).token_ids == tuple(EXPECTED[:6])

"""What happens to leases when callers leave, forwards raise and room is short."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rapid.config import SpeculationConfig
from rapid.engines.engine import Engine
from rapid.engines.execution.replies import Reply
from rapid.engines.kv.page_names import page_names
from rapid.engines.kv.sequences import Gap
from rapid.engines.work.base import Commit
from rapid.engines.work.drafting import Draft
from rapid.engines.work.verifying import Scored, Weigh
from rapid.errors import BadRequest, EngineFailed, LeaseNotFound, OutOfStep, PromptTooLong
from rapid.messages import DraftBlock, Verdict, as_prompt
from tests.rapid.engines.gate import EXPECTED, PROMPT, Gate, opened
from tests.rapid.tiny_models import (
    VOCAB,
    engine_config,
    lease_request,
    loaded,
    random_prompt,
    reference_greedy,
    tiny_engine,
)


@pytest.fixture
def engine_settings() -> dict[str, object]:
    return {"step_tokens": 16}


async def test_release_during_prefill_frees_the_pages_at_once(engine: Engine) -> None:
    gate = Gate(engine)
    await engine.open(lease_request("a", PROMPT))
    prefill = asyncio.ensure_future(engine.prefill("a"))
    await gate.forward_started()
    engine.release("a")  # a forward over its pages is running
    engine.release("a")
    assert engine.status().kv_pages_in_use == 0
    with pytest.raises(LeaseNotFound):
        await prefill
    await engine.open(lease_request("b", PROMPT))  # gets the very same pages
    gate.open()
    await engine.prefill("b")
    assert (await engine.decode("b", 0, 6)).token_ids == tuple(EXPECTED)


async def test_a_cancelled_call_leaves_the_sequence_as_it_was(engine: Engine) -> None:
    await opened(engine)
    gate = Gate(engine)
    decode = asyncio.ensure_future(engine.decode("a", 0, 5))
    await gate.forward_started()
    gate.let_one_through()
    await gate.forward_started()
    decode.cancel()
    with pytest.raises(asyncio.CancelledError):
        await decode
    gate.open()
    verdict = await engine.decode("a", 0, 6)
    assert (verdict.position, verdict.token_ids) == (0, tuple(EXPECTED))


async def test_a_cancelled_prefill_goes_on_where_it_was(engine: Engine) -> None:
    gate = Gate(engine)
    await engine.open(lease_request("a", PROMPT))
    prefill = asyncio.ensure_future(engine.prefill("a"))
    await gate.forward_started()
    gate.let_one_through()
    await gate.forward_started()
    prefill.cancel()
    with pytest.raises(asyncio.CancelledError):
        await prefill
    gate.open()
    await engine.prefill("a")
    assert (await engine.decode("a", 0, 6)).token_ids == tuple(EXPECTED)


async def test_one_call_at_a_time_on_a_choice(engine: Engine) -> None:
    await opened(engine, num_choices=2)
    gate = Gate(engine)
    first = asyncio.ensure_future(engine.decode("a", 0, 2))
    await gate.forward_started()
    with pytest.raises(OutOfStep, match="another call in progress"):
        await engine.decode("a", 0, 2)
    second = asyncio.ensure_future(engine.decode("a", 1, 2))  # another choice is free
    await asyncio.sleep(0)
    gate.open()
    assert (await first).token_ids == (await second).token_ids == tuple(EXPECTED[:2])


async def test_a_long_prompt_is_hashed_before_the_engine_is_locked(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []

    def names(*arguments: Any, **flags: Any) -> list[bytes]:
        seen.append(engine._state.guard._is_owned())  # type: ignore[attr-defined]
        return page_names(*arguments, **flags)

    monkeypatch.setattr("rapid.engines.kv.leases.lease_ledger.page_names", names)
    await engine.open(lease_request("a", PROMPT))
    assert seen == [False]


class Prompt(np.ndarray):
    """Token ids that remember which threads made a list of them."""

    listed: list[int]

    def tolist(self) -> Any:
        self.listed.append(threading.get_ident())
        return super().tolist()


async def test_the_event_loop_neither_names_nor_lists_a_long_prompt(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    named: list[int] = []

    def names(*arguments: Any, **flags: Any) -> list[bytes]:
        named.append(threading.get_ident())
        return page_names(*arguments, **flags)

    monkeypatch.setattr("rapid.engines.kv.leases.lease_ledger.page_names", names)
    monkeypatch.setattr("rapid.engines.engine._NAMED_AT_ONCE", len(PROMPT) - 1)
    prompt = as_prompt(PROMPT).view(Prompt)
    prompt.listed = []
    await engine.open(replace(lease_request("a", PROMPT), prompt_ids=prompt))
    assert not prompt.listed
    await engine.prefill("a")
    assert (await engine.decode("a", 0, 6)).token_ids == tuple(EXPECTED)
    assert threading.get_ident() not in (*named, *prompt.listed)
    assert (len(named), len(prompt.listed)) == (1, 1)


async def test_giving_up_while_a_long_prompt_is_named_opens_nothing(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, may_end = threading.Event(), threading.Event()

    def names(*arguments: Any, **flags: Any) -> list[bytes]:
        began.set()
        may_end.wait(timeout=10)
        return page_names(*arguments, **flags)

    monkeypatch.setattr("rapid.engines.kv.leases.lease_ledger.page_names", names)
    monkeypatch.setattr("rapid.engines.engine._NAMED_AT_ONCE", 0)
    opening = asyncio.ensure_future(engine.open(lease_request("a", PROMPT)))
    await asyncio.to_thread(began.wait)
    opening.cancel()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert (engine.status().leases_open, engine.status().leases_waiting) == (0, 0)


async def test_when_the_pool_is_full_opening_waits_its_turn() -> None:
    engine = tiny_engine(kv_cache_tokens=256, max_leases=8)
    finished: list[str] = []

    async def ask(lease_id: str) -> None:
        await opened(engine, lease_id)  # 82 tokens: three fit
        assert (await engine.decode(lease_id, 0, 6)).token_ids == tuple(EXPECTED)
        finished.append(lease_id)
        engine.release(lease_id)

    await asyncio.gather(*(ask(str(number)) for number in range(10)))
    assert len(finished) == 10
    assert engine.status().kv_pages_in_use == 0
    engine.check_integrity()
    engine.close()


async def test_giving_up_the_wait_leaves_the_line() -> None:
    engine = tiny_engine(max_leases=1)
    await opened(engine, "a")
    waiting = asyncio.ensure_future(engine.open(lease_request("b", PROMPT)))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    engine.release("a")
    assert engine.status().leases_open == 0
    engine.close()


async def test_giving_up_just_after_the_lease_was_granted_gives_it_back() -> None:
    engine = tiny_engine()
    opening = asyncio.ensure_future(engine.open(lease_request("a", PROMPT)))
    await asyncio.sleep(0)  # submitted and granted; the answer is on its way
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert engine.status().leases_open == 0
    engine.close()


async def test_a_silent_lease_expires_and_says_so() -> None:
    now = [0.0]
    engine = Engine(loaded(), engine_config(lease_ttl_s=60.0), clock=lambda: now[0])
    await opened(engine, "a")
    await opened(engine, "b")
    ended = asyncio.ensure_future(engine.wait_closed("a"))
    await asyncio.sleep(0)
    now[0] = 50.0
    engine.renew("b")
    now[0] = 70.0
    assert engine.status().leases_open == 1
    assert await ended == "expired"
    with pytest.raises(LeaseNotFound):
        engine.renew("a")
    with pytest.raises(LeaseNotFound):
        await engine.wait_closed("a")
    engine.release("b")
    assert engine.status().kv_pages_in_use == 0
    engine.close()


async def test_a_long_prompt_does_not_stall_the_others(engine: Engine) -> None:
    await opened(engine, "old")
    gate = Gate(engine)
    await engine.open(lease_request("long", random_prompt(200)))
    await engine.open(lease_request("short", random_prompt(12)))
    long = asyncio.ensure_future(engine.prefill("long"))
    await gate.forward_started()
    short = asyncio.ensure_future(engine.prefill("short"))
    decode = asyncio.ensure_future(engine.decode("old", 0, 6))
    await asyncio.sleep(0)
    gate.open()
    assert (await decode).token_ids == tuple(EXPECTED)
    await short
    assert not long.done()
    await long
    assert max(sum(len(feed.token_ids) for feed in feeds) for feeds in gate.feeds) <= 16 + 16


async def test_ids_beyond_the_vocabulary_never_reach_the_model(engine: Engine) -> None:
    with pytest.raises(BadRequest, match="token id"):
        await engine.open(lease_request("a", as_prompt([5, 99999])))
    with pytest.raises(BadRequest, match="token id"):
        await engine.open(lease_request("a", as_prompt([-1])))


async def test_what_never_fits_is_refused_at_once(engine: Engine) -> None:
    with pytest.raises(PromptTooLong, match="of 256"):
        await engine.open(lease_request("a", random_prompt(250)))


async def test_closing_answers_everyone() -> None:
    engine = tiny_engine(max_leases=1)
    await opened(engine, "a")
    gate = Gate(engine)
    decode = asyncio.ensure_future(engine.decode("a", 0, 2))
    waiting = asyncio.ensure_future(engine.open(lease_request("b", PROMPT)))
    ended = asyncio.ensure_future(engine.wait_closed("a"))
    await gate.forward_started()
    closing = asyncio.ensure_future(asyncio.to_thread(engine.close))
    for call in (decode, waiting):  # at once, though a forward is running
        with pytest.raises(EngineFailed, match="closed"):
            await call
    gate.open()
    await closing
    assert await ended == "closed"
    with pytest.raises(EngineFailed, match="closed"):
        await engine.open(lease_request("c", PROMPT))
    engine.close()


async def test_a_call_that_was_cancelled_in_its_last_forward_commits_nothing(
    engine: Engine,
) -> None:
    await opened(engine)
    gate = Gate(engine)
    decode = asyncio.ensure_future(engine.decode("a", 0, 1))
    await gate.forward_started()
    decode.cancel()
    with pytest.raises(asyncio.CancelledError):
        await decode
    gate.open()
    verdict = await engine.decode("a", 0, 6)
    assert (verdict.position, verdict.token_ids) == (0, tuple(EXPECTED))


async def test_a_call_that_was_cancelled_before_it_began_changes_nothing(engine: Engine) -> None:
    await opened(engine, num_choices=2)
    gate = Gate(engine)
    first = asyncio.ensure_future(engine.decode("a", 0, 1))
    await gate.forward_started()
    commit = asyncio.ensure_future(engine.commit("a", Verdict("a", 1, 0, (5,), 1, 1, False)))
    await asyncio.sleep(0)
    commit.cancel()
    with pytest.raises(asyncio.CancelledError):
        await commit
    gate.open()
    await first
    verdict = await engine.decode("a", 1, 6)
    assert (verdict.position, verdict.token_ids) == (0, tuple(EXPECTED))


async def test_the_last_token_id_is_taken_and_the_next_one_refused(engine: Engine) -> None:
    """A prompt may hold whatever the model embeds, a block what both vocabularies have."""
    num_rows, num_ids = loaded().embedding_rows, loaded().vocab_size
    assert num_ids < num_rows
    await opened(engine, "a", prompt=as_prompt([5, num_rows - 1, 0]))
    with pytest.raises(BadRequest, match="token id"):
        await engine.open(lease_request("b", as_prompt([5, num_rows, 0])))
    with pytest.raises(BadRequest, match="token id"):
        await engine.open(lease_request("b", as_prompt([5]), committed=((num_rows,),)))

    def block(token_id: int) -> DraftBlock:
        ids = np.array([token_id], dtype=np.int32)
        return DraftBlock("a", 0, 0, ids, np.zeros((1, 1), np.int32), np.ones((1, 1), np.float32))

    for refused in (-1, num_ids, num_rows):
        with pytest.raises(BadRequest, match="token id"):
            await engine.verify("a", 0, block(refused))
    assert len((await engine.verify("a", 0, block(num_ids - 1))).token_ids) == 1


async def test_messages_for_another_choice_are_out_of_step(engine: Engine) -> None:
    await opened(engine, num_choices=2)
    ids = np.array(EXPECTED[:2], dtype=np.int32)
    block = DraftBlock("a", 1, 0, ids, ids[:, None], np.ones((2, 1), np.float32))
    with pytest.raises(OutOfStep, match="of choice 1"):
        await engine.verify("a", 0, block)
    with pytest.raises(OutOfStep, match="of choice 1"):
        await engine.draft("a", 0, Verdict("a", 1, 0, (5,), 1, 1, False), 2)
    assert (await engine.decode("a", 0, 6)).token_ids == tuple(EXPECTED)


async def test_a_block_longer_than_the_room_of_its_lease_is_refused(engine: Engine) -> None:
    """20 tokens of prompt, 3 of answer and 2 more for the last block; one row needs no slot."""
    speculation = SpeculationConfig(eta=0.0, max_draft=2)
    await opened(engine, prompt=random_prompt(20), max_tokens=3, speculation=speculation)
    for length in (7, 6):
        ids = np.full(length, 5, dtype=np.int32)
        block = DraftBlock("a", 0, 0, ids, ids[:, None], np.ones((length, 1), np.float32))
        if length == 7:
            with pytest.raises(OutOfStep, match="does not fit"):
                await engine.verify("a", 0, block)
        else:
            assert (await engine.verify("a", 0, block)).num_drafted == length


async def test_drafting_ahead_stops_with_its_lease(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pages may be another's already: not a row more may be written there."""
    monkeypatch.setattr(Gap, "num_steps", lambda *_, at_most: at_most)
    await opened(engine)
    gate = Gate(engine)
    draft = asyncio.ensure_future(engine.draft("a", 0, None, 3))
    for _ in range(3):
        await gate.forward_started()
        gate.let_one_through()
    await draft
    await gate.forward_started()  # ahead
    engine.release("a")
    gate.open()
    other = random_prompt(60, seed=9)
    await opened(engine, "b", prompt=other)
    token_ids = (await engine.decode("b", 0, 6)).token_ids
    assert list(token_ids) == reference_greedy(other.tolist(), 6)
    num_rows = sum(len(feed.token_ids) for feeds in gate.feeds[4:] for feed in feeds)
    assert num_rows == len(other) - 1 + len(token_ids)


async def test_a_call_that_was_given_up_does_not_arrive(engine: Engine) -> None:
    await opened(engine)
    state = engine._state
    with state.guard:  # the compute thread waits
        work = state.submit(
            ["a"], lambda lease: Commit(lease, Verdict("a", 0, 0, (1,), 0, 0, False)), Reply()
        )
        state.forget(work)
        assert work not in state.arrivals()


async def test_a_draft_without_a_verdict_keeps_nothing_of_another_block(engine: Engine) -> None:
    await opened(engine)
    lease = engine._state.ledger.get("a")
    lease.sequences[0].draft_ids = [1, 2]  # of a call that was given up
    Draft(lease, 0, None, 3, set()).begin()
    assert lease.sequences[0].draft_ids == []


async def test_what_is_weighed_is_kept_from_the_next_forward(engine: Engine) -> None:
    await opened(engine)
    block = await engine.draft("a", 0, None, 1)
    buffer = torch.ones(2, VOCAB)  # as a captured forward has for all its steps
    work = Weigh(engine._state.ledger.get("a"), 0, block, VOCAB)
    work.begin()
    work.take(buffer)
    buffer.zero_()
    assert isinstance(work.result, Scored)
    assert (work.result.logits == 1).all()

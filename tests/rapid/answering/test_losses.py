"""What a request keeps, gives back and asks for again when it has lost an engine."""

from __future__ import annotations

import asyncio
from typing import Any

from rapid.answering.answers import GrowingAnswer
from rapid.answering.run import Run
from rapid.checkpoints.text import ChatText
from rapid.errors import EngineFailed
from rapid.messages import LeaseRequest, PrefillReceipt, ReadSoFar
from tests.answered import ATLAS, receipt, script, tokens
from tests.fakes import FakeEngine
from tests.local_pools import LocalApplication
from tests.ray_cluster import question


class FailsOnce(FakeEngine):
    """Its third draft fails."""

    num_drafts = 0

    async def draft(self, *args: Any) -> Any:
        self.num_drafts += 1
        if self.num_drafts == 3:
            raise EngineFailed("out of memory")
        return await super().draft(*args)


async def test_a_lost_drafter_stays_lost_when_the_target_is_lost_as_well() -> None:
    app = LocalApplication()
    app.drafter.load = lambda: FailsOnce(app.config.drafter_pool.engine)
    app.drafter.start()
    asked = question("r", mode="fused", documents=ATLAS, seed=5, max_tokens=80, explain=True)
    events = await app.answered(asked, target_dies_after=5)
    end = receipt(events)
    assert end.failovers == ("drafter lost", "target lost")
    assert end.explanation is not None
    (lost_at,) = end.plain_from
    assert lost_at == 20
    assert set(end.explanation.origins[0][lost_at:]) == {"target"}
    assert app.drafter.engine.actor._engine.num_drafts == 3
    assert tokens(events) == script(5, 80)


class KeepsWhatFailed(FakeEngine):
    """It fails once, and the lease that it fails on stays open until its holder lets it go."""

    has_failed = has_told = False

    async def decode(self, *args: Any) -> Any:
        if not self.has_failed:
            self.has_failed = True
            raise EngineFailed("out of memory")
        return await super().decode(*args)


async def test_what_was_lost_is_given_back_before_a_new_lease_is_taken() -> None:
    """There is room for one lease."""
    app = LocalApplication(
        load=KeepsWhatFailed, engine={"max_leases": 1}, speculation={"transfer": "boost"}
    )
    async with asyncio.timeout(10):
        events = await app.answered(question("r", mode="plain", seed=5, max_tokens=12))
    assert receipt(events).failovers == ("target lost",)


class FailsBeside(FakeEngine):
    """It fails once to open a second lease, and then to say how it is."""

    failures = 0

    async def open(self, request: LeaseRequest) -> None:
        if request.beside is not None and self.failures == 0:
            self.failures = 1
            raise EngineFailed("out of memory")
        await super().open(request)

    def read_so_far(self, lease_id: str) -> ReadSoFar:
        if self.failures == 1:
            self.failures = 2
            raise EngineFailed("out of memory")
        return super().read_so_far(lease_id)


async def test_so_it_is_where_the_drafters_lease_was_not_taken_yet() -> None:
    """There is room for the two leases of one request."""
    app = LocalApplication(
        drafter="target", load=FailsBeside, engine={"max_leases": 2}, drafter_wait_s=0.1
    )
    events = await app.answered(question("r", mode="fused", documents=ATLAS, seed=5))
    assert receipt(events).failovers == ("target lost",)
    assert receipt(events).plain_from == (None,)


async def test_only_a_requests_first_leases_may_be_refused_for_want_of_room() -> None:
    """Others say what is committed, be it nothing; a pool tells them apart by that."""
    run = object.__new__(Run)  # what it knows of its request plays no part
    run.is_started, run.failovers = False, []
    run.answers = [GrowingAnswer(0, ChatText.load("embedded:target"), (), 10)]
    assert run.committed == []
    run.failovers.append("target lost")
    assert run.committed == [[]]


class MustRead(FakeEngine):
    """Whoever drafts before it has read is out of step."""

    has_read = False

    async def prefill(self, lease_id: str) -> PrefillReceipt:
        for _ in range(20):
            await asyncio.sleep(0)
        self.has_read = True
        return await super().prefill(lease_id)

    async def draft(self, *args: Any) -> Any:
        assert self.has_read
        return await super().draft(*args)


async def test_a_seeded_text_that_depends_on_the_blocks_waits_for_its_drafter() -> None:
    app = LocalApplication(draft_length="measured")
    app.drafter.load = lambda: MustRead(app.config.drafter_pool.engine)
    app.drafter.start()
    asked = question(
        "r", mode="lossless", seed=5, max_tokens=40, explain=True, rapid={"coupling": "maximal"}
    )
    end = receipt(await app.answered(asked))
    assert (end.failovers, end.plain_from) == ((), (None,))
    assert end.explanation is not None
    assert "target" not in end.explanation.origins[0]

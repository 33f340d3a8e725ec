"""A prompt is read once: what is shared, who waits, what gives way, and what comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from threading import Event

import numpy as np
import pytest
import torch

from rapid.config import SpeculationConfig
from rapid.engines.attention import ragged as attention
from rapid.engines.attention import shared_prefixes
from rapid.engines.attention.batch import Feed
from rapid.engines.attention.kernel_inputs import AttentionInputs
from rapid.engines.attention.shared_prefixes import SharedPrefix
from rapid.engines.engine import Engine
from rapid.engines.execution.scheduling import Scheduled
from rapid.engines.kv.cache import KVCache, KVLayout, PagePool, PageRun, pages_of
from rapid.engines.kv.page_names import page_names
from rapid.engines.kv.prefix_cache import PrefixCache
from rapid.engines.kv.tiers.host_tier import HostTier, Move
from rapid.engines.local_ports import EngineDrafter, EngineVerifier
from rapid.errors import EngineFailed
from rapid.messages import Int32Array, as_prompt
from rapid.speculation.loop import speculate
from tests.rapid.tiny_models import lease_request, random_prompt, reference_greedy, tiny_engine

DOCUMENT = random_prompt(64, seed=5)  # eight pages


def question(number: int, document: Int32Array = DOCUMENT) -> Int32Array:
    return as_prompt([*document, *random_prompt(5, seed=100 + number)])


class Rows:
    """Counts the rows that an engine computes, while it goes on computing them."""

    def __init__(self, engine: Engine) -> None:
        self._run = engine._compute.runner.run
        self.number = 0
        engine._compute.runner.run = self  # type: ignore[assignment]

    def __call__(self, feeds: Sequence[Feed]) -> list[torch.Tensor]:
        self.number += sum(len(feed.token_ids) for feed in feeds)
        return self._run(feeds)


async def ask(
    engine: Engine, lease_id: str, prompt: Int32Array, tenant: str = "local"
) -> tuple[list[int], int]:
    """The answer, and how many tokens of the prompt were found in place."""
    await engine.open(lease_request(lease_id, prompt, max_tokens=4, tenant=tenant))
    receipt = await engine.prefill(lease_id)
    verdict = await engine.decode(lease_id, 0, 4)
    engine.release(lease_id)
    engine.check_integrity()
    return list(verdict.token_ids), receipt.num_cached_tokens


async def test_the_second_question_on_a_document_computes_only_what_is_new() -> None:
    engine = tiny_engine()
    rows = Rows(engine)
    assert (await ask(engine, "a", question(1)))[1] == 0
    first, rows.number = rows.number, 0
    answer, num_cached = await ask(engine, "b", question(2))
    assert answer == reference_greedy(question(2).tolist(), 4)
    assert num_cached == len(DOCUMENT)
    assert rows.number == first - len(DOCUMENT)
    assert engine.status().kv_pages_in_use == 0
    engine.close()


async def test_the_same_prompt_again_computes_its_last_page() -> None:
    """The last token is always computed: its row gives the first logits."""
    engine = tiny_engine()
    answers = [await ask(engine, name, DOCUMENT) for name in "ab"]
    assert answers == [(reference_greedy(DOCUMENT.tolist(), 4), cached) for cached in (0, 56)]
    engine.close()


async def test_of_several_questions_at_once_one_reads_the_document() -> None:
    engine = tiny_engine(step_tokens=16)
    rows = Rows(engine)
    asked = await asyncio.gather(*(ask(engine, str(n), question(n)) for n in range(4)))
    assert [cached for _, cached in asked] == [0, 64, 64, 64]
    for number, (answer, _) in enumerate(asked):
        assert answer == reference_greedy(question(number).tolist(), 4)
    assert rows.number == 64 + sum(4 + len(answer) for answer, _ in asked)
    engine.close()


@pytest.mark.parametrize("max_draft", [None, 1, 4])
async def test_questions_answered_at_once_read_the_document_together(
    max_draft: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each gets the answer that it gets alone, drafted or not."""
    monkeypatch.setattr(shared_prefixes, "MIN_SHARED_KEYS", 32)
    read: list[int] = []
    together = attention._attend_together

    def counted(inputs: AttentionInputs, prefix: SharedPrefix) -> object:
        read.append(len(prefix.rests))
        return together(inputs, prefix)

    monkeypatch.setattr(attention, "_attend_together", counted)
    target, drafter = tiny_engine(), tiny_engine(seed=1)

    async def ask_in_rounds(number: int) -> list[int]:
        request = lease_request(str(number), question(number), max_tokens=12)
        for engine in (target, drafter):
            await engine.open(request)
            await engine.prefill(request.lease_id)
        port = EngineDrafter(drafter, request.lease_id) if max_draft else None
        verifier = EngineVerifier(target, request.lease_id)
        rounds = speculate(port, verifier, max_tokens=12, max_draft=max_draft or 1)
        return [token async for verdict in rounds for token in verdict.token_ids]

    answers = await asyncio.gather(*(ask_in_rounds(number) for number in range(3)))
    assert answers == [reference_greedy(question(number).tolist(), 12) for number in range(3)]
    assert max(read) == 3
    target.close()
    drafter.close()


async def test_who_waits_for_a_prefill_that_is_given_up_goes_on_with_it() -> None:
    engine = tiny_engine(step_tokens=16)
    run, turn = engine._compute.runner.run, asyncio.Event()
    loop, num_forwards = asyncio.get_running_loop(), 0

    def give_up_after_two(feeds: Sequence[Feed]) -> list[torch.Tensor]:
        nonlocal num_forwards
        num_forwards += 1
        if num_forwards == 3:
            engine.release("a")
            loop.call_soon_threadsafe(turn.set)
        return run(feeds)

    engine._compute.runner.run = give_up_after_two  # type: ignore[assignment]
    await engine.open(lease_request("a", question(1)))
    abandoned = asyncio.ensure_future(engine.prefill("a"))
    answer, num_cached = await ask(engine, "b", question(2))
    await turn.wait()
    await asyncio.gather(abandoned, return_exceptions=True)
    assert answer == reference_greedy(question(2).tolist(), 4)
    assert num_cached == 32  # what the two forwards had finished
    engine.check_integrity()
    engine.close()


async def test_what_a_cancelled_prefill_had_computed_is_found() -> None:
    """By the next lease, also when the caller left between a forward and its bookkeeping."""
    engine = tiny_engine(step_tokens=64)
    observe, loop, has_left = engine._state.scheduler.observe, asyncio.get_running_loop(), Event()

    def observe_and_leave(seconds: float, scheduled: Scheduled) -> None:
        engine._state.scheduler.observe = observe  # type: ignore[method-assign]
        loop.call_soon_threadsafe(call.cancel)
        has_left.wait()

    engine._state.scheduler.observe = observe_and_leave  # type: ignore[method-assign]
    await engine.open(lease_request("a", question(1)))
    call = asyncio.ensure_future(engine.prefill("a"))
    call.add_done_callback(lambda _: has_left.set())
    await asyncio.gather(call, return_exceptions=True)
    answer, num_cached = await ask(engine, "b", question(2))
    assert answer == reference_greedy(question(2).tolist(), 4)
    assert num_cached == 64
    engine.close()


async def test_a_tenant_never_meets_the_pages_of_another() -> None:
    engine = tiny_engine()
    cached = [
        (await ask(engine, str(n), question(1), tenant))[1]
        for n, tenant in enumerate(("one", "two", "one", "two"))
    ]
    assert cached == [0, 0, 64, 64]
    engine.close()


@pytest.mark.parametrize("eta", [0.0, 10.0])
async def test_what_is_found_is_the_same_with_speculation_and_without(eta: float) -> None:
    """Drafts, rejected or not, neither take from the cache nor add to it, on either side."""

    async def cached(speculates: bool) -> list[int]:
        target, drafter = tiny_engine(), tiny_engine(seed=1)
        found = []
        for number in (1, 2, 1, 3):
            request = lease_request(
                f"{number}-{len(found)}",
                question(number),
                max_tokens=9,
                speculation=SpeculationConfig(eta=eta if speculates else 0.0, max_draft=4),
            )
            for engine in (target, drafter):
                await engine.open(request)
                found.append((await engine.prefill(request.lease_id)).num_cached_tokens)
            port = EngineDrafter(drafter, request.lease_id) if speculates else None
            verifier = EngineVerifier(target, request.lease_id)
            async for _ in speculate(port, verifier, max_tokens=9, max_draft=4):
                pass
            for engine in (target, drafter):
                engine.release(request.lease_id)
                engine.check_integrity()
        target.close()
        drafter.close()
        return found

    assert await cached(True) == await cached(False) == [0, 0, 64, 64, 64, 64, 64, 64]


async def test_choices_share_what_was_found() -> None:
    engine = tiny_engine()
    await ask(engine, "a", question(1))
    await engine.open(lease_request("b", question(2), num_choices=3, max_tokens=4))
    assert (await engine.prefill("b")).num_cached_tokens == 64
    expected = reference_greedy(question(2).tolist(), 4)
    for choice in range(3):
        assert list((await engine.decode("b", choice, 4)).token_ids) == expected
    engine.release("b")
    engine.check_integrity()
    engine.close()


async def test_old_pages_give_way_and_used_ones_do_not() -> None:
    """Room for two prompts: one is held, one is not, and a third needs the other's pages."""
    engine = tiny_engine(kv_cache_tokens=256, max_context=128)
    held, idle, third = (random_prompt(97, seed=seed) for seed in (1, 2, 3))
    await ask(engine, "a", idle)
    await engine.open(lease_request("held", held, max_tokens=4))
    await engine.prefill("held")
    assert (await ask(engine, "b", third))[1] == 0
    assert (await ask(engine, "c", held))[1] == 96
    assert (await ask(engine, "d", idle))[1] < 96
    assert list((await engine.decode("held", 0, 4)).token_ids) == reference_greedy(held.tolist(), 4)
    engine.release("held")
    engine.check_integrity()
    engine.close()


@pytest.mark.usefixtures("always_restores")
async def test_what_had_to_leave_comes_back_from_host_memory() -> None:
    engine = tiny_engine(kv_cache_tokens=128, max_context=128, host_cache_tokens=256)
    rows = Rows(engine)
    documents = [random_prompt(97, seed=seed) for seed in (1, 2)]
    for number, expected in enumerate([0, 0, 96, 96]):
        rows.number = 0
        answer, num_cached = await ask(engine, str(number), documents[number % 2])
        assert answer == reference_greedy(documents[number % 2].tolist(), 4)
        assert num_cached == expected
        assert rows.number == 97 - expected - 1 + len(answer)
    engine.close()


async def test_host_memory_keeps_what_was_used_last() -> None:
    engine = tiny_engine(kv_cache_tokens=128, max_context=128, host_cache_tokens=96)
    first, second, third = (random_prompt(97, seed=seed) for seed in (1, 2, 3))
    for number, prompt in enumerate((first, second, third)):  # the second pushes the first out
        await ask(engine, str(number), prompt)
    assert (await ask(engine, "second", second))[1] == 96  # though it was the oldest there
    engine.close()


async def test_restoring_that_was_measured_to_be_slower_is_not_done() -> None:
    engine = tiny_engine(kv_cache_tokens=128, max_context=128, host_cache_tokens=256)
    documents = [random_prompt(97, seed=seed) for seed in (1, 2)]
    for number in (0, 1):
        await ask(engine, str(number), documents[number])
    assert engine._compute.host is not None
    engine._compute.host.pace.observe_restored(1, 1e6)
    assert (await ask(engine, "again", documents[0]))[1] == 16  # the head had not to leave
    engine.close()


async def test_copies_that_failed_are_not_taken_for_pages() -> None:
    engine = tiny_engine(kv_cache_tokens=128, max_context=128, host_cache_tokens=256)
    first, second = (random_prompt(97, seed=seed) for seed in (1, 2))
    await ask(engine, "first", first)
    assert engine._compute.host is not None
    launch, has_called = engine._compute.host.launch, Event()

    def fail(*_: object) -> None:
        has_called.wait()
        raise RuntimeError("no memory")

    engine._compute.host.launch = fail  # type: ignore[method-assign]
    await engine.open(lease_request("second", second, max_tokens=4))
    call = asyncio.ensure_future(engine.prefill("second"))
    await asyncio.sleep(0)  # the call is in; the copies that opening ordered are still to be made
    has_called.set()
    with pytest.raises(EngineFailed):
        await call
    engine._compute.host.launch = launch  # type: ignore[method-assign]
    answer, num_cached = await ask(engine, "again", first)
    assert answer == reference_greedy(first.tolist(), 4)
    assert num_cached < 96
    engine.close()


async def test_prompts_that_took_turns_on_a_page_during_a_forward_keep_their_own_kv() -> None:
    """One tenant's document comes back, then another's on the same pages, and both askers leave.

    The first one leaves host memory too; all before any copy is made, while a forward runs.
    """
    engine = tiny_engine(kv_cache_tokens=128, max_context=128, host_cache_tokens=48)
    ours, theirs, other = (random_prompt(25, seed=seed) for seed in (1, 2, 3))  # of three pages

    async def come_and_go(prompt: Int32Array, tenant: str) -> None:
        await engine.open(lease_request("short", prompt, max_tokens=4, tenant=tenant))
        engine.release("short")

    await ask(engine, "1", ours, "one")
    await ask(engine, "2", theirs, "two")
    await come_and_go(
        random_prompt(110), "three"
    )  # both documents give way, and host memory is full
    await ask(engine, "3", other, "three")
    run, is_running, may_end = engine._compute.runner.run, Event(), Event()

    def run_long(feeds: Sequence[Feed]) -> list[torch.Tensor]:
        is_running.set()
        may_end.wait()
        return run(feeds)

    engine._compute.runner.run = run_long  # type: ignore[method-assign]
    await engine.open(lease_request("long", random_prompt(9), max_tokens=4))
    forward = asyncio.ensure_future(engine.prefill("long"))
    await asyncio.to_thread(is_running.wait)
    await come_and_go(ours, "one")
    await come_and_go(theirs, "two")
    await come_and_go(random_prompt(90), "three")  # the other document pushes ours out of the host
    await engine.open(lease_request("again", ours, max_tokens=4, tenant="one"))
    may_end.set()
    await forward
    receipt = await engine.prefill("again")
    answer = list((await engine.decode("again", 0, 4)).token_ids)
    assert answer == reference_greedy(ours.tolist(), 4)
    assert receipt.num_cached_tokens == 24  # copied back before it was pushed out
    engine.check_integrity()
    engine.close()


async def test_an_idle_engine_copies_at_once() -> None:
    """When a lease opens, and when one ends and lets another in."""
    engine = tiny_engine(kv_cache_tokens=128, max_context=128, host_cache_tokens=256)
    wait = engine._state.guard.wait
    engine._state.guard.wait = lambda timeout: wait()  # type: ignore[assignment,misc]  # until called
    first, second, third = (random_prompt(97, seed=seed) for seed in (1, 2, 3))
    await ask(engine, "first", first)
    assert engine._compute.host is not None
    launch, loop = engine._compute.host.launch, asyncio.get_running_loop()
    copied = asyncio.Semaphore(0)

    def copy(moves: list[Move], *others: object) -> None:
        launch(moves, *others)  # type: ignore[arg-type]
        loop.call_soon_threadsafe(copied.release)

    engine._compute.host.launch = copy  # type: ignore[method-assign]
    async with asyncio.timeout(60):
        await engine.open(lease_request("second", second, max_tokens=4))
        await copied.acquire()
        await engine.prefill("second")
        waiting = asyncio.ensure_future(engine.open(lease_request("third", third, max_tokens=4)))
        await asyncio.sleep(0)
        engine.release("second")
        await waiting
        await copied.acquire()
    engine.close()


def test_a_name_is_of_all_tokens_so_far_and_of_the_tenant() -> None:
    names = page_names(DOCUMENT, 8, "one")
    assert len(names) == 7  # the last token is never found in place
    longer = page_names(as_prompt([*DOCUMENT, 5]), 8, "one")
    assert longer[:7] == names
    changed = DOCUMENT.copy()
    changed[3] += 1
    assert not set(page_names(changed, 8, "one")) & set(names)
    assert not set(page_names(DOCUMENT, 8, "two")) & set(names)
    apart = page_names(DOCUMENT, 8, "one", is_apart=True)
    assert not set(apart) & {*names, *page_names(DOCUMENT, 8, "one\0apart")}
    assert page_names(as_prompt([1]), 8, "one") == page_names(as_prompt([]), 8, "one") == []


def test_the_tail_of_a_prompt_gives_way_before_its_head() -> None:
    cache = PrefixCache(pool := PagePool(8))
    names = page_names(as_prompt(range(49)), 8, "one")
    first = cache.take(names, 7)
    cache.note_computed(pages_of(first, 6))
    cache.free(first)
    assert (pool.num_free, cache.num_idle) == (2, 6)
    cache.free(cache.take((), 4))  # two pages more than are free
    again = cache.take(names, 6)
    found = cache.num_in_a_row(pages_of(again, 6), 0, computed=True)
    assert found == 4
    cache.check_integrity([again])


def test_room_is_made_in_one_piece() -> None:
    """Every other page is idle: eight would do for four, but they lie apart."""
    cache = PrefixCache(pool := PagePool(16))
    held = []
    for number in range(8):
        names = page_names(as_prompt([number, *range(8)]), 8, "one")
        (page,) = pages_of(cache.take(names, 1), 1)
        cache.note_computed(np.array([page]))
        held.append([PageRun(int(page), int(page) + 1)])
        held.append(list(cache.take((), 1)))
    for runs in held[::2]:
        cache.free(runs)
    for runs in held[1:9:2]:
        cache.free(runs)
    assert pool.num_free_together == 1
    assert len(cache.take((), 4)) == 1
    cache.check_integrity([*held[9::2], [PageRun(0, 4)]])


class Readers:
    """Tenants that read documents into a pool, on a clock that stands still until it is moved."""

    def __init__(self, num_pages: int) -> None:
        self.now = 0.0
        self.pool = PagePool(num_pages)
        self.cache = PrefixCache(self.pool, clock=lambda: self.now)

    def read(self, tenant: str, document: int, num_pages: int) -> int:
        """Read a document; return how many of its pages were there."""
        names = page_names(as_prompt([document, *range(8 * num_pages)]), 8, tenant)
        held = self.cache.take(names, num_pages, tenant)
        pages = pages_of(held, num_pages)
        num_kept = self.cache.num_in_a_row(pages, 0, computed=True)
        self.cache.note_computed(pages)
        self.cache.free(held)
        self.cache.check_integrity([])
        return num_kept


def test_a_quiet_tenants_document_stays_through_the_flood_of_another() -> None:
    readers = Readers(20)
    readers.read("quiet", 0, 8)
    assert sum(readers.read("flood", number, 4) for number in range(50)) == 0
    assert readers.read("quiet", 0, 8) == 8
    assert readers.read("flood", 49, 4) == 4  # of its own the latest stay


def test_who_is_farthest_above_its_floor_gives_way_and_with_its_oldest_pages() -> None:
    readers = Readers(20)
    for tenant, document, num_pages in (("a", 0, 5), ("b", 0, 6), ("b", 1, 6), ("c", 0, 3)):
        readers.read(tenant, document, num_pages)
    readers.read("c", 1, 4)
    assert [readers.read("a", 0, 5), readers.read("c", 0, 3), readers.read("b", 1, 6)] == [5, 3, 6]


def test_the_floor_of_who_reads_nothing_for_an_hour_ends() -> None:
    readers = Readers(20)
    readers.read("gone", 0, 8)
    readers.read("busy", 0, 12)
    readers.now = 3601.0
    readers.read("busy", 1, 8)
    assert readers.read("busy", 0, 12) == 12
    assert readers.read("gone", 0, 8) == 0


def test_a_page_missing_in_the_middle_is_computed_and_the_rest_kept() -> None:
    cache = PrefixCache(PagePool(8))
    names = page_names(as_prompt(range(33)), 8, "one")
    first = cache.take(names, 4)
    cache.note_computed(pages_of(first, 4)[[0, 2, 3]])
    pages = pages_of(first, 4)
    assert cache.num_in_a_row(pages, 0, computed=True) == 1
    assert cache.num_in_a_row(pages, 1, computed=False) == 1
    cache.free(first)  # nobody is left who would compute the second page
    assert cache.num_idle == 3
    assert pages_of(cache.take(names, 4), 4)[0] == pages[0]


def test_a_prompt_that_is_here_needs_room_only_for_the_rest() -> None:
    cache = PrefixCache(PagePool(8))
    names = page_names(as_prompt(range(49)), 8, "one")
    held = cache.take(names, 7)
    assert cache.fits(names, 7)
    assert not cache.fits((), 2)
    cache.note_computed(pages_of(held, 6))
    cache.free(held)
    assert cache.fits((), 8)
    assert cache.fits(names, 8)  # what it finds is not room for it as well
    assert not cache.fits(names, 8, num_kept=1)
    assert np.array_equal(pages_of((PageRun(3, 5), PageRun(7, 9)), 3), [3, 4, 7])


A, B = (bytes([65 + i]) * 16 for i in range(2))


def tiers(num_pages: int, num_host_pages: int) -> tuple[PrefixCache, HostTier, KVCache]:
    layout = KVLayout(1, 1, torch.float32, (torch.device("cpu"),))
    host = HostTier(layout, num_host_pages, 8)
    return PrefixCache(PagePool(num_pages), host), host, KVCache(layout, num_pages, 8)


def push_out(cache: PrefixCache, host: HostTier, kv: KVCache, *names: bytes) -> None:
    """Compute pages of these names, one after the other, on a pool of one page."""
    for name in names:
        held = cache.take([name], 1)
        cache.note_computed(pages_of(held, 1))
        cache.free(held)
    cache.free(cache.take((), 1))
    host.launch(cache.take_moves(), kv, cache.tags)
    cache.settle(host.take_landed())


def test_a_copy_for_a_lease_that_has_ended_is_not_made() -> None:
    cache, host, kv = tiers(1, 2)
    push_out(cache, host, kv, A, B)
    cache.free(cache.take([A], 1))
    held = cache.take([B], 1)
    moves = cache.take_moves()
    assert [(move.name, move.is_restore) for move in moves] == [(B, True)]
    host.launch(moves, kv, cache.tags)
    cache.settle(host.take_landed())
    assert cache.num_in_a_row(pages_of(held, 1), 0, computed=True) == 1
    cache.check_integrity([held])


def test_a_page_that_changes_hands_while_it_is_copied_is_not_taken_for_computed() -> None:
    cache, host, kv = tiers(1, 2)
    push_out(cache, host, kv, A)
    first = cache.take([A], 1)
    moves = cache.take_moves()
    cache.free(first)
    held = cache.take([B], 1)
    host.launch(moves, kv, cache.tags)
    cache.settle(host.take_landed())
    assert cache.num_in_a_row(pages_of(held, 1), 0, computed=False) == 1
    cache.check_integrity([held])


def test_kv_of_another_prompt_is_refused() -> None:
    """Whatever mistake might bring it there."""
    cache, host, kv = tiers(2, 2)
    held = cache.take([A, B], 2)
    cache.note_computed(pages_of(held, 2))
    cache.tags[1] = A
    with pytest.raises(AssertionError, match="page 1"):
        cache.num_in_a_row(pages_of(held, 2), 0, computed=True)
    with pytest.raises(AssertionError, match="page 1"):
        cache.check_integrity([held])
    host.launch([Move(A, 0, 0, is_restore=False)], kv, cache.tags)
    with pytest.raises(AssertionError, match="came back"):
        host.launch([Move(B, 1, 0, is_restore=True)], kv, cache.tags)

"""Whoever comes and goes, a page that is handed out as computed holds what it should.

The engine is the real one, stepped by hand instead of by its thread, with a rule for a model: the
KV of a token is a hash of the tenant and of all tokens up to it. So every page can be compared with
a recomputed one at any moment.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import Collection, Coroutine, Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from rapid.config import EngineConfig, SpeculationConfig
from rapid.engines.engine import Engine
from rapid.engines.execution.compute import ComputeThread
from rapid.engines.execution.scheduling import Scheduled, Scheduler
from rapid.engines.kv.cache import KVCache, KVLayout, PageTable
from rapid.engines.kv.page_names import page_names
from rapid.engines.kv.tiers.disk_tier import DiskTier, Job
from rapid.engines.kv.tiers.host_tier import HostTier, Move, RestorePace
from rapid.engines.kv.tiers.lanes import Landed, Lane, Mark, Pairs
from rapid.engines.work.base import Work
from rapid.errors import RapidError
from rapid.messages import Float32Array, LeaseRequest, PrefillReceipt, as_prompt
from tests.rapid.tiny_models import engine_config, lease_request, loaded

SEEDS = range(4)
NUM_STEPS = int(os.environ.get("RAPID_WALK_STEPS", "100000"))  # of all walks together
PAGE_TOKENS = 2
MOST_CLIENTS = 5


class Broken(Exception):
    """A copy or a forward that fails, as a device out of memory would."""


class Answer:
    """A reply for callers without an event loop: they ask again and again."""

    def __init__(self) -> None:
        self.future = self
        self._outcome: tuple[object, Exception | None] | None = None

    def settle(self, result: object = None, error: Exception | None = None) -> None:
        self._outcome = self._outcome or (result, error)

    def __await__(self) -> Generator[None, None, object]:
        while self._outcome is None:
            yield
        result, error = self._outcome
        if error is not None:
            raise error
        return result


class Whim(RestorePace):
    """Restoring pays, most of the time."""

    def __init__(self, random: Random) -> None:
        super().__init__()
        self._random = random

    @property
    def is_restoring_faster(self) -> bool:
        return self._random.random() < 0.9


class LateLane(Lane):
    """Copies that land in their order, at any moment after they were launched."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._launched: deque[tuple[Pairs, LateMark, bool]] = deque()

    def launch(self, pairs: Pairs) -> Mark:
        """Once in a while fail and leave half a page."""
        mark, is_broken = LateMark(), self._random.random() < 0.01
        self._launched.append((pairs, mark, is_broken))
        if is_broken:
            raise Broken
        return mark

    def go_on(self) -> None:
        speed = self._random.choice((0.3, 0.9))
        while self._launched and self._random.random() < speed:
            self._land()

    def wait(self) -> None:
        while self._launched:
            self._land()

    def _land(self) -> None:
        pairs, mark, is_broken = self._launched.popleft()
        for source, destination in pairs:
            if is_broken:
                destination[0, ..., 0, 0] = torch.nan
            else:
                destination.copy_(source)
        mark.has_landed = True


class LateMark(Landed):
    """The mark of a copy that lands later."""

    def __init__(self) -> None:
        super().__init__()
        self.has_landed = False

    def is_reached(self) -> bool:
        return self.has_landed


class Shelf:
    """A disk: pages that stay, or vanish, or are spoilt."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._pages: dict[bytes, bytes] = {}
        self._listed: set[tuple[str, bytes]] = set()
        self.folder = "a shelf"

    def __contains__(self, name: bytes) -> bool:
        return name in self._pages

    def use_for(self, names: Iterable[bytes], documents: Collection[str]) -> None:
        """They give way to others, as any page may."""
        for name in names:
            if self._random.random() < 0.05:
                self._pages.pop(name, None)
            if name in self._pages:
                self._listed.update((each, name) for each in documents)

    def forget(self, documents: Collection[str]) -> int:
        names = {name for each, name in self._listed if each in documents}
        return sum(self._pages.pop(name, None) is not None for name in names)

    def read(self, name: bytes, page: memoryview) -> bool:
        content = self._pages.get(name)
        if content is None or self._random.random() < 0.1:
            page[:4] = b"\xff" * 4  # not a number
            self._pages.pop(name, None)
            return False
        page[:] = content
        return True

    def write(self, name: bytes, tenant: str, page: memoryview, documents: Collection[str]) -> None:
        self._listed.update((each, name) for each in documents)
        self._pages[name] = bytes(page)

    num_bytes = 0


def open_disk(_: object, config: EngineConfig, host: HostTier) -> DiskTier:
    random = Random(config.host_cache_tokens)
    return DiskTier(host, Shelf(random), clock=lambda: 0.0)  # type: ignore[arg-type]


@dataclass(eq=False)
class Client:
    """Somebody with a lease, or in line for one."""

    lease_id: str
    call: Coroutine[object, None, object] | None
    has_lease: bool = False


class Walk:
    """A crowd at an engine, at any moment: also while it copies and while it computes."""

    def __init__(self, seed: int, num_steps: int) -> None:
        self.num_cached = self.num_restored = self.num_read = self.num_broken = 0
        self._random = Random(seed)
        self._num_left = num_steps
        self._now = 0.0
        self._clients: list[Client] = []
        self._num_clients = 0
        self.num_forgotten = 0
        self._forgetting: tuple[LeaseRequest, Coroutine[object, None, Any]] | None = None
        self._has_come_again = False  # whether its tenant has asked since
        self._requests = list(requests(self._random))
        self._recent = deque(self._requests[:1], maxlen=3)  # most come for what others came for
        layout = KVLayout(1, 1, torch.float32, (torch.device("cpu"),))
        config = engine_config(
            page_tokens=PAGE_TOKENS,
            disk_cache_folder="none",
            disk_cache_gib=1.0,
            max_context=24,
            kv_cache_tokens=24,
            host_cache_tokens=self._random.choice((8, 16, 24)),
            max_leases=4,
            step_tokens=16,
        )
        model = replace(loaded(), kv_layout=layout)
        self.engine = Engine(model, config, clock=lambda: self._now, is_watched=False)
        self._keys, self._values = floats(self.engine._compute.runner.cache)
        host = self.engine._compute.host
        assert host is not None
        host.pace = Whim(self._random)
        self._launch, host.launch = host.launch, self._move  # type: ignore[method-assign]
        self._host, self._lane = host, LateLane(self._random)
        host._lane = self._lane
        assert self.engine._disk is not None
        self._disk = self.engine._disk
        self._tagged = [
            (
                self.engine._state.ledger.prefixes.tags,
                self._keys.reshape(-1, PAGE_TOKENS),
                "_copies",
            ),
            (host.tags, host.blocks[:, 0, 0, 0, :, 0].numpy(), "_host_copies"),
        ]
        self._content = {
            name: kv(request.terms.tenant, tuple(request.prompt_ids.tolist()))[
                start : start + PAGE_TOKENS
            ]
            for request in self._requests
            for name, start in zip(
                page_names(request.prompt_ids, PAGE_TOKENS, request.terms.tenant),
                range(0, len(request.prompt_ids), PAGE_TOKENS),
                strict=False,
            )
        }
        self._end_all, self.engine._compute._fail = self.engine._compute._fail, self._fail  # type: ignore[method-assign]
        self.engine._compute._run = self._forward  # type: ignore[method-assign]

    def go(self) -> None:
        """A step is what a client does, or one of the engine's."""
        while self._num_left > 0:
            self._meanwhile()
            self._num_left -= 1
            self.engine._compute._step_or_fail()
            self._check_leases()
            self._check_tags()
            if self._num_left % 8 == 0:
                self.engine.check_integrity()

    def end(self) -> None:
        for lease in self.engine._state.ledger.leases():
            self.engine.release(lease.lease_id)
        self.engine.check_integrity()
        while not (self._disk.is_idle and not self._host.is_copying):
            self.engine._compute._step_or_fail()
            self._lane.wait()
            self._work_on_disk()
        assert not self._host._held
        assert len(self._host._free) + len(self._host._page_of) == len(self._host.blocks)
        self.engine.close()
        if self._forgetting is not None:
            self._forgetting[1].close()
        for client in self._clients:
            self._listen(client)

    def _meanwhile(self) -> None:
        """Clients do some things, in some moments many."""
        self._lane.go_on()
        self._work_on_disk()
        persistence = self._random.choice((0.5, 0.9))
        while self._num_left > 0 and self._random.random() < persistence:
            self._num_left -= 1
            if len(self._clients) < MOST_CLIENTS and self._random.random() < 0.5:
                self._come()
            elif self._clients:
                self._go_on(self._random.choice(self._clients))
        self._forget()
        if self._random.random() < 0.002:
            self._now += 2 * self.engine._config.lease_ttl_s

    def _forget(self) -> None:
        """Have a document forgotten, and look for it as soon as it is said to be."""
        if self._forgetting is None:
            if self._random.random() < 0.02:
                request = self._random.choice(self._requests)
                self._forgetting = request, self.engine.forget(request.terms.documents)
                self._has_come_again = False
            return
        request, forgetting = self._forgetting
        try:
            forgetting.send(None)
            return
        except StopIteration as done:
            is_pending = any(each.pending for each in done.value)
        self._forgetting = None
        if is_pending or self._has_come_again:
            return
        self.num_forgotten += 1
        names, others = set[bytes](), set[bytes]()
        for each in self._requests:
            is_it = each.terms.documents == request.terms.documents
            found = page_names(each.prompt_ids, PAGE_TOKENS, each.terms.tenant)
            (names if is_it else others).update(found)
        names -= others  # how another one begins as well
        prefixes, shelf = self.engine._state.ledger.prefixes, self._disk.files
        assert not names & prefixes._page_of.keys()
        assert not names & set(self._host)
        assert not names & set(self._host.tags)
        assert not names & set(prefixes.tags)
        assert not any(name in shelf for name in names)
        assert not names & self._disk.names_in_transit

    def _come(self) -> None:
        lease_id = str(self._num_clients)
        self._num_clients += 1
        self._recent.append(self._random.choice((*self._requests, *self._recent * 6)))
        request = replace(self._random.choice(self._recent), lease_id=lease_id)
        if self._forgetting is not None:
            tenant = self._forgetting[0].terms.tenant
            while request.terms.tenant == tenant and self._random.random() < 0.95:
                request = replace(self._random.choice(self._requests), lease_id=lease_id)
            self._has_come_again = self._has_come_again or request.terms.tenant == tenant
        client = Client(lease_id, self.engine.open(request))
        self._clients.append(client)
        self._listen(client)

    def _go_on(self, client: Client) -> None:
        """Wait, cancel, ask for the prefill, or leave."""
        self._listen(client)
        if client.call is not None:
            if self._random.random() < 0.3:
                with pytest.raises(asyncio.CancelledError):
                    client.call.throw(asyncio.CancelledError)
                client.call = None
        elif client.has_lease and self._random.random() < 0.4:
            client.call = self.engine.prefill(client.lease_id)
            self._listen(client)
        else:
            self.engine.release(client.lease_id)
            self._clients.remove(client)

    def _listen(self, client: Client) -> None:
        """Take the answer of the call in progress if it is there."""
        if client.call is None:
            return
        try:
            client.call.send(None)
            return
        except StopIteration as done:
            client.has_lease = True
            if isinstance(done.value, PrefillReceipt):
                self.num_cached += done.value.num_cached_tokens
        except RapidError:
            client.has_lease = False
        client.call = None

    def _move(self, moves: Sequence[Move], *others: Any) -> None:
        self._meanwhile()
        self._launch(moves, *others)
        self.num_restored += sum(move.is_restore for move in moves)
        self._meanwhile()

    def _work_on_disk(self) -> None:
        """Do some of what the disk's threads would."""
        for jobs in (self._disk._to_write, self._disk._to_read):
            while not jobs.empty() and self._random.random() < 0.7:
                job = jobs.get()
                assert job is not None
                self._disk._do(job)
                self.num_read += isinstance(job, Job) and job.kind == "read"

    def _forward(self, scheduled: Scheduled) -> list[torch.Tensor]:
        """Read what the rows attend to, write the rows; once in a while fail amid it."""
        written = []
        for work, feed in scheduled:
            sequence = next(one for one in work.lease.sequences if one.table is feed.table)
            expected = kv(work.lease.request.terms.tenant, tuple(sequence.token_ids))
            self._check(feed.table, expected[: feed.position])
            stop = feed.position + len(feed.token_ids)
            written.append((slots(feed.table, feed.position, stop), expected[feed.position : stop]))
        self._meanwhile()
        is_broken = self._random.random() < 0.01
        for places, rows in written:
            self._keys[places] = np.nan if is_broken else rows
            self._values[places] = -rows
        if is_broken:
            raise Broken
        self._meanwhile()
        return [torch.empty(0)] * len(scheduled)

    def _fail(self, works: list[Work], cause: Exception) -> None:
        if not isinstance(cause, Broken):
            raise cause
        self.num_broken += 1
        self._end_all(works, cause)

    def _check_leases(self) -> None:
        """What every lease counts as computed is what it would compute.

        A page begun by a prefill that was given up is begun again, so it does not count.
        """
        for lease in self.engine._state.ledger.leases():
            for sequence in lease.sequences:
                expected = kv(lease.request.terms.tenant, tuple(sequence.token_ids))
                is_begun = 0 if sequence.holds_prompt else sequence.num_computed % PAGE_TOKENS
                self._check(sequence.table, expected[: sequence.num_computed - is_begun])

    def _check_tags(self) -> None:
        """Tags of both tiers tell what is there."""
        for tags, numbers, counts in self._tagged:
            copies = getattr(self._host, counts)
            for page, tag in enumerate(tags):
                if tag is not None and page not in copies:
                    assert numbers[page].tolist() == self._content[tag].tolist()

    def _check(self, table: PageTable, expected: Float32Array) -> None:
        places = slots(table, 0, len(expected))
        assert np.array_equal(self._keys[places], expected)
        assert np.array_equal(self._values[places], -expected)


@cache
def kv(tenant: str, token_ids: tuple[int, ...]) -> Float32Array:
    """Whole numbers, which float32 holds exactly [len]."""
    value, values = sum(tenant.encode()), []
    for token_id in token_ids:
        value = (value * 1_103_515_245 + token_id * 12_345 + 1) % 2**24
        values.append(value)
    return np.array(values, dtype=np.float32)


@lru_cache(maxsize=100)
def slots(table: PageTable, start: int, stop: int) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
    return np.array([slot for span in table.spans(start, stop) for slot in range(*span)], np.intp)


def floats(cache: KVCache) -> tuple[Float32Array, Float32Array]:
    """The keys and values of the only layer and head, shared with the cache [num_slots]."""
    ((keys, values),) = cache.layers
    return keys.numpy()[0, :, 0], values.numpy()[0, :, 0]


def requests(random: Random) -> Generator[LeaseRequest, None, None]:
    """Two tenants ask about the same documents, two of which begin alike."""
    documents = [[random.randrange(4, 90) for _ in range(13)] for _ in range(2)]
    documents[0][:4] = documents[1][:4]
    for tenant in ("one", "two"):
        for number, document in enumerate(documents):
            for length in (5, 9, 13):
                num_choices = random.choice((1, 1, 2))
                committed = [[random.randrange(4, 90)] * (1 + i) for i in range(num_choices)]
                yield lease_request(
                    prompt=as_prompt(document[:length]),
                    max_tokens=4,
                    num_choices=num_choices,
                    committed=tuple(map(tuple, committed)),
                    speculation=SpeculationConfig(eta=0.0, max_draft=1),
                    tenant=tenant,
                    documents=frozenset({f"{tenant} {number}"}),
                )


@pytest.mark.parametrize("seed", SEEDS)
def test_every_page_handed_out_is_as_if_computed_now(
    seed: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(
        logging.CRITICAL, "rapid.engines.execution.compute"
    )  # what breaks here is meant to
    monkeypatch.setattr(ComputeThread, "_loop", lambda _: None)
    # Whose lease is next depends on what was used: rows instead of measured seconds.
    monkeypatch.setattr(
        Scheduler, "_split", lambda _, __, rows: [len(r.token_ids) for _, r in rows]
    )
    monkeypatch.setattr("rapid.engines.engine.Reply", Answer)
    monkeypatch.setattr("rapid.engines.engine.open_disk_tier", open_disk)
    monkeypatch.setattr(DiskTier, "start", lambda *_: None)
    walk = Walk(seed, NUM_STEPS // len(SEEDS))
    walk.go()
    walk.end()
    counts = (walk.num_cached, walk.num_restored, walk.num_read, walk.num_broken)
    assert walk.num_forgotten > NUM_STEPS // 20_000
    assert min(counts) > NUM_STEPS // 20_000

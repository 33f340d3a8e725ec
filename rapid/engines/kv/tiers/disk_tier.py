"""Third cache tier: KV pages in files, so that a document is still cached after a restart.

Pages pass through the `HostTier`, one file a page (`rapid.engines.kv.tiers.page_files`)::

    save      pool -> host memory (a copy) -> file (a thread)
    restore   file -> host memory (threads) -> pool (a copy)
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from rapid.engines.kv.tiers.host_tier import HostTier, RestorePace
from rapid.engines.kv.tiers.page_files import PageFiles
from rapid.ports import Clock

logger = logging.getLogger(__name__)

NUM_READERS = 4  # threads that read and check; one checks about 1 GiB a second
_MOST_UNSAVED = 2**16  # pages that wait for the writer
_MOST_WRITES = 64  # pages on their way to the writer at once
_HANGS_S = 10.0  # without a finished read, while some are due
_LOOK_S = 1.0  # most of it that counts between two looks: a long step is not the disk's fault
_CLOSING_S = 5.0  # for the writes that were handed to the writer

PageOf = Callable[[bytes], int | None]
Done = Callable[[object, Exception | None], None]


@dataclass(frozen=True, slots=True)
class Job:
    """A page to write or to read, in a held page of host memory."""

    kind: Literal["write", "read"]
    name: bytes
    tenant: str
    host_page: int
    documents: Collection[str] = ()  # that stand in its prompt


@dataclass(frozen=True, slots=True)
class _Use:
    """Names of pages that are in use, in a prompt that holds documents."""

    names: Sequence[bytes]
    documents: Collection[str]


@dataclass(frozen=True, slots=True)
class _Forget:
    """Documents whose pages are to be removed; `done` gets their number, or why it failed."""

    documents: Collection[str]
    done: Done


_Jobs = queue.SimpleQueue[Job | _Use | _Forget | None]


class DiskTier:
    """The pages in files, and the threads that write and read them.

    Like those of `PrefixCache`, its methods are called with the engine's lock held, except for
    `start` and `close`.
    """

    def __init__(self, host: HostTier, files: PageFiles, clock: Clock = time.monotonic) -> None:
        self.files = files
        self.pace = RestorePace(host.pace.computing)
        self.num_read = 0  # pages
        self._host = host
        self._clock = clock
        self._most_held = max(len(host.blocks) // 2, 1)
        self._most_writes = min(_MOST_WRITES, max(self._most_held // 2, 1))
        self._unsaved: dict[bytes, tuple[str, Collection[str]]] = {}  # tenant and documents
        self._copied: dict[bytes, Job] = {}  # to be written once they are in host memory
        self._writes: set[bytes] = set()
        self._due: dict[bytes, None] = {}  # to be read, in this order
        self._reads: dict[bytes, int] = {}  # being read, with the page in host memory
        self._unwanted: set[bytes] = set()  # of those, what is forgotten when it has come
        self._silent_s = 0.0  # since the last read ended, in looks
        self._last_look_at = 0.0
        self._is_full = False
        self._is_off = False
        self._to_write: _Jobs = queue.SimpleQueue()
        self._to_read: _Jobs = queue.SimpleQueue()
        self._finished: deque[tuple[Job, bool, float]] = deque()
        self._threads: list[threading.Thread] = []
        self._wake: Callable[[], None] = lambda: None

    def start(self, wake: Callable[[], None]) -> None:
        """Start the threads, any of which calls `wake` when `go_on` has something to do."""
        self._wake = wake
        queues = [self._to_write, *[self._to_read] * NUM_READERS]
        self._threads = [
            threading.Thread(target=self._work, args=[jobs], name="rapid-disk", daemon=True)
            for jobs in queues
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End the threads, after the pages that were handed to the writer, if they take seconds."""
        self._to_write.put(None)
        for _ in range(NUM_READERS):
            self._to_read.put(None)
        if self._threads:
            self._threads[0].join(_CLOSING_S)

    # --- for the prefix cache ---------------------------------------------------------------------

    def use(self, names: Sequence[bytes], documents: Collection[str] = ()) -> None:
        """Note that a prompt has these pages, so that others give way before them.

        `documents` are the names of those that stand in it.
        """
        is_busy = self._to_write.qsize() >= _MOST_WRITES and not documents
        if not (is_busy or self._is_off):
            self._to_write.put(_Use(names, documents))

    def forget(self, names: Collection[bytes]) -> None:
        """Write and read no page of some names that is not being written or read already."""
        for name in names:
            self._unsaved.pop(name, None)
            self._due.pop(name, None)
            if (job := self._copied.pop(name, None)) is not None:
                self._host.let_go(job.host_page)
            if name in self._reads:
                self._unwanted.add(name)

    def remove(self, documents: Collection[str], done: Done) -> None:
        """Have the pages of prompts that hold any of some documents removed, after `forget`.

        `done` is told on a thread how many there were, when they are gone, or why they are not.
        """
        self._to_write.put(_Forget(documents, done))

    @property
    def names_in_transit(self) -> set[bytes]:
        """Names of pages on their way to or from the disk."""
        return {*self._unsaved, *self._due, *self._copied, *self._writes, *self._reads}

    def save(self, name: bytes, tenant: str, documents: Collection[str] = ()) -> None:
        """Have a page written that was computed, unless it is there."""
        # A page of no tenant is not kept: an engine computes such pages only to try its steps.
        if not tenant or name in self.files or self._is_full or self._is_off:
            return
        self._unsaved[name] = tenant, documents
        if len(self._unsaved) > _MOST_UNSAVED:
            del self._unsaved[next(iter(self._unsaved))]

    def restore(self, name: bytes) -> None:
        """Have a page read into the pool if it is there and reading is faster than computing."""
        if name in self.files and not self._is_off:
            if self.pace.is_restoring_faster:
                if name not in self._reads:
                    self._due[name] = None
            else:
                self.pace.fade()

    def is_read(self, name: bytes | None) -> bool:
        """Return whether a page is due to be read, or being read."""
        return name in self._due or name in self._reads

    @property
    def is_reading(self) -> bool:
        """Whether any page is due to be read, or being read."""
        return bool(self._due or self._reads)

    @property
    def is_due(self) -> bool:
        """Whether `go_on` has something to do that nothing else will call it for."""
        if self._finished or (self._copied and not self._host.is_copying):
            return True
        may_write = bool(self._unsaved) and self._num_writes < self._most_writes
        return self._has_room and (bool(self._due) or may_write)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to write or to read."""
        return not (self._unsaved or self._num_writes or self.is_reading or self._finished)

    def go_on(self, uncomputed: PageOf, computed: PageOf) -> None:
        """Use what the threads have finished, and give them more.

        The arguments return the pool's page of a name that is not computed, or is, if any.
        """
        while self._finished:
            self._use(*self._finished.popleft(), uncomputed)
        self._check_reads()
        self._begin_reads(uncomputed)
        self._begin_writes(computed)
        for name, job in list(self._copied.items()):
            self._write_copied(name, job)

    # --- inside -----------------------------------------------------------------------------------

    @property
    def _num_writes(self) -> int:
        return len(self._writes) + len(self._copied)

    @property
    def _has_room(self) -> bool:
        return self._num_writes + len(self._reads) < self._most_held

    def _use(self, job: Job, is_good: bool, seconds: float, uncomputed: PageOf) -> None:
        if job.kind == "write":
            self._writes.discard(job.name)
            self._host.let_go(job.host_page)
            if not is_good:
                self._unsaved.clear()
            return
        if self._reads.get(job.name) != job.host_page:
            return  # given up; the page in host memory is never used again
        del self._reads[job.name]
        self._silent_s = 0.0
        is_wanted = job.name not in self._unwanted
        self._unwanted.discard(job.name)
        if not (is_good and is_wanted):
            self._host.let_go(job.host_page)
            return
        self.pace.observe_restored(1, seconds / NUM_READERS)
        self.num_read += 1
        self._host.adopt(job.name, job.host_page)
        page = uncomputed(job.name)
        if page is not None:
            self._host.restore(job.name, page)

    def _check_reads(self) -> None:
        """Give up if the disk does not answer: the prompts that wait are computed."""
        now = self._clock()
        self._silent_s += min(now - self._last_look_at, _LOOK_S)
        self._last_look_at = now
        if self._reads and self._silent_s > _HANGS_S:
            self._is_off = True
            self._due.clear()
            self._reads.clear()
            self._unsaved.clear()
            logger.error(
                "disk_cache_folder: reading in %s has not ended for %.0f s: the engine goes on "
                "without it until it is started again",
                self.files.folder,
                _HANGS_S,
            )

    def _begin_reads(self, uncomputed: PageOf) -> None:
        while self._due and self._has_room:
            name = next(iter(self._due))
            if uncomputed(name) is not None:
                host_page = self._host.borrow()
                if host_page is None:
                    return
                if not self._reads:
                    self._silent_s = 0.0
                self._reads[name] = host_page
                self._to_read.put(Job("read", name, "", host_page))
            del self._due[name]  # being read, or who wanted it has gone

    def _begin_writes(self, computed: PageOf) -> None:
        while self._unsaved and self._num_writes < self._most_writes and self._has_room:
            # A prompt's tail comes first, as it leaves the pool.
            name, (tenant, documents) = self._unsaved.popitem()
            page = computed(name)
            if name in self.files or name in self._writes or name in self._copied:
                continue
            if page is not None:
                self._host.keep(name, page)
            host_page = self._host.page_of(name)
            if host_page is not None:
                self._host.hold(host_page)
                self._copied[name] = Job("write", name, tenant, host_page, documents)

    def _write_copied(self, name: bytes, job: Job) -> None:
        if self._host.is_here(name):
            self._writes.add(name)
            self._to_write.put(job)
        elif self._host.page_of(name) == job.host_page and self._host.is_copying:
            return
        else:
            self._host.let_go(job.host_page)  # its copy failed
        del self._copied[name]

    def _work(self, jobs: _Jobs) -> None:
        """Do the jobs of a queue; runs on the threads."""
        while (job := jobs.get()) is not None:
            self._do(job)

    def _do(self, job: Job | _Use | _Forget) -> None:
        if isinstance(job, _Use):
            self._note_use(job.names[::-1], job.documents)
            return
        if isinstance(job, _Forget):
            try:
                job.done(self._remove(job.documents), None)
            except Exception as error:
                job.done(None, error)
            return
        began = time.perf_counter()
        try:
            is_good = self._read(job) if job.kind == "read" else self._write_page(job)
        except Exception:
            logger.exception("disk_cache_folder: a page could not be used")
            is_good = False
        self._finished.append((job, is_good, time.perf_counter() - began))
        self._wake()

    def _note_use(self, names: Sequence[bytes], documents: Collection[str]) -> None:
        self.files.use_for(names, documents)

    def _remove(self, documents: Collection[str]) -> int:
        return self.files.forget(documents)

    def _read(self, job: Job) -> bool:
        """Read a page; return whether it was there and right."""
        return self.files.read(job.name, self._host.memory_of(job.host_page))

    def _write(self, job: Job) -> None:
        """Write a page, or raise OSError."""
        page = self._host.memory_of(job.host_page)
        self.files.write(job.name, job.tenant, page, job.documents)

    def _write_page(self, job: Job) -> bool:
        try:
            self._write(job)
        except OSError as error:
            if not self._is_full:
                self._is_full = True
                logger.error(
                    "disk_cache_folder: %s cannot be written (%s): the engine goes on, and writes "
                    "no more pages until it is started again",
                    self.files.folder,
                    error.strerror or error,
                )
            return False
        return True

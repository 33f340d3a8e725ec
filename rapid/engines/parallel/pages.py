"""The disk tier of a model in several processes: each rank keeps the KV of its own heads."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from typing_extensions import override

from rapid.engines.kv.disk_tier import NUM_READERS, DiskTier, Job
from rapid.engines.kv.host_tier import HostTier
from rapid.engines.kv.page_files import PageFiles
from rapid.engines.parallel.gang import Gang
from rapid.engines.parallel.orders import Done, ReadPage, UsePages, WritePage
from rapid.errors import EngineFailed

logger = logging.getLogger(__name__)


class LeadingDiskTier(DiskTier):
    """The first rank's third tier, whose files all ranks have."""

    def __init__(self, host: HostTier, files: PageFiles, gang: Gang, engine: int) -> None:
        super().__init__(host, files)
        self._gang = gang
        self._engine = engine
        self._is_closing = False

    @override
    def close(self) -> None:
        self._is_closing = True
        super().close()

    @override
    def _read(self, job: Job) -> bool:
        if self._is_closing:
            return False
        others = self._gang.ask(
            lambda number: ReadPage(self._engine, number, job.name, job.host_page)
        )
        is_good = super()._read(job)
        if others.result() and is_good:  # a page counts as found where all ranks have it
            return True
        self.files.remove(job.name)  # so that it is written again
        return False

    @override
    def _write(self, job: Job) -> None:
        others = self._gang.ask(
            lambda number: WritePage(self._engine, number, job.name, job.tenant, job.host_page)
        )
        try:
            super()._write(job)
        finally:
            is_good = others.result()  # until then the page in host memory is theirs
        if not is_good:
            self.files.remove(job.name)
            raise OSError("another process of the model cannot write its part")

    @override
    def _note_use(self, names: Sequence[bytes]) -> None:
        with contextlib.suppress(EngineFailed):  # the engine closes
            self._gang.note(UsePages(self._engine, names))
        super()._note_use(names)


class FollowingFiles:
    """Another rank's files, and the threads that do with them what the first rank tells."""

    def __init__(self, files: PageFiles, host: HostTier, say: Callable[[Done], None]) -> None:
        """Start the threads with their first jobs; `say` answers the first rank, on any thread."""
        self._files = files
        self._host = host
        self._say = say
        self._writer = ThreadPoolExecutor(1, "rapid-disk")
        self._readers = ThreadPoolExecutor(NUM_READERS, "rapid-disk")

    def do(self, order: ReadPage | WritePage | UsePages) -> None:
        """Begin what was told, after all copies that were told before."""
        if isinstance(order, ReadPage):
            self._readers.submit(self._answer, order)
        else:
            self._writer.submit(self._answer, order)

    def close(self) -> None:
        """End the threads after their jobs, without waiting for that."""
        self._writer.shutdown(wait=False)
        self._readers.shutdown(wait=False)

    def _answer(self, order: ReadPage | WritePage | UsePages) -> None:
        try:
            is_good = self._finish(order)
        except Exception:
            logger.exception("disk_cache_folder: a page could not be used")
            is_good = False
        if not isinstance(order, UsePages):
            self._say(Done(order.number, is_good))

    def _finish(self, order: ReadPage | WritePage | UsePages) -> bool:
        if isinstance(order, UsePages):
            for name in order.names:
                self._files.use(name)
            return True
        self._host.wait()  # copies that landed on the first rank may be on their way on this one
        page = self._host.memory_of(order.host_page)
        if isinstance(order, ReadPage):
            return self._files.read(order.name, page)
        self._files.write(order.name, order.tenant, page)
        return True

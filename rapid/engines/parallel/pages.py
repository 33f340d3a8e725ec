"""The disk tier of a model in several processes: each rank keeps the KV of its own heads."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor

from typing_extensions import override

from rapid.engines.kv.tiers.disk_tier import NUM_READERS, DiskTier, Job
from rapid.engines.kv.tiers.host_tier import HostTier
from rapid.engines.kv.tiers.page_files import PageFiles
from rapid.engines.parallel.gang import Gang
from rapid.engines.parallel.orders import Done, ForgetPages, ReadPage, UsePages, WritePage
from rapid.errors import EngineFailed

logger = logging.getLogger(__name__)

FileOrder = ReadPage | WritePage | UsePages | ForgetPages


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
        place = job.name, job.tenant, job.host_page, job.documents
        others = self._gang.ask(lambda number: WritePage(self._engine, number, *place))
        try:
            super()._write(job)
        finally:
            is_good = others.result()  # until then the page in host memory is theirs
        if not is_good:
            self.files.remove(job.name)
            raise OSError("another process of the model cannot write its part")

    @override
    def _note_use(self, names: Sequence[bytes], documents: Collection[str]) -> None:
        with contextlib.suppress(EngineFailed):  # the engine closes
            self._gang.note(UsePages(self._engine, names, documents))
        super()._note_use(names, documents)

    @override
    def _remove(self, documents: Collection[str]) -> int:
        others = self._gang.ask(lambda number: ForgetPages(self._engine, number, documents))
        num_found = super()._remove(documents)
        if not others.result():
            raise OSError("another process of the model cannot remove its part")
        return num_found


class FollowingFiles:
    """Another rank's files, and the threads that do with them what the first rank tells."""

    def __init__(self, files: PageFiles, host: HostTier, say: Callable[[Done], None]) -> None:
        """Start the threads with their first jobs; `say` answers the first rank, on any thread."""
        self._files = files
        self._host = host
        self._say = say
        self._writer = ThreadPoolExecutor(1, "rapid-disk")
        self._readers = ThreadPoolExecutor(NUM_READERS, "rapid-disk")

    def do(self, order: FileOrder) -> None:
        """Begin what was told, after all copies that were told before."""
        if isinstance(order, ReadPage):
            self._readers.submit(self._answer, order)
        else:
            self._writer.submit(self._answer, order)

    def close(self) -> None:
        """End the threads after their jobs, without waiting for that."""
        self._writer.shutdown(wait=False)
        self._readers.shutdown(wait=False)

    def _answer(self, order: FileOrder) -> None:
        try:
            is_good = self._finish(order)
        except Exception:
            logger.exception("disk_cache_folder: a page could not be used")
            is_good = False
        if not isinstance(order, UsePages):
            self._say(Done(order.number, is_good))

    def _finish(self, order: FileOrder) -> bool:
        if isinstance(order, UsePages):
            self._files.use_for(order.names, order.documents)
            return True
        if isinstance(order, ForgetPages):
            self._files.forget(order.documents)
            return True
        self._host.wait()  # copies that landed on the first rank may be on their way on this one
        page = self._host.memory_of(order.host_page)
        if isinstance(order, ReadPage):
            return self._files.read(order.name, page)
        self._files.write(order.name, order.tenant, page, order.documents)
        return True

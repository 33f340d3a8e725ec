"""The work on files that is still to be done: rows of a table, each done by who holds its lease.

A job is kept by the transaction that makes it needed, and deleted by the one that keeps its result.
A worker that dies leaves a lease that ends, and another one begins the job again. Tenants take
turns: next is a job of who has the fewest in progress.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

from sqlalchemy import delete, func, select, update
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased

from library.storage.database import Database
from library.storage.schema import JobRow

LEASE_S = 15.0  # so long a file waits whose worker died; three renewals may be late
"""How long a lease holds that is not renewed."""

JobKind = Literal["read", "index", "prefill", "delete", "forget"]


class Jobs:
    """The jobs in a database."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        """Store where the jobs are; `clock` gives seconds since the epoch."""
        self._database = database
        self._clock = clock

    async def add(
        self,
        session: AsyncSession,
        kind: JobKind,
        tenant: str,
        file_id: str,
        store_id: str = "",
    ) -> None:
        """Add a job within a transaction; one that is there already stays as it is."""
        same = select(JobRow.id).where(
            JobRow.file_id == file_id, JobRow.kind == kind, JobRow.store_id == store_id
        )
        if (await session.scalars(same)).first() is None:
            session.add(
                JobRow(
                    tenant=tenant,
                    kind=kind,
                    file_id=file_id,
                    store_id=store_id,
                    attempts=0,
                    due_at=self._clock(),
                    owner="",
                    leased_until=0.0,
                    num_done=0,
                    num_all=0,
                )
            )

    async def claim(self, owner: str) -> JobRow | None:
        """Return a job that is due, with a lease for `owner`; None if there is none."""
        now = self._clock()
        is_due = JobRow.due_at <= now, JobRow.leased_until <= now
        async with self._database.read() as session:  # as idle workers look twice a second
            if (await session.scalars(select(JobRow.id).where(*is_due).limit(1))).first() is None:
                return None
        other = aliased(JobRow)
        num_running = (
            select(func.count())
            .where(other.tenant == JobRow.tenant, other.leased_until > now)
            .scalar_subquery()
        )
        due = (
            select(JobRow)
            .where(*is_due)
            .order_by(num_running, JobRow.due_at, JobRow.id)
            .limit(1)
            .with_for_update(skip_locked=True, of=JobRow)
        )
        async with self._database.write() as session:
            job = (await session.scalars(due)).first()
            if job is not None:
                job.owner, job.leased_until = owner, now + LEASE_S
                job.attempts += 1
            return job

    async def renew(self, job: JobRow) -> bool:
        """Hold a lease for longer and note how far the job is; return whether it still holds."""
        values = {
            "leased_until": self._clock() + LEASE_S,
            "num_done": job.num_done,
            "num_all": job.num_all,
        }
        async with self._database.write() as session:
            done = await session.execute(
                update(JobRow)
                .where(JobRow.id == job.id, JobRow.owner == job.owner)
                .values(values)
                .returning(JobRow.id)
            )
            return done.first() is not None

    async def progress(self, file_id: str, store_id: str | None = None) -> tuple[int, int] | None:
        """Return how far the work on a file is, and of how much; None if it is done.

        Of several works that is the longest. With a store those for others do not count.
        """
        found = select(JobRow.num_done, JobRow.num_all).where(JobRow.file_id == file_id)
        if store_id is not None:
            found = found.where(JobRow.store_id.in_(("", store_id)))
        found = found.order_by(JobRow.num_all.desc())
        async with self._database.read() as session:
            row = (await session.execute(found)).first()
            return row if row is None else (row[0], row[1])

    async def postpone(self, job: JobRow, seconds: float, *, is_failure: bool = True) -> None:
        """Give a job back, to be begun again after so many seconds.

        Only a failure counts as one of its attempts.
        """
        values = {"owner": "", "leased_until": 0.0, "due_at": self._clock() + seconds}
        async with self._database.write() as session:
            await session.execute(
                update(JobRow)
                .where(JobRow.id == job.id, JobRow.owner == job.owner)
                .values(values | {"attempts": job.attempts - (not is_failure)})
            )

    async def finish(self, session: AsyncSession, job: JobRow) -> bool:
        """Delete a job within the transaction that keeps its result.

        Returns:
            Whether its lease still held; if not, another worker has the job, and nothing may be
            kept.
        """
        found = await session.execute(
            delete(JobRow)
            .where(JobRow.id == job.id, JobRow.owner == job.owner)
            .returning(JobRow.id)
        )
        return found.first() is not None

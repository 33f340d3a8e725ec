"""Runs of a fault under load, one after the other, and of a long load without one."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx

from tests.faults.breakages import BEHIND, Fault
from tests.faults.clients import NUM_QUESTIONS, Arrival, Clients, Outcome, Phase, arrivals
from tests.faults.judgement import Run, faults_of
from tests.faults.service import KEY, OTHERS, Service, grown
from tests.faults.table import as_markdown, formatted, row, row_not_tried

INJECTED_AT_S = 2.0
ROW_S = 600.0
READY_EVERY_S = 0.25

Serving = Callable[[], AbstractContextManager[Service]]


async def references(clients: Clients) -> tuple[list[str], float]:
    """Return the text of each question on a quiet server, and the answers a second."""
    await warm_up(clients)
    began = time.monotonic()
    outcomes: list[Outcome] = []
    for question in range(NUM_QUESTIONS):
        outcomes.append(await reference(clients, question))
    return [each.text for each in outcomes], NUM_QUESTIONS / (time.monotonic() - began)


async def reference(clients: Clients, question: int, num_tries: int = 3) -> Outcome:
    """Return what a quiet server answers; where a drafter was given up, it is asked again."""
    for _ in range(num_tries):
        (outcome,) = await clients.run([Arrival(0.0, "standard", question)])
        if outcome.end == "answered" and not outcome.is_declared:
            return outcome
    raise SystemExit(f"the quiet server did not answer: {outcome}")


async def warm_up(clients: Clients) -> None:
    """Ask ten questions, as the first call of everything is slow."""
    for index in range(0, 10, 2):
        await clients.run([Arrival(0.0, "standard", index), Arrival(0.0, "standard", index + 1)])


async def watch(url: str, path: str, says: str, seen: list[tuple[float, int, float]]) -> None:
    """Ask a route four times a second; only what has these words in it is an answer."""
    headers = {"authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=5.0) as http:
        while True:
            began, status = time.monotonic(), 0
            with contextlib.suppress(httpx.HTTPError):
                reply = await http.get(path)
                status = reply.status_code if says in reply.text else 0
            seen.append((began, status, time.monotonic() - began))
            await asyncio.sleep(max(0.0, began + READY_EVERY_S - time.monotonic()))


async def run_fault(
    service: Service, clients: Clients, name: str, fault: Fault, load: Sequence[Arrival]
) -> Run:
    """Break one thing under load, and return what was seen."""
    await asyncio.to_thread(fault.prepare, service)
    if fault.is_warm:
        await references(clients)
    sizes = await asyncio.to_thread(service.sizes)
    run = Run(name, fault.allowed)
    watching = [
        asyncio.create_task(watch(service.urls[-1], path, says, seen))
        for path, says, seen in (
            ("/ready", '"ready"', run.ready),
            ("/-/healthz", "success", run.health),
        )
    ]
    asking = asyncio.create_task(clients.run(load))
    await asyncio.sleep(INJECTED_AT_S)
    run.injected = time.monotonic()
    beside = await asyncio.to_thread(fault.inject, service)
    hostility = asyncio.ensure_future(beside) if beside is not None else None
    standard_s = max(each.at for each in load if each.phase == "standard")
    over = run.injected + standard_s - INJECTED_AT_S
    if fault.allowed.lost_s is not None:  # nothing comes back, and what asks Ray would wait
        await asyncio.sleep(over - time.monotonic())
        for task in (asking, *watching):
            task.cancel()
        return run
    whole = asyncio.create_task(service.whole_again(run.injected))
    await asyncio.sleep(max(0.0, over - time.monotonic()))
    if hostility is not None:
        hostility.cancel()
        await asyncio.gather(hostility, return_exceptions=True)
    run.outcomes = await asking
    for task in watching:
        task.cancel()
    run.left_alone_s = service.left_alone_s()
    await asyncio.to_thread(service.mend)
    run.whole_again_s = await whole
    if await service.whole_again(time.monotonic()) is None:
        run.whole_again_s = None
    run.leaks = await asyncio.to_thread(service.leaks, sizes)
    return run


@dataclass
class Report:
    """The rows of a run so far.

    Attributes:
        names: The faults that are to be tried.
        rows: Of the table.
        wrong: What is not as it must be, by fault, at the last time that it was tried.
        out: The file that has the table of the rows so far, as Markdown; None for no file.
    """

    names: Sequence[str]
    rows: list[tuple[str, ...]] = field(default_factory=list)
    wrong: dict[str, list[str]] = field(default_factory=dict)
    out: Path | None = None

    def keep(self) -> None:
        """Write the table; after each row, as a fault may end this process too."""
        if self.out is not None:
            about = "serve_config.yaml, two replicas a pool, chunks in a Qdrant of the tests"
            self.out.write_text(as_markdown(self.rows, self.wrong, about))

    @property
    def is_good(self) -> bool:
        """Whether every fault was tried, and cost no more than it may."""
        tried = {row[0] for row in self.rows}
        return tried == set(self.names) and not any(self.wrong.values())


def run_all(
    serving: Serving,
    report: Report,
    faults: Mapping[str, Fault],
    scale: float,
    seed: int,
    num_tries: int = 1,
) -> None:
    """Try every fault; a server that does not come back is replaced by a new one.

    Args:
        serving: Starts a server.
        report: Names the faults, and takes what is found.
        faults: All faults by name.
        scale: Factor of the lengths of the phases.
        seed: Of the load.
        num_tries: How often a fault is tried whose row is not good. The table has every row, and
            the last one counts: a pause of the whole machine looks like a fault of the server.
    """
    pending: list[str] = []
    for name in report.names:
        if (program := faults[name].needs) and not shutil.which(program):
            report.rows.append(row_not_tried(name, f"there is no {program} here"))
        else:
            pending.append(name)
    texts: list[str] = []
    capacity = 0.0
    runs: dict[str, Run] = {}
    while pending:
        with serving() as service:
            clients = Clients(service.urls, KEY)
            if texts:
                asyncio.run(warm_up(clients))
            else:
                texts, capacity = asyncio.run(references(clients))
                print(f"{capacity:.1f} answers a second, one after the other", flush=True)
            is_whole = True
            while pending and is_whole:
                name = pending.pop(0)
                fault = faults[name]
                run = tried(service, clients, name, fault, capacity, scale, seed)
                if not run.error:
                    runs[name] = run
                quiet = runs.get(fault.beside)
                report.rows.append(row(run, texts, quiet))
                report.wrong[name] = faults_of(run, texts, quiet)
                num_seen = sum(each[0] == name for each in report.rows)
                if report.wrong[name] and num_seen < num_tries:
                    pending.insert(0, name)
                print(f"{name}: {'; '.join(report.wrong[name]) or 'ok'}", flush=True)
                report.keep()
                is_whole = run.whole_again_s is not None and not fault.spends


def tried(
    service: Service,
    clients: Clients,
    name: str,
    fault: Fault,
    capacity: float,
    scale: float,
    seed: int,
) -> Run:
    """Try one fault; what stops the row itself is part of what was seen."""
    rate = fault.load * capacity
    if fault.tenants > 1:
        clients = replace(clients, others=OTHERS[: fault.tenants - 1])
    phases: list[tuple[Phase, float, float]] = [
        ("standard", 12 * scale + fault.lasts_s, 0.5 * rate),
        ("overflow", 5 * scale, 2.5 * rate),
        ("recovery", 10 * scale, 0.5 * rate),
    ]
    load = arrivals(phases, INJECTED_AT_S, seed, share_leaving=fault.share_leaving)
    trying = run_fault(service, clients, name, fault, load)
    try:
        return asyncio.run(asyncio.wait_for(trying, ROW_S))
    except Exception as error:
        return Run(name, fault.allowed, error=f"{type(error).__name__}: {error}"[:300])


async def soak(service: Service, minutes: float, seed: int) -> int:
    """Ask for so many minutes at half the capacity; print memory and descriptors by process.

    What grows in the second half is judged: in the first one caches and allocators may fill.
    """
    clients = Clients(service.urls, KEY)
    texts, capacity = await references(clients)
    await clients.run(arrivals([("standard", 60.0, 0.5 * capacity)], 1.0, seed))  # warms up
    sizes, began = [await asyncio.to_thread(service.sizes)], time.monotonic()
    run = Run("soak", BEHIND, began, whole_again_s=0.0)
    for half in range(2):
        phases: list[tuple[Phase, float, float]] = [("standard", 30 * minutes, 0.5 * capacity)]
        run.outcomes += await clients.run(arrivals(phases, 1.0, seed + half, share_leaving=0.1))
        sizes.append(await asyncio.to_thread(service.sizes))
    half_minutes = (time.monotonic() - began) / 120
    run.leaks = await asyncio.to_thread(service.leaks, sizes[0])
    print(formatted([row(run, texts, None)]), "\n")
    titles = f"{'process':<24}{'MB':>6}{'half':>6}{'after':>6}{'MB/min':>8}{'then':>6}"
    print(f"{titles}{'fds':>6}{'after':>6}")
    is_growing = False
    for kind, mbs, fds in grown(*sizes):
        first, second = (mbs[1] - mbs[0]) / half_minutes, (mbs[2] - mbs[1]) / half_minutes
        is_growing = is_growing or second > 1.0
        memory = "".join(f"{mb:>6.0f}" for mb in mbs)
        print(f"{kind:<24}{memory}{first:>8.2f}{second:>6.2f}{fds[0]:>6}{fds[-1]:>6}")
    for each in faults_of(run, texts, None):
        print(each)
    return is_growing or bool(faults_of(run, texts, None))

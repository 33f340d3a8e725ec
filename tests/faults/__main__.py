"""Break the parts of a running server one at a time, under load, and print what clients saw.

    make test-faults         every fault, about half an hour on two quiet cores
    make test-faults-quick   the few faults of the short form, within five minutes
    python -m tests.faults --only "kill Target engine" "stop proxy"
    python -m tests.faults --soak 30

The exit status is 1 if a row is not as it must be.

The server is the shipped application of `serve_config.yaml` with two replicas a pool, on a private
Ray on loopback. The load is open-loop: seeded questions in all modes, streamed and not, arrive as a
Poisson process at half of what the server was measured to answer (standard), at two and a half
times that (overflow), and at half again (recovery). The fault comes early in the standard phase.

A row has the requests of the three phases; how many were answered, with the text of the same
request on a quiet server, or with another because the receipt says that the drafter was lost;
refused (429 and 503 with `Retry-After`), failed and malformed errors; requests that nobody answered
within a minute; connections that broke, and how many of their requests got the same text by
`Last-Event-ID`; what an idle server still held; how often `/ready` denied what it could do; when
the last request ended that suffered, and when all replicas were back.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import httpx

from tests.faults.clients import (
    NUM_QUESTIONS,
    Arrival,
    Clients,
    Outcome,
    Phase,
    arrivals,
    hostile_bodies,
)
from tests.faults.engines import STICKY, WEDGED
from tests.faults.service import HOSTILE_KEY, KEY, Service, grown, served
from tests.faults.table import Allowed, Run, faults_of, formatted, row
from tests.ray_cluster import free_port

INJECTED_AT_S = 2.0
BEHIND, FRONT = Allowed(), Allowed(breaks=True)
KINDS = {
    "Target engine": BEHIND,
    "Drafter engine": BEHIND,
    "Target replica": BEHIND,
    "Drafter replica": BEHIND,
    "Orchestrator replica": BEHIND,
    "Retriever replica": BEHIND,
    "Ingress replica": FRONT,
    "proxy": FRONT,
    "controller": BEHIND,
}


@dataclass(frozen=True)
class Fault:
    """Something that breaks.

    Attributes:
        inject: Breaks it; a coroutine function runs beside the load until the standard phase ends.
        allowed: What it may cost.
        share_leaving: The share of clients that hang up.
    """

    inject: Callable[[Service], Awaitable[None] | None]
    allowed: Allowed = BEHIND
    share_leaving: float = 0.0


def faults() -> dict[str, Fault]:
    """Every fault by its name."""
    found = {"none": Fault(lambda service: None)}
    for verb, number in (("kill", signal.SIGKILL), ("stop", signal.SIGSTOP)):
        for kind, allowed in KINDS.items():
            found[f"{verb} {kind}"] = Fault(
                lambda service, k=kind, n=number: service.signal(k, n),  # type: ignore[misc]
                allowed,
            )
    for pool in ("Target", "Drafter"):
        for how in (STICKY, WEDGED):
            found[f"{how} {pool} engine"] = Fault(
                lambda service, p=pool, h=how: service.break_engine(p, h)  # type: ignore[misc]
            )
    found["30 % hang up"] = Fault(lambda service: None, share_leaving=0.3)
    found["live change"] = Fault(lambda service: service.change("api", max_choices=7))
    for section in ("target", "drafter"):
        for num_replicas in (1, 3):
            found[f"scale {section} to {num_replicas}"] = Fault(
                lambda service, s=section, n=num_replicas: service.scale(s, n)  # type: ignore[misc]
            )
    found["hostile bodies"] = Fault(long_bodies, Allowed(slows=2.0))
    found["hostile crowd"] = Fault(crowd, Allowed(slows=2.0))
    return found


QUICK = ("none", "kill Target engine", "kill Orchestrator replica", "kill Ingress replica",
         "sticky Target engine", "30 % hang up")  # fmt: skip


async def long_bodies(service: Service) -> None:
    """Send eight bodies of forty thousand messages, and leave after four seconds."""
    headers = {"authorization": f"Bearer {HOSTILE_KEY}", "content-type": "application/json"}
    bodies = await asyncio.to_thread(lambda: list(hostile_bodies()))
    async with httpx.AsyncClient(base_url=service.url, timeout=4.0) as http:

        async def send(content: bytes) -> None:
            with contextlib.suppress(httpx.HTTPError):
                await http.post("/v1/chat/completions", content=content, headers=headers)

        await asyncio.gather(*map(send, bodies))


async def crowd(service: Service) -> None:
    """Ask with 150 clients of one tenant, each again as soon as it is answered."""
    clients = Clients(service.url, HOSTILE_KEY)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=service.url, limits=limits) as http:

        async def ask(index: int) -> None:
            while True:
                outcome = await clients.ask(http, Arrival(0.0, "overflow", index % NUM_QUESTIONS))
                if outcome.end != "answered":
                    await asyncio.sleep(1.0)  # as its Retry-After asks

        await asyncio.gather(*map(ask, range(150)))


async def references(clients: Clients) -> tuple[list[str], float]:
    """Return the text of each question on a quiet server, and the answers a second."""
    for index in range(2):  # the first call of everything is slow
        await clients.run([Arrival(0.0, "standard", index)])
    began = time.monotonic()
    outcomes: list[Outcome] = []
    for question in range(NUM_QUESTIONS):
        outcomes += await clients.run([Arrival(0.0, "standard", question)])
    for outcome in outcomes:
        if outcome.end != "answered" or outcome.is_declared:
            raise SystemExit(f"the quiet server did not answer: {outcome}")
    return [each.text for each in outcomes], NUM_QUESTIONS / (time.monotonic() - began)


async def watch_ready(url: str, seen: list[tuple[float, int, float]]) -> None:
    """Ask ``/ready`` once a second."""
    headers = {"authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=5.0) as http:
        while True:
            began, status = time.monotonic(), 0
            with contextlib.suppress(httpx.HTTPError):
                status = (await http.get("/ready")).status_code
            seen.append((began, status, time.monotonic() - began))
            await asyncio.sleep(max(0.0, began + 1.0 - time.monotonic()))


async def run_fault(
    service: Service, clients: Clients, name: str, fault: Fault, load: Sequence[Arrival]
) -> Run:
    """Break one thing under load, and return what was seen."""
    sizes = await asyncio.to_thread(service.sizes)
    run = Run(name, fault.allowed, 0.0, [])
    watching = asyncio.create_task(watch_ready(service.url, run.ready))
    asking = asyncio.create_task(clients.run(load))
    await asyncio.sleep(INJECTED_AT_S)
    run.injected = time.monotonic()
    beside = await asyncio.to_thread(fault.inject, service)
    hostility = asyncio.ensure_future(beside) if beside is not None else None
    whole = asyncio.create_task(service.whole_again(run.injected))
    standard_s = max(each.at for each in load if each.phase == "standard")
    await asyncio.sleep(max(0.0, run.injected + standard_s - INJECTED_AT_S - time.monotonic()))
    if hostility is not None:
        hostility.cancel()
        await asyncio.gather(hostility, return_exceptions=True)
    run.outcomes = await asking
    watching.cancel()
    await asyncio.to_thread(service.mend)
    run.whole_again_s = await whole
    if await service.whole_again(time.monotonic()) is None:
        run.whole_again_s = None
    run.leaks = await asyncio.to_thread(service.leaks, sizes)
    return run


async def run_all(service: Service, names: Sequence[str], scale: float, seed: int) -> int:
    clients = Clients(service.url, KEY)
    texts, capacity = await references(clients)
    print(f"{capacity:.1f} answers a second, one after the other", flush=True)
    phases: list[tuple[Phase, float, float]] = [
        ("standard", 12 * scale, 0.5 * capacity),
        ("overflow", 5 * scale, 2.5 * capacity),
        ("recovery", 10 * scale, 0.5 * capacity),
    ]
    rows, num_wrong, quiet = [], 0, None
    try:
        for name in names:
            fault = faults()[name]
            load = arrivals(phases, INJECTED_AT_S, seed, share_leaving=fault.share_leaving)
            run = await run_fault(service, clients, name, fault, load)
            rows.append(row(run, texts, quiet))
            found = faults_of(run, texts, quiet)
            num_wrong += bool(found)
            quiet = run if name == "none" else quiet
            print(f"{name}: {'; '.join(found) or 'ok'}", flush=True)
            if run.whole_again_s is None:
                print("The replicas did not come back: the other faults are not tried.")
                break
    finally:  # also after Ctrl-C
        print(f"\n{formatted(rows)}\n", flush=True)
    return num_wrong > 0 or len(rows) < len(names)


async def soak(service: Service, minutes: float, seed: int) -> int:
    """Ask for so many minutes at half the capacity; print memory and descriptors by process."""
    clients = Clients(service.url, KEY)
    texts, capacity = await references(clients)
    await clients.run(arrivals([("standard", 60.0, 0.5 * capacity)], 1.0, seed))  # warms up
    before, began = await asyncio.to_thread(service.sizes), time.monotonic()
    load = arrivals([("standard", 60 * minutes, 0.5 * capacity)], 1.0, seed, share_leaving=0.1)
    run = Run("soak", BEHIND, began, await clients.run(load), whole_again_s=0.0)
    run.leaks = await asyncio.to_thread(service.leaks, before)
    after, minutes = await asyncio.to_thread(service.sizes), (time.monotonic() - began) / 60
    print(formatted([row(run, texts, None)]), "\n")
    print(f"{'process':<24}{'MB before':>10}{'after':>8}{'MB/min':>8}{'fds':>6}{'after':>7}")
    is_growing = False
    for kind, mb, mb_after, fds, fds_after in grown(before, after):
        per_minute = (mb_after - mb) / minutes
        is_growing = is_growing or per_minute > 1.0
        print(f"{kind:<24}{mb:>10}{mb_after:>8}{per_minute:>8.2f}{fds:>6}{fds_after:>7}")
    for each in faults_of(run, texts, None):
        print(each)
    return is_growing or bool(faults_of(run, texts, None))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="the short form")
    parser.add_argument("--only", nargs="+", choices=faults(), metavar="FAULT")
    parser.add_argument("--soak", type=float, metavar="MINUTES", help="no fault, memory by process")
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    names = asked.only or (QUICK if asked.quick else list(faults()))
    with served(free_port()) as service:
        if asked.soak:
            return asyncio.run(soak(service, asked.soak, asked.seed))
        return asyncio.run(run_all(service, names, 0.5 if asked.quick else 1.0, asked.seed))


if __name__ == "__main__":
    sys.exit(main())

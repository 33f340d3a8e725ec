"""What is broken, how, and what it may cost."""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from tests.faults.engines import STICKY, WEDGED
from tests.faults.hostile import (
    Hostility,
    abandoned_documents,
    crowd,
    half_open,
    long_bodies,
    long_heads,
    new_documents,
    slow_bodies,
)
from tests.faults.judgement import Allowed
from tests.faults.service import Service

BEHIND, FRONT = Allowed(), Allowed(breaks=True)
DRAFTING, RETRIEVING = ("fused",), ("fused", "rag")  # modes that are refused without these
KINDS = {
    "Target engine": BEHIND,
    "Drafter engine": Allowed(refuses=DRAFTING),
    "Target replica": BEHIND,
    "Drafter replica": Allowed(refuses=DRAFTING),
    "Orchestrator replica": BEHIND,
    "Retriever replica": BEHIND,
    "Ingress replica": FRONT,
    "proxy": FRONT,
    "controller": BEHIND,
}
LEAVES_S = {STICKY: 5.0, WEDGED: 15.0}
CHANGE = Allowed(slows=3.0, share=0.99)


@dataclass(frozen=True)
class Fault:
    """Something that breaks.

    Attributes:
        inject: Breaks it; a coroutine function runs beside the load until the standard phase ends.
        allowed: What it may cost.
        share_leaving: The share of clients that hang up.
        prepare: Done before anybody asks.
        lasts_s: Seconds by which the standard phase is longer than others, so that it covers all.
        load: Factor of the load: below 1 where the server is slower after `prepare`, or shared.
        beside: The row whose first tokens are compared with.
        tenants: How many tenants the clients are of.
        is_warm: Whether every question has been asked before, with the key that it comes with.
        spends: Whether the next fault needs a new server.
        needs: A program without which it is not tried.
    """

    inject: Callable[[Any], Awaitable[None] | None] = lambda service: None
    allowed: Allowed = BEHIND
    share_leaving: float = 0.0
    prepare: Callable[[Any], None] = lambda service: None
    lasts_s: float = 0.0
    load: float = 1.0
    beside: str = "none"
    tenants: int = 1
    is_warm: bool = False
    spends: bool = False
    needs: str = ""


def faults() -> dict[str, Fault]:
    """Every fault of one node by its name."""
    return dict(_faults())


QUICK = ("none", "kill Target engine", "kill Orchestrator replica", "kill Ingress replica",
         "sticky Target engine", "30 % hang up")  # fmt: skip


def _faults() -> Iterator[tuple[str, Fault]]:
    yield "none", Fault(lasts_s=10.0)
    yield (
        "none, half the load",
        Fault(prepare=Service.keep_chunks_inside, lasts_s=30.0, load=0.5, is_warm=True),
    )
    for verb, number in (("kill", signal.SIGKILL), ("stop", signal.SIGSTOP)):
        for kind, allowed in KINDS.items():
            name = f"{verb} {kind}"
            if name == "stop Target engine":
                allowed = Allowed(pause_s=15.0)
            yield name, Fault(partial(_signal, kind, number), allowed)
    for pool in ("Target", "Drafter"):
        for how, leaves_s in LEAVES_S.items():
            yield (
                f"{how} {pool} engine",
                Fault(
                    partial(_break_engine, pool, how),
                    Allowed(leaves_s=leaves_s, refuses=DRAFTING if pool == "Drafter" else ()),
                ),
            )
    for verb, number in (("kill", signal.SIGKILL), ("stop", signal.SIGSTOP)):
        yield (
            f"{verb} Target follower",
            Fault(
                partial(_signal, "Target follower", number),
                Allowed(pause_s=15.0),
                prepare=Service.split_targets,
                load=0.5,  # twice as many processes compute on the same cores
            ),
        )
    yield "30 % hang up", Fault(share_leaving=0.3)
    yield "live change", Fault(lambda service: service.change("api", max_choices=7))
    for section in ("target", "drafter"):
        for num_replicas in (1, 3):
            yield (
                f"scale {section} to {num_replicas}",
                Fault(partial(_scale, section, num_replicas), CHANGE, lasts_s=10.0),
            )
    yield "rolling upgrade", Fault(Service.upgrade, CHANGE, lasts_s=20.0)
    yield (
        "drafters at rest",
        Fault(allowed=Allowed(refuses=DRAFTING), prepare=Service.rest_drafters, lasts_s=10.0),
    )
    yield (
        "Qdrant emptied",
        Fault(lambda service: service.qdrant.empty(), Allowed(alone_s=15.0, refuses=RETRIEVING)),
    )
    yield (
        "Qdrant stopped",
        Fault(lambda service: service.qdrant.stop(), Allowed(refuses=RETRIEVING, lasts=True)),
    )
    yield (
        "Qdrant started",
        Fault(
            lambda service: service.qdrant.start(),
            Allowed(alone_s=15.0, refuses=RETRIEVING),
            prepare=lambda service: service.qdrant.stop(),
            lasts_s=10.0,
        ),
    )
    for name, hostility, allowed, tenants in (
        ("bodies", long_bodies, Allowed(slows=2.0), 1),
        ("crowd", crowd, Allowed(slows=2.0, ready_s=0.1), 1),
        ("new documents", new_documents, Allowed(slows=2.0), 3),
        ("long header", long_heads, Allowed(slows=2.0, health_s=1.0), 1),
        ("slow bodies", slow_bodies, Allowed(slows=2.0), 1),
        ("half-open", half_open, Allowed(slows=2.0), 1),
        # Sixty megabytes are parsed and tokenized on the cores of the others.
        ("abandoned documents", abandoned_documents, Allowed(slows=3.0), 1),
    ):
        yield (
            f"hostile {name}",
            Fault(
                Service.let_hostile_loose,
                allowed,
                prepare=partial(_prepare_hostile, hostility),
                lasts_s=30.0,
                load=0.5,  # half of what is left to the others when capacity is shared by two
                beside="none, half the load",
                tenants=tenants,
                is_warm=True,
            ),
        )
    # The last, because a Ray that is lost may end the process that drives it.
    yield (
        "kill raylet",
        Fault(Service.kill_raylet, Allowed(lost_s=15.0), lasts_s=30.0, spends=True),
    )


def _prepare_hostile(hostility: Hostility, service: Service) -> None:
    service.keep_chunks_inside()
    service.prepare_hostile(hostility)


def _signal(kind: str, number: signal.Signals, service: Service) -> None:
    service.signal(kind, number)


def _break_engine(pool: str, how: str, service: Service) -> None:
    service.break_engine(pool, how)


def _scale(section: str, num_replicas: int, service: Service) -> None:
    service.scale(section, num_replicas)

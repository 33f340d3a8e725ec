"""Signs of life of an application's processes, which do not need Serve's controller.

Each replica and each engine is asked about once a second, and nobody waits for one that does not
answer. A process that is stopped gives no sign, whatever Serve says of it: Serve replaces a hung
replica after three health checks, also an orchestrator whose event loop stands still.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, Literal

import ray
from ray.actor import ActorHandle

from cluster.serve_internals import ask_in_actor, replica_of, request_sign
from deployments.pools.engine_actor import engines_of
from deployments.pools.passage_reports import report_passages
from rapid.engine_status import EngineStatus
from rapid.ports import Clock

_WAIT_S = 1.0  # for a process to answer, before it is asked again
_FRESH_S = 10.0  # ten askings, as a starved process may miss some
_SHOWN = (  # of an engine's status
    *("leases_open", "leases_waiting", "max_leases"),
    *("kv_pages_in_use", "kv_pages_total", "page_tokens", "max_context", "tokens_waiting"),
    *("host_tokens", "host_tokens_restored", "disk_tokens", "disk_tokens_read"),
)


@dataclass(frozen=True, order=True, slots=True)
class PoolProcess:
    """A replica or an engine.

    Attributes:
        pool: Its pool, such as ``target``.
        name: Its own name in the pool.
        is_engine: Whether it is an engine.
    """

    pool: str
    name: str
    is_engine: bool


Standing = Literal["alive", "silent", "gone"]
"""State of a process: it gave a sign within ten seconds, it is silent, or it is not there."""

Ask = Callable[[], "Future[Any]"]
"""Function that asks a process for a sign: an engine for its status, an orchestrator for how its
drafter reads passages, and a target's replica for anything."""


class Signs:
    """The last sign of life of each process of an application, with its time."""

    def __init__(
        self, find: Callable[[], Mapping[PoolProcess, Ask]], clock: Clock = time.monotonic
    ) -> None:
        """Know no process; `find` and `ask` are called by threads of their own, again and again.

        Args:
            find: Function that returns the running processes; it may block.
            clock: Monotonic seconds.
        """
        self._find, self._clock = find, clock
        self._known: Mapping[PoolProcess, Ask] = {}
        self._asked: dict[PoolProcess, Future[Any]] = {}
        self._said: dict[PoolProcess, tuple[float, Any]] = {}

    def find(self) -> None:
        """Look which processes there are."""
        self._known = self._find()

    def ask(self) -> None:
        """Ask every process that owes no answer, and take what comes within a second."""
        if not self._known:  # at the start: the first answer is ready as early as can be
            self.find()
        known = self._known
        asked = {each: future for each, future in self._asked.items() if each in known}
        for process, ask in known.items():
            if process not in asked:
                asked[process] = ask()
        wait(asked.values(), timeout=_WAIT_S)
        now = self._clock()
        said = {each: answer for each, answer in self._said.items() if each in known}
        self._asked = {}
        for process, future in asked.items():
            if not future.done():
                self._asked[process] = future
            elif future.exception() is None:
                said[process] = (now, future.result())
        self._said = said

    def standing(self, pool: str, *, is_engine: bool) -> Standing:
        """Return how the replicas or the engines of a pool stand: as the best of them does."""
        found = [each for each in self._known if each.pool == pool and each.is_engine == is_engine]
        if not found:
            return "gone"
        now, said = self._clock(), self._said
        is_alive = any(each in said and now - said[each][0] <= _FRESH_S for each in found)
        return "alive" if is_alive else "silent"

    def is_silent(self, pool: str, replica: str) -> bool:
        """Return whether a replica has fallen silent while another one of its pool has not.

        If none gives a sign, it may be this process that stands still.
        """
        now, said = self._clock(), self._said
        ages = {each.name: now - said[each][0] for each in said if each.pool == pool}
        is_late = ages.pop(replica, 0.0) > _FRESH_S
        return is_late and any(age <= _FRESH_S for age in ages.values())

    def passages(self) -> list[dict[str, Any]]:
        """Return how the drafter of each orchestrator reads passages, where it keeps any."""
        said = {each: answer for each, (_, answer) in self._said.items() if each in self._known}
        return [
            {"name": f"{each.pool}/{each.name}", **said[each]}
            for each in sorted(said)
            if isinstance(said[each], dict) and said[each]
        ]

    def engines(self) -> list[dict[str, Any]]:
        """Return the status of every engine; one that is silent is ``unavailable``."""
        now, said = self._clock(), self._said
        return [
            _ledger(
                each, said[each][1] if each in said and now - said[each][0] <= _FRESH_S else None
            )
            for each in sorted(self._known)
            if each.is_engine
        ]


def _ledger(engine: PoolProcess, status: EngineStatus | None) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": f"{engine.pool}/{engine.name}", "pool": engine.pool}
    if status is None:  # loading, stopping, closed or too slow
        return entry | {"status": "unavailable"}
    return entry | {
        "status": "ok",
        **{name: getattr(status, name) for name in _SHOWN},
    }


def processes_of(app: str, targets: Mapping[str, str]) -> dict[PoolProcess, Ask]:
    """Return the engines of an application, and the replicas that requests need.

    The call blocks while it asks Ray for them.

    Args:
        app: The application's name.
        targets: The pool of targets of each pool of orchestrators.
    """
    found: dict[PoolProcess, Ask] = {}
    for name, engine in engines_of(app).items():
        _, pool, own = name.rsplit("/", 2)
        process = PoolProcess(pool.lower(), own, is_engine=True)
        found[process] = functools.partial(_ask_status, engine)
    for actor in ray.util.list_named_actors(all_namespaces=True):
        pool, own = replica_of(app, actor["namespace"], actor["name"])
        with contextlib.suppress(ValueError):  # it died after it was listed
            if pool in targets or pool in targets.values():
                replica = ray.get_actor(actor["name"], actor["namespace"])
                process = PoolProcess(pool, own, is_engine=False)
                ask = _ask_passages if pool in targets else request_sign
                found[process] = functools.partial(ask, replica)
    return found


def _ask_passages(orchestrator: ActorHandle) -> Future[Any]:
    told: Future[Any] = ask_in_actor(orchestrator, report_passages).future()
    return told


def _ask_status(engine: ActorHandle) -> Future[Any]:
    status: Future[Any] = engine.status.remote().future()
    return status

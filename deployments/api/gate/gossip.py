"""A board on which the replicas of the ingress read what tenants have at the other replicas."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import ray

from deployments.api.gate.shares import Shares, Use
from rapid.ports import Clock

_log = logging.getLogger(__name__)

_LOOK_S = 0.05  # between two looks whether there is something to tell
_TELL_S = 1.0  # after which an ingress tells the others that it lives
_STALE_S = 3.0  # after which a silent ingress has nothing in progress
_NAMESPACE = "rapid-ingress"

Tell = Callable[[Use], Awaitable[Use]]
"""Function that writes this replica's use to the board and returns that of all others together."""


class Board:
    """The requests of every tenant by replica of the ingress, as told in the last seconds."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._told: dict[str, tuple[float, Use]] = {}

    def tell(self, replica: str, use: Use) -> Use:
        """Take a replica's use, and return that of all others together, by tenant.

        Requests in progress add up. What a tenant wants does not: each replica says what it wants
        at all of them.
        """
        now = self._clock()
        self._told[replica] = (now, use)
        self._told = {name: each for name, each in self._told.items() if now - each[0] <= _STALE_S}
        others: Use = {}
        for name, (_, told) in self._told.items():
            if name == replica:
                continue
            for tenant, (held, wanted) in told.items():
                so_far = others.get(tenant, (0, 0))
                others[tenant] = so_far[0] + held, max(so_far[1], wanted)
        return others


async def keep_in_step(shares: Shares, tell: Tell) -> None:
    """Tell the board of each change at once, and that this replica lives; for ever.

    While the board is away each replica goes by its own requests, as if there were no other.

    Args:
        shares: The shares of this replica.
        tell: Writes to the board and reads it.
    """
    told: Use = {}
    is_away = False
    told_at = -_TELL_S
    while True:
        await asyncio.sleep(_LOOK_S)
        use, now = shares.use(), time.monotonic()
        if not shares.are_shared:  # any more: what others had is of no meaning
            shares.learn({})
            continue
        if use == told and now - told_at < _TELL_S:
            continue
        try:
            async with asyncio.timeout(_STALE_S):
                shares.learn(await tell(use))
            is_away = False
        except Exception as error:  # its process died, with that of the replica that started it
            shares.learn({})
            if not is_away:
                _log.warning("the other ingresses cannot be seen: %s", type(error).__name__)
            is_away = True
        told, told_at = use, now


def board_of(application: str) -> Tell:
    """Return the function that tells an application's board, which the first caller starts."""
    name, call = uuid.uuid4().hex, call_shared(Board, application)

    async def tell(use: Use) -> Use:
        found: Use = await call("tell", name, use)
        return found

    return tell


def call_shared(board: type, name: str) -> Callable[..., Awaitable[Any]]:
    """Return the function that calls a method of a board, which the first caller starts.

    The board is an actor of the replica that started it. When that ends, another one starts a new
    board, which knows everything as soon as each replica has told it.
    """
    actor: Any = None

    def start() -> Any:
        options = {"name": name, "namespace": _NAMESPACE, "num_cpus": 0}
        return ray.remote(board).options(get_if_exists=True, **options).remote()

    async def call(method: str, *arguments: Any) -> Any:
        nonlocal actor
        if actor is None:
            actor = await asyncio.to_thread(start)
        try:
            return await getattr(actor, method).remote(*arguments)
        except Exception:
            actor = None
            raise

    return call

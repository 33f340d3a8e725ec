"""One call of a leased engine, awaited: how long it may take, and who is to blame if it fails."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable
from typing import Any

from cluster.leases import HeldLease
from rapid.errors import (
    DrafterHangs,
    DrafterUnavailable,
    EngineFailed,
    RapidError,
    TargetUnavailable,
)

_LOOK_S = 1.0  # for a block to arrive: tells a drafter that hangs from a target that does
_LOOK_EVERY_S = 2.0  # that a call may take before its engine is asked whether it lives
_FAILURES = (TargetUnavailable, EngineFailed, DrafterUnavailable, DrafterHangs)


class EngineSilent(Exception):
    """The engine that was called gives no sign of life."""


class BlockOverdue(Exception):
    """The block that a call waits for has not been drafted in time."""


async def await_answer(
    lease: HeldLease,
    reference: Awaitable[Any],
    *,
    silent_s: float,
    block: Awaitable[object] | None = None,
    limit_s: float = math.inf,
) -> Any:
    """Return the answer of a lease's engine, which may take long while the engine lives.

    Args:
        lease: The lease whose engine was called.
        reference: The call.
        silent_s: Longest wait for a sign of life, in seconds.
        block: The block that the call waits for, if it is still being drafted.
        limit_s: Longest wait for the block, in seconds.

    Raises:
        EngineSilent: The engine gives no sign of life.
        BlockOverdue: The block has not come in time.
        Exception: What the call raised (`cluster.remote_failures.failure_of`).
    """
    call = asyncio.ensure_future(reference)
    call.add_done_callback(_retrieve)
    drafted_by = time.monotonic() + limit_s
    try:
        while True:
            after_s = min(_LOOK_EVERY_S, max(drafted_by - time.monotonic(), 0.0))
            if await lease.is_over(call, after_s=after_s, silent_s=silent_s):
                break
            if block is not None and time.monotonic() >= drafted_by:
                if not await _has_come(block):
                    raise BlockOverdue
                drafted_by = math.inf  # the engine is slow
    except TimeoutError:
        raise EngineSilent from None
    finally:
        call.cancel()
    return call.result()


def blaming(lease: HeldLease, error: RapidError) -> RapidError:
    """Return `error`; if it is a failure of the lease's engine, blame that."""
    if isinstance(error, _FAILURES):
        lease.blame()
    return error


def _retrieve(call: asyncio.Future[Any]) -> None:
    """Retrieve an error that nobody may wait for any more, so that asyncio does not report it."""
    if not call.cancelled():
        call.exception()


async def _has_come(block: Awaitable[object]) -> bool:
    """Return whether a block was drafted or failed, waiting `_LOOK_S` seconds; this fetches it."""
    try:
        async with asyncio.timeout(_LOOK_S):
            await block
    except TimeoutError:
        return False
    except Exception:
        return True
    return True

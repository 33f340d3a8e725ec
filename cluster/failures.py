"""Attribution of remote failures to actors, and their translation into `rapid.errors`.

A call to one engine can fail because of another: when a block is passed by reference and its
drafter died, ``verify`` fails with the *drafter's* actor id.
"""

from __future__ import annotations

import logging

import grpc  # type: ignore[import-untyped]
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import DeploymentUnavailableError

from rapid.errors import EngineFailed, RapidError

logger = logging.getLogger(__name__)


def unwrapped(error: BaseException) -> BaseException:
    """Return the exception that was raised remotely, without Ray's wrappers."""
    while isinstance(error, RayTaskError) and isinstance(error.cause, BaseException):
        error = error.cause
    return error


def is_death_of(error: BaseException, actor: ActorHandle) -> bool:
    """Return whether `error` says that `actor` died or cannot be reached."""
    cause = unwrapped(error)
    return isinstance(cause, RayActorError) and cause.actor_id == actor._actor_id.hex()


def has_gone_away(error: BaseException) -> bool:
    """Return whether `error` says that one replica died or is closing, so another may answer."""
    if isinstance(error, grpc.aio.AioRpcError):
        return bool(error.code() == grpc.StatusCode.CANCELLED)
    return isinstance(error, RayActorError)


def is_loss(error: BaseException) -> bool:
    """Return whether `error` says that the callee is gone or cannot be reached."""
    cause = unwrapped(error)
    if isinstance(cause, RuntimeError):  # raised by Serve when a replica closed before it answered
        return str(cause).startswith("Unexpected error (StatusCode.")
    return isinstance(cause, RayActorError | DeploymentUnavailableError | grpc.RpcError)


def as_rapid_error(error: BaseException, who: str, lost: type[RapidError]) -> RapidError:
    """Return a remote failure as a `RapidError`.

    This is the `RapidError` that was raised remotely, `lost` when the callee was lost, and
    `EngineFailed` otherwise. The message of another exception may name hosts and hold text of other
    requests, so it is logged and not returned.

    Args:
        error: The failure of the call.
        who: Name of the callee, for messages.
        lost: Error class for a lost callee.
    """
    cause = unwrapped(error)
    if isinstance(cause, RapidError):
        return cause
    logger.warning("the %s failed: %r", who, cause)
    if is_loss(cause):
        return lost(f"The {who} was lost.")
    return EngineFailed(f"The {who} failed; the server's log says why.")

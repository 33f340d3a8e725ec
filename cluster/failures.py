"""Which actor a failure belongs to, and what was raised in it.

An engine's call can fail for another engine's reason: a block that is passed by reference and whose
drafter died makes ``verify`` fail with the *drafter's* actor id.
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
    """The exception that was raised remotely, below any number of Ray's wrappings."""
    while isinstance(error, RayTaskError) and isinstance(error.cause, BaseException):
        error = error.cause
    return error


def is_death_of(error: BaseException, actor: ActorHandle) -> bool:
    """Whether `error` says that `actor` died or cannot be reached."""
    cause = unwrapped(error)
    return isinstance(cause, RayActorError) and cause.actor_id == actor._actor_id.hex()


def has_gone_away(error: BaseException) -> bool:
    """Whether one replica died or is closing, so that another may answer."""
    if isinstance(error, grpc.aio.AioRpcError):
        return bool(error.code() == grpc.StatusCode.CANCELLED)
    return isinstance(error, RayActorError)


def is_loss(error: BaseException) -> bool:
    """Whether `error` says that whoever was asked is gone, or that the way to it is."""
    cause = unwrapped(error)
    if isinstance(cause, RuntimeError):  # Serve's, for a replica that closed before it answered
        return str(cause).startswith("Unexpected error (StatusCode.")
    return isinstance(cause, RayActorError | DeploymentUnavailableError | grpc.RpcError)


def as_rapid_error(error: BaseException, who: str, lost: type[RapidError]) -> RapidError:
    """A remote failure as one of ours: what was raised there, or `lost` when `who` is not reached.

    Anything else is a bug over there. Its words may name hosts and hold other people's text, so
    they are for the log and not for the caller.
    """
    cause = unwrapped(error)
    if isinstance(cause, RapidError):
        return cause
    logger.warning("the %s failed: %r", who, cause)
    if is_loss(cause):
        return lost(f"The {who} was lost.")
    return EngineFailed(f"The {who} failed; the server's log says why.")

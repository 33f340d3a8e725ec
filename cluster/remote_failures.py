"""Classification of failed remote calls.

A failure names its actor, as a call to one engine can fail because of another: when a block is
passed by reference and its drafter died, ``verify`` fails with the *drafter's* actor id.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from enum import Enum, auto

import grpc  # type: ignore[import-untyped]
from ray.actor import ActorHandle
from ray.exceptions import (
    ActorDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayTaskError,
)
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from cluster.serve_internals import actor_id, is_unaccepted_stream
from rapid.errors import EngineFailed, Overloaded, RapidError

logger = logging.getLogger(__name__)


class FailureKind(Enum):
    """The ways in which a remote call fails."""

    DIED = auto()  # the actor's process has ended
    SILENT = auto()  # the actor cannot be reached; it may have died, and it may answer again
    CLOSING = auto()  # the replica cancelled the call because it shuts down
    UNREACHABLE = auto()  # no replica has taken the call
    SATURATED = auto()  # the queue of the deployment is full
    OBJECT_LOST = auto()  # an object that was passed by reference was lost with its machine
    RAISED = auto()  # the callee raised an exception of its own


@dataclass(frozen=True, slots=True)
class Failure:
    """The failure of a remote call.

    Attributes:
        cause: The exception that was raised remotely, without Ray's wrappers.
        actor_id: Id of the actor that died or is silent, in hex.
    """

    kind: FailureKind
    cause: BaseException
    actor_id: str | None = None

    @property
    def is_of_one_replica(self) -> bool:
        """Whether one replica died or is closing, so that another may answer."""
        return self.kind in (FailureKind.DIED, FailureKind.SILENT, FailureKind.CLOSING)

    @property
    def is_loss(self) -> bool:
        """Whether the callee is gone or cannot be reached."""
        return self.is_of_one_replica or self.kind is FailureKind.UNREACHABLE

    def is_death_of(self, actor: ActorHandle) -> bool:
        """Return whether `actor` died or is silent."""
        return self.actor_id == actor_id(actor)

    def as_rapid_error(self, who: str, lost: type[RapidError]) -> RapidError:
        """Return the `RapidError` that was raised remotely, or one that names the callee as `who`.

        It is `lost` when the callee was lost, `Overloaded` when its queue is full, and
        `EngineFailed` otherwise.
        """
        if isinstance(self.cause, RapidError):
            return self.cause
        # Messages may hold host names or text of other requests: they are logged, not returned.
        logger.warning("the %s failed: %r", who, self.cause)
        if self.is_loss:
            return lost(f"The {who} was lost.")
        if self.kind is FailureKind.SATURATED:
            return Overloaded(f"The queue of the {who} is full.")
        return EngineFailed(f"The {who} failed; the server's log says why.")


def failure_of(error: BaseException) -> Failure:
    """Classify an exception that a call of an actor, or of a Serve handle, raised."""
    while isinstance(error, RayTaskError) and isinstance(error.cause, BaseException):
        error = error.cause
    if isinstance(error, RayActorError):
        died = isinstance(error, ActorDiedError)
        return Failure(FailureKind.DIED if died else FailureKind.SILENT, error, error.actor_id)
    return Failure(_kind_of(error), error)


def _kind_of(error: BaseException) -> FailureKind:
    match error:
        case grpc.aio.AioRpcError() if error.code() == grpc.StatusCode.CANCELLED:
            return FailureKind.CLOSING
        case grpc.RpcError() | DeploymentUnavailableError():
            return FailureKind.UNREACHABLE
        case _ if is_unaccepted_stream(error):
            return FailureKind.UNREACHABLE
        case BackPressureError():
            return FailureKind.SATURATED
        case OutOfMemoryError():  # Ray's monitor of memory killed the process; it names no actor
            return FailureKind.DIED
        case ObjectLostError():
            return FailureKind.OBJECT_LOST
        case _:
            return FailureKind.RAISED

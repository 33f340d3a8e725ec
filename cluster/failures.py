"""Which actor a failure belongs to, and what was raised in it.

An engine's call can fail for another engine's reason: a block that is passed by reference and whose
drafter died makes ``verify`` fail with the *drafter's* actor id.
"""

from __future__ import annotations

from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayTaskError


def unwrapped(error: BaseException) -> BaseException:
    """The exception that was raised remotely, below any number of Ray's wrappings."""
    while isinstance(error, RayTaskError) and isinstance(error.cause, BaseException):
        error = error.cause
    return error


def is_death_of(error: BaseException, actor: ActorHandle) -> bool:
    """Whether `error` says that `actor` died or cannot be reached."""
    cause = unwrapped(error)
    return isinstance(cause, RayActorError) and cause.actor_id == actor._actor_id.hex()

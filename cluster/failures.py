"""Which actor a failure belongs to, and what was raised in it.

An engine's call can fail for another engine's reason: a block that is passed by reference and whose
drafter died makes ``verify`` fail with the *drafter's* actor id.
"""

from __future__ import annotations

from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayTaskError

from rapid.errors import EngineFailed, RapidError


def unwrapped(error: BaseException) -> BaseException:
    """The exception that was raised remotely, below any number of Ray's wrappings."""
    while isinstance(error, RayTaskError) and isinstance(error.cause, BaseException):
        error = error.cause
    return error


def is_death_of(error: BaseException, actor: ActorHandle) -> bool:
    """Whether `error` says that `actor` died or cannot be reached."""
    cause = unwrapped(error)
    return isinstance(cause, RayActorError) and cause.actor_id == actor._actor_id.hex()


def as_rapid_error(error: BaseException, who: str, lost: type[RapidError]) -> RapidError:
    """A remote failure as one of ours: what was raised there, or `lost` when `who` died."""
    cause = unwrapped(error)
    if isinstance(cause, RapidError):
        return cause
    what = (str(cause).strip().splitlines() or [type(cause).__name__])[0]
    if isinstance(cause, RayActorError):
        return lost(f"The {who} was lost: {what}")
    return EngineFailed(f"The {who} failed: {what}")

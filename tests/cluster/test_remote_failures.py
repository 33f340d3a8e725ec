from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import grpc  # type: ignore[import-untyped]
import pytest
from grpc import StatusCode
from grpc.aio import AioRpcError, Metadata
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    ObjectLostError,
    OutOfMemoryError,
    RayTaskError,
)
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from cluster.remote_failures import FailureKind, failure_of
from rapid.errors import DrafterUnavailable, EngineFailed, Overloaded, TargetUnavailable

DRAFTER, TARGET = bytes(range(16)), bytes(range(16, 32))


def actor(actor_id: bytes) -> Any:
    return SimpleNamespace(_actor_id=SimpleNamespace(hex=actor_id.hex))


def remote(cause: Exception, depth: int = 1) -> BaseException:
    """What a caller catches when `cause` was raised in an actor, `depth` calls away."""
    error: BaseException = cause
    for _ in range(depth):
        error = RayTaskError("verify", "Traceback ...", error).as_instanceof_cause()
    return error


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_the_cause_is_found_below_every_wrapping(depth: int) -> None:
    cause = Overloaded("full", 3.0)
    failure = failure_of(remote(cause, depth))
    assert failure.cause is cause
    assert failure.as_rapid_error("target", TargetUnavailable) is cause


def test_a_death_belongs_to_the_actor_that_it_names() -> None:
    """A block whose drafter died fails the target's call with the drafter's id."""
    death = failure_of(remote(ActorUnavailableError("gone", DRAFTER)))
    assert death.is_death_of(actor(DRAFTER))
    assert not death.is_death_of(actor(TARGET))
    assert not failure_of(ValueError()).is_death_of(actor(DRAFTER))


def test_what_died_is_told_in_one_line() -> None:
    death = ActorUnavailableError("gone\nwith a long story", DRAFTER)
    error = failure_of(death).as_rapid_error("drafter", DrafterUnavailable)
    assert isinstance(error, DrafterUnavailable)
    assert str(error) == "The drafter was lost."


def test_a_full_queue_is_no_bug_of_the_callee() -> None:
    error = failure_of(BackPressureError(2, 1)).as_rapid_error("Target pool", TargetUnavailable)
    assert isinstance(error, Overloaded)
    assert str(error) == "The queue of the Target pool is full."
    assert error.retry_after_s is None


def test_who_was_killed_to_free_memory_is_lost() -> None:
    """Ray's monitor kills processes of a full machine, and its error names no actor."""
    killed = failure_of(OutOfMemoryError("2 workers were killed"))  # type: ignore[no-untyped-call]
    assert killed.is_of_one_replica
    assert isinstance(killed.as_rapid_error("target", TargetUnavailable), TargetUnavailable)


class Refused(grpc.RpcError):
    """What gRPC raises when a call does not get through."""


@pytest.mark.parametrize(
    "error",
    [
        Refused(),
        DeploymentUnavailableError("Drafter"),  # type: ignore[arg-type]
        RuntimeError("Unexpected error (StatusCode.CANCELLED): the server is closing."),
    ],
)
def test_who_cannot_be_reached_is_lost_as_well(error: Exception) -> None:
    lost = failure_of(error).as_rapid_error("drafter", DrafterUnavailable)
    assert isinstance(lost, DrafterUnavailable)


def status(code: StatusCode) -> AioRpcError:
    return AioRpcError(code, Metadata(), Metadata(), "why")


@pytest.mark.parametrize(
    ("error", "kind", "another_may_answer", "is_loss"),
    [
        (ActorDiedError(), FailureKind.DIED, True, True),
        (ActorUnavailableError("gone", DRAFTER), FailureKind.SILENT, True, True),
        (status(StatusCode.CANCELLED), FailureKind.CLOSING, True, True),
        (status(StatusCode.RESOURCE_EXHAUSTED), FailureKind.UNREACHABLE, False, True),
        (DeploymentUnavailableError("Drafter"), FailureKind.UNREACHABLE, False, True),  # type: ignore[arg-type]
        (
            RuntimeError(f"Unexpected error ({StatusCode.CANCELLED}): closing."),
            FailureKind.UNREACHABLE,
            False,
            True,
        ),
        (BackPressureError(2, 1), FailureKind.SATURATED, False, False),
        (ObjectLostError("0" * 56, None, ""), FailureKind.OBJECT_LOST, False, False),
        (RuntimeError("a bug"), FailureKind.RAISED, False, False),
    ],
)
def test_every_failure_has_one_kind(
    error: Exception, kind: FailureKind, another_may_answer: bool, is_loss: bool
) -> None:
    for each in (error, remote(error)):
        failure = failure_of(each)
        assert failure.kind is kind
        assert failure.is_of_one_replica is another_may_answer
        assert failure.is_loss is is_loss


def test_a_bug_elsewhere_is_an_engine_that_failed() -> None:
    for bug in (remote(ZeroDivisionError("by zero")), RuntimeError("by zero")):
        error = failure_of(bug).as_rapid_error("target", TargetUnavailable)
        assert isinstance(error, EngineFailed)
        assert "by zero" not in str(error)  # that is for the log

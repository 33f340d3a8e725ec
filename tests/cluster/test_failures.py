from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import grpc  # type: ignore[import-untyped]
import pytest
from ray.exceptions import ActorUnavailableError, RayTaskError
from ray.serve.exceptions import DeploymentUnavailableError

from cluster.failures import as_rapid_error, is_death_of, unwrapped
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
    assert unwrapped(remote(cause, depth)) is cause
    assert as_rapid_error(remote(cause, depth), "target", TargetUnavailable) is cause


def test_a_death_belongs_to_the_actor_that_it_names() -> None:
    """A block whose drafter died fails the target's call with the drafter's id."""
    death = remote(ActorUnavailableError("gone", DRAFTER))
    assert is_death_of(death, actor(DRAFTER))
    assert not is_death_of(death, actor(TARGET))
    assert not is_death_of(ValueError(), actor(DRAFTER))


def test_what_died_is_told_in_one_line() -> None:
    death = ActorUnavailableError("gone\nwith a long story", DRAFTER)
    error = as_rapid_error(death, "drafter", DrafterUnavailable)
    assert isinstance(error, DrafterUnavailable)
    assert str(error) == "The drafter was lost."


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
    assert isinstance(as_rapid_error(error, "drafter", DrafterUnavailable), DrafterUnavailable)


def test_a_bug_elsewhere_is_an_engine_that_failed() -> None:
    for bug in (remote(ZeroDivisionError("by zero")), RuntimeError("by zero")):
        error = as_rapid_error(bug, "target", TargetUnavailable)
        assert isinstance(error, EngineFailed)
        assert "by zero" not in str(error)  # that is for the log

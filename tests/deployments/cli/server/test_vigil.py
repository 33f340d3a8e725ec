"""What is told of a server that runs, over time."""

from __future__ import annotations

import pytest

from deployments.cli.server.vigil import Vigil

LOST = {"ready": False, "answered": False, "reason": "no ingress answers"}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_server_that_is_not_ready_and_again_is(capsys):
    clock = Clock()
    vigil = Vigil(clock)
    assert not vigil.is_due
    clock.now = 5.0
    assert vigil.is_due
    reason = {"ready": False, "reason": "no target takes requests"}
    for clock.now, readiness in ((5.0, {"ready": True}), (10.0, reason), (900.0, reason)):
        assert vigil.look(readiness) is None  # weights may take long
    clock.now = 905.0
    assert vigil.look({"ready": True}) is None
    told = capsys.readouterr().err.splitlines()
    assert told == ["not ready: no target takes requests", "ready again after 900 s"]


@pytest.mark.parametrize("silence", [None, LOST])
def test_a_server_that_no_ingress_answers_for_is_given_up(silence, capsys):
    clock = Clock()
    vigil = Vigil(clock)
    clock.now = 119.0
    assert vigil.look(silence) is None
    clock.now = 120.0
    assert vigil.look(silence) == "nothing has answered /ready for 120 s, so the server is ended"
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith("not ready: ")

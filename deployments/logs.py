"""The application's log lines, beside Ray Serve's own and in the same form, and engines' spans.

Each process hands the lines of this application's packages to Serve's logger ``ray.serve``, the
only one that ``logging_config`` configures. It adds time, deployment, replica and the request's id.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from ray import serve
from ray.serve.exceptions import RayServeException
from ray.serve.schema import LoggingConfig
from typing_extensions import override

from cluster.serve_internals import configure_engine_log, read_log_settings
from library.accounts.callers import TENANT

PACKAGES = ("cluster", "deployments", "library", "rapid", "retrieval")
_SERVE = logging.getLogger("ray.serve")
_LEAST_LEVEL = logging.WARNING  # of the processes that are Serve's own
_ACCESS = "deployments.api.http.access_log"  # whose lines are wanted at any level


class ServeHandler(logging.Handler):
    """A handler that passes lines on to Serve's logger, whose level decides which are written.

    Each has the tenant whose request is being served. The line of each request is written at any
    level, unless `enable_access_log` is off.
    """

    @override
    def emit(self, record: logging.LogRecord) -> None:
        if record.name == _ACCESS or _SERVE.isEnabledFor(record.levelno):
            record.logger = record.name  # Serve's formatter leaves the name out
            if not hasattr(record, "tenant") and (tenant := TENANT.get()) is not None:
                record.tenant = tenant
            _SERVE.handle(record)


def log_with_serve() -> None:
    """Pass the application's log lines on to Serve's logger, if this process is a replica."""
    try:
        serve.get_replica_context()
    except RayServeException:  # another process keeps its own logging
        return
    _pass_on()


def engine_logging() -> Callable[[], None]:
    """Return a function that makes an engine's process log as the replica that calls this does.

    Its lines and spans go to files of their own beside the replica's. A change of
    ``logging_config`` while the engine runs does not reach it.
    """
    replica = serve.get_replica_context()
    return functools.partial(
        _log_as_engine,
        f"{replica.app_name}_{replica.deployment}",
        f"{replica.replica_id.unique_id}_engine",
        read_log_settings(_SERVE),
    )


def system_logging(given: LoggingConfig | None) -> LoggingConfig:
    """Return how controller, proxies and the building of applications log: as the file says.

    The level is at least ``WARNING``, below which Serve writes down what it builds from.
    """
    config = given or LoggingConfig()
    level = max(_LEAST_LEVEL, logging.getLevelNamesMapping()[str(config.log_level)])
    return config.model_copy(update={"log_level": logging.getLevelName(level)})


def with_system_logging(content: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration whose controller and proxies log as `system_logging` says.

    Its applications keep the file's own settings, which Serve would otherwise give to both.
    """
    given = content.get("logging_config") or {}
    system = system_logging(LoggingConfig(**given)).model_dump(mode="json", exclude_unset=True)
    own = {"logging_config": given} if given else {}
    applications = [own | each for each in content["applications"]]
    return content | {"logging_config": system, "applications": applications}


def about_lease(lease_id: str) -> dict[str, str]:
    """Return the fields of a log line about a lease: the id of its request."""
    return {"request_id": lease_id.rpartition("/")[0]}


def _log_as_engine(deployment: str, engine: str, config: LoggingConfig) -> None:
    configure_engine_log(deployment, engine, config)
    _pass_on()


def _pass_on() -> None:
    for name in PACKAGES:
        logger = logging.getLogger(name)
        logger.setLevel(logging.DEBUG)
        logger.handlers = [ServeHandler()]
        logger.propagate = False

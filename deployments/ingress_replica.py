"""The HTTP API as a Serve deployment, over a handle to the orchestrator."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp

from deployments.api.backend.readiness import Readiness
from deployments.api.backend.remote_orchestrator import RemoteOrchestrator, watch
from deployments.api.backend.routes import Routes
from deployments.api.backend.service import GenerationService
from deployments.api.gate.gossip import board_of, call_shared, keep_in_step
from deployments.api.gate.quotas import QuotaBoard, Quotas
from deployments.api.ingress import Ingress
from deployments.config.api_config import ApiConfig
from deployments.config.live import accept_settings
from deployments.logs import log_with_serve
from deployments.metrics import IngressMetrics
from deployments.proxy.server_limits import check_callers_are_known, limit_replica
from library.accounts.books import Accounts
from library.library_access import LibraryAccess
from library.library_config import LibraryConfig
from rapid.errors import ConfigurationError

_REPORT_S = 2.0  # Ray collects metrics every ten seconds

logger = logging.getLogger(__name__)


class IngressReplica:
    """The ingress deployment, which serves the HTTP API as an ASGI application."""

    def __init__(
        self,
        config: ApiConfig,
        library: LibraryConfig | None,
        librarian: DeploymentHandle | None,
        *orchestrators: DeploymentHandle,
    ) -> None:
        """Look at the application once, and then again and again.

        Args:
            config: The settings, with a card of each model.
            library: Where files are kept; None where none are.
            librarian: The handle of what works on files, which Serve starts because it is here.
            orchestrators: The handles of the models' orchestrators, in the cards' order.
        """
        log_with_serve()
        limit_replica()
        self._name = name = orchestrators[0].app_name
        cards = config.cards
        self._metrics = IngressMetrics(next(iter(cards)) if len(cards) == 1 else "")
        pairs = zip(orchestrators, cards.values(), strict=True)
        targets = {handle.deployment_name: card.target for handle, card in pairs}
        readiness = Readiness(name, targets)
        readiness.look()  # as Serve sends this replica requests, `/ready` among them, from now on
        readiness.start()
        self._service = Routes(
            [RemoteOrchestrator(each, readiness) for each in orchestrators],
            name,
            partial(watch, targets=targets),
        )
        self._service.configure(tuple(cards))
        access = LibraryAccess(library) if library else None
        # Serve's proxy adds x-request-id to every request and response.
        self._ingress = Ingress(
            self._service,
            config,
            sends_request_id=False,
            metrics=self._metrics,
            quotas=Quotas(call_shared(QuotaBoard, f"{name}/quotas")),
            library=access,
            accounts=Accounts(access.database) if access else None,
        )
        self._settings: ApiConfig | None = None

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the ASGI application; Serve calls this hook when the replica's event loop runs."""
        self._in_step = asyncio.create_task(
            keep_in_step(self._ingress.shares, board_of(self._name))
        )
        self._reporting = asyncio.create_task(report_readiness(self._service, self._metrics))
        return self._ingress

    def reconfigure(self, settings: dict[str, Any]) -> None:
        """Take new keys and limits; Serve calls this also at start.

        Settings that break their schema are refused.
        """
        taken = accept_settings(ApiConfig, settings, self._settings, of="Ingress")
        try:
            check_callers_are_known(has_keys=taken.has_keys)
            if self._settings and len(taken.cards) != len(self._settings.cards):
                raise ConfigurationError("models are added and removed by a restart of the ingress")
            self._ingress.configure(taken)
        except ConfigurationError as error:  # no keys, or no variable that has them
            if self._settings is None:
                raise
            logger.error("new settings are refused, those in force stay: %s", error)
            return
        self._service.configure(tuple(taken.cards), taken.canary)
        self._settings = taken


async def report_readiness(
    service: GenerationService,
    metrics: IngressMetrics,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Report again and again whether requests would be answered, until this is cancelled."""
    while True:
        state = await service.ready()
        for model, is_ready in state.get("models", {None: bool(state["ready"])}).items():
            metrics.report(is_ready=is_ready, model=model)
        await sleep(_REPORT_S)

"""The limits of `HttpWithLimits` on Serve's HTTP servers, for which Serve has no setting.

A proxy gets the request router of an application's ingress from the application, however that was
deployed: `IngressRouter` reaches the proxy in which it finds itself. Serve copies the class with
this module into the proxy.
"""

from __future__ import annotations

from typing import Any

import uvicorn
from typing_extensions import override

from cluster import serve_internals
from deployments.proxy.http_limits import HttpWithLimits
from rapid.errors import ConfigurationError


class IngressRouter(serve_internals.PowerOfTwoChoicesRequestRouter):  # type: ignore[misc]
    """Serve's own request router, which also puts limits on the proxy that it routes for."""

    @override
    def initialize_state(self, **settings: Any) -> None:
        super().initialize_state(**settings)
        serve_internals.call_in_actor(limit_proxy)


def router_options() -> dict[str, Any]:
    """Return the options of an ingress's deployment that put limits on the proxies in front.

    With HAProxy there are none, and Serve refuses them: HAProxy has limits of its own, and sends
    requests to the replicas themselves.
    """
    if serve_internals.RAY_SERVE_ENABLE_HA_PROXY:
        return {}
    router = f"{IngressRouter.__module__}.{IngressRouter.__name__}"
    return {"request_router_config": {"request_router_class": router}}


def limit_proxy(actor: Any) -> None:
    """Put `HttpWithLimits` on the HTTP server of an actor, if that is a proxy of Serve's.

    Connections from before are closed, those with a request in progress when it is answered.
    """
    serve_internals.on_http_server(actor, _limit)


def limit_replica() -> None:
    """Put `HttpWithLimits` on the HTTP server that Serve starts in this replica, if it starts one.

    It takes uvicorn's default, and starts after the replica's class.
    """
    if serve_internals.RAY_SERVE_ENABLE_DIRECT_INGRESS:
        uvicorn.config.HTTP_PROTOCOLS["auto"] = f"{HttpWithLimits.__module__}:HttpWithLimits"


def check_callers_are_known(*, has_keys: bool) -> None:
    """Check that an application without keys does not run where callers elsewhere seem to be local.

    With HAProxy or direct ingress in front, its peer is HAProxy, or whoever balances the load.

    Raises:
        ConfigurationError: If it does.
    """
    if serve_internals.RAY_SERVE_ENABLE_DIRECT_INGRESS and not has_keys:
        raise ConfigurationError(
            "api.keys is empty, and behind HAProxy or with direct ingress callers from elsewhere "
            "seem to be on this machine: list keys (`rapid hash-key`), name keys_file or keys_env, "
            "or start Ray without RAY_SERVE_ENABLE_HA_PROXY, RAY_SERVE_ENABLE_DIRECT_INGRESS and "
            "RAY_SERVE_THROUGHPUT_OPTIMIZED"
        )


def _limit(server: uvicorn.Server) -> None:
    if not server.config.loaded:  # the server is about to start, and would load its own class
        server.config.load()
    if server.config.http_protocol_class is HttpWithLimits:
        return
    server.config.http_protocol_class = HttpWithLimits
    for connection in list(server.server_state.connections):
        connection.shutdown()

"""The door of an application on Kubernetes: TLS, and limits that hold before a request reaches Ray.

The application bounds heads and bodies itself, but Serve's proxy buffers whatever comes until the
ingress answers, and limits no client's connections, so clients reach it through a proxy that does.
The resources are those of the Gateway API, with the
policies of Envoy Gateway for what the API leaves to its implementations.
"""

from __future__ import annotations

from typing import Any

from deployments.config.kubernetes.pods import APP_LABELS, HTTP_PORT
from deployments.config.serve_config import ApplicationConfig

_GROUP = "gateway.networking.k8s.io"
_ENVOY = "gateway.envoyproxy.io/v1alpha1"
_TLS_SECRET = "rapid-tls"
_MOST_CONNECTIONS = 4096  # of one proxy
_SPARE = 65536  # bytes beyond the longest body, so that the ingress refuses in its own words

GATEWAY_COMMENT = """\
# TLS and limits in front of the HTTP port, for Envoy Gateway 1.5 or later, which refuses headers of
# more than 60 KiB by itself. A body may be as long as the application takes, and has a minute to
# arrive before it is sent on. The certificate is in the Secret rapid-tls. Apply this file itself:
# `kubectl -n rapid apply -f gateway.yaml`.
"""


def gateway(name: str, config: ApplicationConfig) -> list[dict[str, Any]]:
    """Return the resources of a service's door.

    Args:
        name: Name of the service.
        config: The application's settings, which have the longest body.
    """

    def resource(version: str, kind: str, spec: dict[str, Any]) -> dict[str, Any]:
        metadata = {"name": name, "labels": APP_LABELS}
        return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}

    listener = {
        "name": "https",
        "port": 443,
        "protocol": "HTTPS",
        "tls": {"mode": "Terminate", "certificateRefs": [{"name": _TLS_SECRET}]},
    }
    backend = {"name": f"{name}-serve-svc", "port": HTTP_PORT}
    namespace = {"kubernetes.io/metadata.name": "envoy-gateway-system"}
    from_envoy = {
        "namespaceSelector": {"matchLabels": namespace},
        "podSelector": {"matchLabels": {"gateway.envoyproxy.io/owning-gateway-name": name}},
    }
    return [
        resource(
            f"{_GROUP}/v1",
            "Gateway",
            {"gatewayClassName": "eg", "listeners": [listener]},
        ),
        resource(
            f"{_GROUP}/v1",
            "HTTPRoute",
            {
                "parentRefs": [{"name": name}],
                # A question about a long document may take as long as it takes.
                "rules": [{"backendRefs": [backend], "timeouts": {"request": "0s"}}],
            },
        ),
        resource(
            _ENVOY,
            "ClientTrafficPolicy",
            {
                "targetRefs": [{"group": _GROUP, "kind": "Gateway", "name": name}],
                "timeout": {
                    "http": {
                        "requestReceivedTimeout": "60s",
                        "idleTimeout": "300s",
                        "streamIdleTimeout": "1h",  # an answer in one piece is silent until then
                    }
                },
                "connection": {"connectionLimit": {"value": _MOST_CONNECTIONS}},
            },
        ),
        resource(
            _ENVOY,
            "BackendTrafficPolicy",
            {
                "targetRefs": [{"group": _GROUP, "kind": "HTTPRoute", "name": name}],
                # A request is sent on when it is complete, so slow ones cost no place.
                "requestBuffer": {"limit": str(config.api.max_body_bytes + _SPARE)},
            },
        ),
        resource(
            "networking.k8s.io/v1",
            "NetworkPolicy",
            {
                "podSelector": {"matchLabels": APP_LABELS},
                "policyTypes": ["Ingress"],
                "ingress": [{"from": [from_envoy], "ports": [{"port": HTTP_PORT}]}],
            },
        ),
    ]

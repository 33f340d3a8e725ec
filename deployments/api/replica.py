"""The HTTP side as a Serve deployment: the ASGI application over a handle to the orchestrator."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp

from cluster.failures import is_loss
from deployments.api.ingress import Ingress
from deployments.config.serve_config import ApiConfig
from rapid.errors import TargetUnavailable
from rapid.messages import GenerateRequest, GenerationEvent

_MAX_GRPC_CHARS = 2**20  # up to 4 bytes each would pass gRPC's limit of 4 MiB


class RemoteOrchestrator:
    """The orchestrator as the ingress needs it, over a Serve handle.

    Streams are gRPC, so that an ingress that dies takes its requests with it. A request too large
    for a gRPC message goes through the object store; then the answer nobody reads ends by itself.
    """

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerationEvent]:
        """The events of a request; closing the iterator releases everything it holds.

        Raises:
            TargetUnavailable: the orchestrator died or cannot be reached; another will answer.
        """
        generate = self._handle.options(
            stream=True,
            method_name="generate",
            _by_reference=_num_chars(request) > _MAX_GRPC_CHARS,
        )
        stream = generate.remote(request)
        try:
            async for event in stream:
                yield event
        except Exception as error:
            if is_loss(error):
                raise TargetUnavailable("The orchestrator was lost: ask again.") from error
            raise
        finally:
            stream.cancel()

    async def ready(self) -> dict[str, Any]:
        """Pools and engines."""
        state: dict[str, Any] = await self._handle.ready.remote()
        return state


def _num_chars(request: GenerateRequest) -> int:
    """Of every text that the caller may make as long as the body."""
    texts = [request.query or "", request.tenant, *request.stop]
    for document in request.documents:
        texts += [document.name, document.text]
    for message in request.messages:
        texts += [message.role, message.content]
    return sum(map(len, texts))


class IngressReplica:
    """What Serve instantiates; Serve asks it for its ASGI application."""

    def __init__(self, config: ApiConfig, orchestrator: DeploymentHandle) -> None:
        self._config = config
        self._orchestrator = orchestrator

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Serve's hook, called once the replica's event loop runs."""
        orchestrator = RemoteOrchestrator(self._orchestrator)
        # Serve's proxy adds x-request-id to every request and response.
        return Ingress(orchestrator, self._config, sends_request_id=False)

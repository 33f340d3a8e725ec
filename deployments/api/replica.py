"""The HTTP API as a Serve deployment, over a handle to the orchestrator."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp

from cluster.failures import FailureKind, failure_of
from deployments.api.ingress import Ingress
from deployments.config.serve_config import ApiConfig
from rapid.errors import OrchestratorLost, Overloaded
from rapid.messages import GenerateRequest, GenerationEvent

_MAX_GRPC_CHARS = 2**20  # up to 4 bytes each would pass gRPC's limit of 4 MiB


class RemoteOrchestrator:
    """A `GenerationService` that calls the orchestrator through a Serve handle.

    Streams use gRPC, so that requests are aborted if their ingress dies. A request too large for a
    gRPC message goes through the object store instead, and is not aborted.
    """

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerationEvent]:
        """Yield the events of a request; closing the iterator releases everything it holds.

        Raises:
            OrchestratorLost: If the orchestrator died or cannot be reached; a retry goes to
                another replica.
            Overloaded: If the orchestrator's queue is full.
            Exception: What the orchestrator raised, without Ray's wrappers.
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
            failure = failure_of(error)
            if failure.kind is FailureKind.SATURATED:
                raise Overloaded("The server is busy.") from error
            if failure.is_loss:
                raise OrchestratorLost("The orchestrator was lost: ask again.") from error
            if failure.cause is not error:
                raise failure.cause from error
            raise
        finally:
            stream.cancel()

    async def ready(self) -> dict[str, Any]:
        """Return the state of pools and engines."""
        state: dict[str, Any] = await self._handle.ready.remote()
        return state


def _num_chars(request: GenerateRequest) -> int:
    """Return the number of characters in all texts of a request."""
    texts = [request.query or "", request.tenant, *request.stop]
    for document in request.documents:
        texts += [document.name, document.text]
    for message in request.messages:
        texts += [message.role, message.content]
    return sum(map(len, texts))


class IngressReplica:
    """The ingress deployment, which serves the HTTP API as an ASGI application."""

    def __init__(
        self, config: ApiConfig, orchestrator: DeploymentHandle, is_embedded: bool
    ) -> None:
        self._config = config
        self._orchestrator = orchestrator
        self._is_embedded = is_embedded

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Build the ASGI application; Serve calls this hook when the replica's event loop runs."""
        orchestrator = RemoteOrchestrator(self._orchestrator)
        # Serve's proxy adds x-request-id to every request and response.
        return Ingress(
            orchestrator, self._config, is_embedded=self._is_embedded, sends_request_id=False
        )

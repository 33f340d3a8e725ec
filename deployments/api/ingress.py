"""The ASGI application of the HTTP API: routes, keys, limits, streaming and disconnects.

It needs no Ray: a deployment gives it a handle to the orchestrator, a test a scripted one.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import AsyncExitStack
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from deployments.api.admission import Admission
from deployments.api.bodies import drop, read_json_body
from deployments.api.errors import error_body, http_error
from deployments.api.event_feed import ClientLeft, EventFeed
from deployments.api.limits import Limits
from deployments.api.requests import ChatRequest, parse_chat_request
from deployments.api.responses import (
    GrowingChoice,
    Json,
    ReplyFrame,
    Timing,
    model_card,
    rapid_receipt,
)
from deployments.config.serve_config import ApiConfig
from deployments.config.tenants import Tenants
from rapid.errors import (
    EngineFailed,
    Overloaded,
    TargetUnavailable,
    UnknownModel,
)
from rapid.messages import (
    Finished,
    GenerateRequest,
    GenerationEvent,
    Reading,
    Started,
    TextDelta,
)
from rapid.ports import Clock

_log = logging.getLogger(__name__)

_CLIENT_LEFT_STATUS = 499  # as proxies log it; it is never delivered
_FORWARDED = ("forwarded", "via", "x-forwarded-for", "x-real-ip")
_READY_TIMEOUT_S = 10.0

Handler = Callable[[Request, str], Awaitable[Response]]


class GenerationService(Protocol):
    """The application behind the HTTP API: what runs its requests."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerationEvent]:
        """Yield the events of a request; closing the generator aborts the request."""
        ...

    async def ready(self) -> dict[str, Any]:
        """Return the state of pools and engines; ``ready`` holds whether requests can be served."""
        ...


class Ingress:
    """An ASGI application with OpenAI's routes over a `GenerationService`."""

    def __init__(
        self,
        service: GenerationService,
        config: ApiConfig,
        *,
        is_embedded: bool = False,
        sends_request_id: bool = True,
        clock: Clock = time.monotonic,
    ) -> None:
        """Create the application.

        Args:
            service: Runs the requests.
            config: The model name, keys and limits.
            is_embedded: Whether the model is an embedded one, which its card says.
            sends_request_id: Whether responses carry ``x-request-id``; False where the server in
                front adds it itself.
            clock: Monotonic seconds.
        """
        self._service = service
        self._sends_request_id = sends_request_id
        self._config = config
        self._clock = clock
        self._tenants = Tenants(config.keys)
        self._limits = Limits(
            config.max_choices, config.max_messages, config.max_documents, config.max_characters
        )
        self._admission = Admission(
            config.max_requests, config.max_requests_per_tenant or config.max_requests, clock=clock
        )
        self._card = model_card(config.model, int(time.time()), is_embedded=is_embedded)
        self._fingerprint = _fingerprint(config.model)
        self._app = Starlette(
            routes=[
                self._route("/v1/chat/completions", self._chat, "POST"),
                self._route("/v1/models", self._models, "GET"),
                self._route("/v1/models/{model:path}", self._model, "GET"),
                self._route("/ready", self._ready, "GET"),
                Route("/health", self._health, methods=["GET"]),
            ],
            exception_handlers={HTTPException: self._no_route},
        )
        self._app.router.redirect_slashes = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        await self._app(scope, receive, send)

    def _route(self, path: str, handler: Handler, method: str) -> Route:
        """Return a route that authenticates requests and turns every error into OpenAI's form."""

        async def endpoint(request: Request) -> Response:
            began = self._clock()
            request_id = _request_id(request)
            try:
                response = await handler(request, self._identify(request))
            except (ClientDisconnect, ClientLeft):
                _log.info("request %s: the caller left", request_id)
                response = Response(status_code=_CLIENT_LEFT_STATUS)
            except Exception as error:
                response = _error_response(error, request_id)
            self._tag(response, request_id)
            response.headers["openai-processing-ms"] = str(round(1000 * (self._clock() - began)))
            return response

        return Route(path, endpoint, methods=[method])

    def _identify(self, request: Request) -> str:
        headers = request.headers
        client = request.client.host if request.client else None
        return self._tenants.identify(
            headers.get("authorization"),
            client,
            headers.get("host"),
            is_forwarded=any(name in headers for name in _FORWARDED),
        )

    async def _chat(self, request: Request, tenant: str) -> Response:
        began = self._clock()
        async with AsyncExitStack() as stack:
            try:
                stack.enter_context(self._admission.place(tenant))
            except Overloaded:
                await drop(request.stream(), self._config.max_body_bytes)
                raise
            body = await read_json_body(request, self._config.max_body_bytes)
            asked = parse_chat_request(body, self._limits)
            self._check_model(asked.model)
            unique = secrets.token_hex(16)  # not the client's id, which two requests may share
            events = self._service.generate(asked.as_generate_request(unique, tenant))
            frame = ReplyFrame(
                id=f"chatcmpl-{unique}",
                created=int(time.time()),
                model=asked.model,
                fingerprint=self._fingerprint,
                has_logprobs=bool(asked.logprobs),
                includes_usage=asked.includes_usage,
            )
            timing = Timing(began)
            feed = await stack.enter_async_context(EventFeed(events, request.receive))
            if not isinstance(await self._first(feed), Started):
                raise EngineFailed("The answer began without a mode.")
            if not asked.stream:
                return JSONResponse(await self._complete(feed, asked, frame, timing))
            chunks = self._chunks(feed, asked, frame, timing)
            return _EventStream(chunks, stack.pop_all(), _request_id(request))

    async def _first(self, feed: EventFeed) -> GenerationEvent | None:
        """Return the first event; a refusal without a measured time to retry gets one."""
        try:
            return await feed.next()
        except Overloaded as error:
            if error.retry_after_s is None:
                raise type(error)(str(error), self._admission.retry_after_s) from error
            raise

    async def _complete(
        self, feed: EventFeed, asked: ChatRequest, frame: ReplyFrame, timing: Timing
    ) -> Json:
        choices = [GrowingChoice() for _ in range(asked.n or 1)]
        while True:
            event = await feed.next()
            if isinstance(event, TextDelta):
                choices[event.choice].add(event)
                self._observe(timing)
            elif isinstance(event, Finished):
                timing.done = self._clock()
                return frame.completion(choices, event.receipt, timing)

    async def _chunks(
        self, feed: EventFeed, asked: ChatRequest, frame: ReplyFrame, timing: Timing
    ) -> AsyncIterator[Json | str]:
        """Yield the stream's chunks and, as strings, its comments, which clients may pass over.

        A comment says how far the document has been read, or fills a silence. The chunk that ends
        the last choice is held back until the receipt, which it carries.
        """
        num_growing = asked.n or 1
        for choice in range(num_growing):
            yield frame.role_chunk(choice)
        last: TextDelta | None = None
        while True:
            event = await feed.next(self._config.heartbeat_s)
            if event is None:
                yield "ping"
            elif isinstance(event, Reading):
                yield f"reading {event.num_read} of {event.num_tokens} tokens"
            elif isinstance(event, TextDelta):
                self._observe(timing)
                num_growing -= event.finish_reason is not None
                if num_growing:
                    yield frame.delta_chunk(event)
                else:
                    last = event
            elif isinstance(event, Finished):
                timing.done = self._clock()
                if last is None:
                    raise EngineFailed("The answer ended before all of its choices did.")
                yield frame.delta_chunk(last) | {"rapid": rapid_receipt(event.receipt)}
                if frame.includes_usage:
                    yield frame.usage_chunk(event.receipt, timing)
                return

    def _observe(self, timing: Timing) -> None:
        if timing.first_token is None:
            timing.first_token = self._clock()

    async def _models(self, request: Request, tenant: str) -> Response:
        return JSONResponse({"object": "list", "data": [self._card]})

    async def _model(self, request: Request, tenant: str) -> Response:
        self._check_model(request.path_params["model"])
        return JSONResponse(self._card)

    async def _ready(self, request: Request, tenant: str) -> Response:
        try:
            async with asyncio.timeout(_READY_TIMEOUT_S):
                state = await self._service.ready()
        except Exception as error:  # any error means that the application is not ready
            raise TargetUnavailable("The orchestrator does not answer.") from error
        if state.get("ready"):
            return JSONResponse(state)
        return JSONResponse(state, 503, headers={"retry-after": "1"})

    async def _health(self, request: Request) -> Response:
        return self._tag(JSONResponse({"status": "ok"}), _request_id(request))

    async def _no_route(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        what = f"{request.method} {request.url.path}"
        message = {
            404: f"There is no {what}.",
            405: f"{what} is not allowed: see the Allow header.",
        }.get(error.status_code, error.detail)
        response = JSONResponse(error_body(message), error.status_code, headers=error.headers)
        return self._tag(response, _request_id(request))

    def _tag(self, response: Response, request_id: str) -> Response:
        if self._sends_request_id:
            response.headers["x-request-id"] = request_id
        return response

    def _check_model(self, model: str) -> None:
        if model != self._config.model:
            raise UnknownModel(
                f"The model {model!r} does not exist: this server has {self._config.model!r}."
            )


class _EventStream(Response):
    """A response of server-sent events that closes its event feed however it ends."""

    media_type = "text/event-stream"

    def __init__(
        self, chunks: AsyncIterator[Json | str], stack: AsyncExitStack, request_id: str
    ) -> None:
        super().__init__(
            headers={"cache-control": "no-cache", "x-accel-buffering": "no"},
        )
        del self.headers["content-length"]
        self._chunks, self._stack, self._request_id = chunks, stack, request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the chunks as they arrive."""
        async with self._stack:
            start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            try:
                await _send(send, start)
                await self._send_events(send)
                await _send(send, _body(b"", is_last=True))
            except ClientLeft:
                _log.info("request %s: the caller left", self._request_id)

    async def _send_events(self, send: Send) -> None:
        try:
            async for chunk in self._chunks:
                await _send(
                    send, _body(_comment(chunk) if isinstance(chunk, str) else _event(chunk))
                )
            await _send(send, _body(b"data: [DONE]\n\n"))
        except ClientLeft:
            raise
        except Exception as error:
            failure = http_error(error)
            _log_failure(error, failure.status, self._request_id)
            await _send(send, _body(_event(failure.body)))


async def _send(send: Send, message: MutableMapping[str, Any]) -> None:
    """Send a message; only here does an OSError mean that the client's connection is lost."""
    try:
        await send(message)
    except OSError as error:
        raise ClientLeft from error


def _body(part: bytes, *, is_last: bool = False) -> MutableMapping[str, Any]:
    return {"type": "http.response.body", "body": part, "more_body": not is_last}


def _event(body: Json) -> bytes:
    """Return one event, in ASCII because some clients take U+2028 for the end of a line."""
    return b"data: %s\n\n" % json.dumps(body, separators=(",", ":"), allow_nan=False).encode()


def _comment(text: str) -> bytes:
    """Return a comment line, which every client of server-sent events ignores."""
    return b": %s\n\n" % text.encode()


def _error_response(error: Exception, request_id: str) -> Response:
    failure = http_error(error)
    _log_failure(error, failure.status, request_id)
    return JSONResponse(failure.body, failure.status, headers=failure.headers)


def _log_failure(error: Exception, status: int, request_id: str) -> None:
    if status >= 500 and status != 503:
        _log.error("request %s failed", request_id, exc_info=error)
    else:
        _log.info("request %s: %d %s", request_id, status, error)


def _request_id(request: Request) -> str:
    """Return the client's id, to be echoed, or a new one; the same for all calls on a request."""
    if not hasattr(request.state, "request_id"):
        given = request.headers.get("x-request-id", "")
        is_sane = 0 < len(given) <= 128 and given.isascii() and given.isprintable()
        request.state.request_id = given if is_sane else f"req_{secrets.token_hex(12)}"
    request_id: str = request.state.request_id
    return request_id


def _fingerprint(model: str) -> str:
    try:
        release = version("rapid-serve")
    except PackageNotFoundError:  # run from a source tree
        release = "source"
    return f"fp_{sha256(f'{release} {model}'.encode()).hexdigest()[:10]}"

"""The ASGI application of the HTTP API: routes, keys, limits, streaming and disconnects.

It needs no Ray: a deployment gives it a handle to the orchestrator, a test a scripted one.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import cache, partial
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, TypeVar

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from deployments.api.backend.continuing import Cursor, continue_events
from deployments.api.backend.service import GenerationService
from deployments.api.chat.chat_dialect import ChatDialect
from deployments.api.chat.wire import model_card
from deployments.api.dialect import Dialect, Events, Question
from deployments.api.gate.admission import Admission
from deployments.api.gate.key_file import KeyFile
from deployments.api.gate.limits import Limits
from deployments.api.gate.shares import Shares
from deployments.api.http.access_log import AccessLog
from deployments.api.http.bodies import Bodies, BodyPace
from deployments.api.http.error_responses import HttpError, error_body, http_error
from deployments.api.http.event_feed import ClientLeft, EventFeed
from deployments.api.http.event_stream import EventStream
from deployments.config.api_config import ApiConfig
from deployments.config.tenants import Tenants
from rapid.errors import (
    BadRequest,
    ConfigurationError,
    EngineFailed,
    Overloaded,
    TargetUnavailable,
    Unauthorized,
    UnknownModel,
)
from rapid.messages import Finished, GenerationEvent, Reading, Started
from rapid.ports import Clock

if TYPE_CHECKING:  # which loads Ray
    from deployments.metrics import IngressMetrics

_log = logging.getLogger(__name__)

_CLIENT_LEFT_STATUS = 499  # as proxies log it; it is never delivered
_READY_S = 2.0  # less than the proxy's patience (`proxy.ready_in_time.DEADLINE_S`)
_FORWARDED = ("forwarded", "via", "x-forwarded-for", "x-real-ip")

Caller = TypeVar("Caller")

DIALECTS: dict[str, Dialect] = {"/v1/chat/completions": ChatDialect()}
"""The dialect of each path that takes questions."""


class Ingress:
    """An ASGI application with OpenAI's routes over a `GenerationService`."""

    def __init__(
        self,
        service: GenerationService,
        config: ApiConfig,
        *,
        sends_request_id: bool = True,
        metrics: IngressMetrics | None = None,
        clock: Clock = time.monotonic,
        pace: BodyPace | None = None,
    ) -> None:
        """Create the application.

        Args:
            service: Runs the requests.
            config: The models, keys and limits.
            sends_request_id: Whether responses carry ``x-request-id``; False where the server in
                front adds it itself.
            metrics: Where the ends of requests are counted; None where nothing is.
            clock: Monotonic seconds.
            pace: How fast clients must send their bodies.
        """
        self._service = service
        self._sends_request_id = sends_request_id
        self._clock = clock
        self._admission = Admission(clock=clock)
        self._bodies = Bodies(self._admission, clock=clock, pace=pace)
        self._access = AccessLog(clock, metrics)
        self.configure(config)
        routes = [
            *(
                self._route(path, partial(self._answer, dialect), "POST", self._identify)
                for path, dialect in DIALECTS.items()
            ),
            self._route("/v1/models", self._models, "GET", self._identify),
            self._route("/v1/models/{model:path}", self._model, "GET", self._identify),
            self._route("/ready", self._ready, "GET", self._is_operator),
            Route("/health", _health, methods=["GET"]),
        ]
        self._app = Starlette(
            routes=routes,
            exception_handlers={
                HTTPException: self._no_route,
                ClientDisconnect: _note_leaving,
                ClientLeft: _note_leaving,
            },
            # An `Exception` among the handlers above would be raised again after its response.
            middleware=[Middleware(ExceptionMiddleware, handlers={Exception: self._refuse})],
        )
        self._app.router.redirect_slashes = False

    def configure(self, config: ApiConfig) -> None:
        """Take models, keys and limits; requests that were let in stay in."""
        key_file = KeyFile(config.keys_file, self._clock)
        keys = config.all_keys()  # which may be refused, so they come first
        self._key_file = key_file
        self._tenants = Tenants(keys if config.has_keys else None)
        self._config = config
        self._limits = Limits(
            config.max_choices, config.max_messages, config.max_documents, config.max_characters
        )
        self._admission.limit(
            config.max_requests,
            config.max_requests_per_tenant or config.max_requests,
            config.shared_requests if len({key.tenant for key in keys}) > 1 else None,
            config.tenant_weights,
        )
        self._bodies.limit(config.max_body_bytes, config.max_slow_bodies)
        self._cards, created, silence_s = {}, int(time.time()), config.silence_s
        for name, card in config.cards.items():
            self._cards[name] = model_card(
                name, created, card.max_model_len, is_embedded=card.is_embedded, silence_s=silence_s
            )

    @property
    def shares(self) -> Shares:
        """The tenants' shares, which other replicas of the ingress add to."""
        return self._admission.shares

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection; its response has the request's id and the time that it took."""

        async def tag_and_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                request, headers = Request(scope), MutableHeaders(scope=message)
                if self._sends_request_id:
                    headers["x-request-id"] = _request_id(request)
                if (began := getattr(request.state, "began", None)) is not None:
                    headers["openai-processing-ms"] = str(round(1000 * (self._clock() - began)))
            await send(message)

        await self._app(scope, receive, tag_and_send)

    def _route(
        self,
        path: str,
        handler: Callable[[Request, Caller], Awaitable[Response]],
        method: str,
        authenticate: Callable[[Request], Caller],
    ) -> Route:
        """Return a route whose handler is given what `authenticate` says of the caller."""

        async def endpoint(request: Request) -> Response:
            request.state.began = self._clock()
            request.state.caller = caller = authenticate(request)
            return await handler(request, caller)

        return Route(path, endpoint, methods=[method])

    async def _refuse(self, request: Request, error: Exception) -> Response:
        """Return the response to a request that ended with `error`."""
        request_id = _request_id(request)
        if isinstance(error, Unauthorized):
            self._access.refuse(request_id, error)
        failure = _failure(error, request_id)
        response = JSONResponse(failure.body, failure.status, headers=failure.headers)
        await self._leave_unread(request, getattr(request.state, "caller", None), response)
        return response

    def _take_new_keys(self) -> None:
        if self._key_file.has_changed():
            try:
                self.configure(self._config)
            except ConfigurationError as error:
                _log.error("new keys are refused, those in force stay: %s", error)

    def _identify(self, request: Request) -> str:
        self._take_new_keys()
        return self._tenants.identify(*_origin(request), is_forwarded=_is_forwarded(request))

    def _is_operator(self, request: Request) -> bool:
        self._take_new_keys()
        return self._tenants.is_operator(*_origin(request), is_forwarded=_is_forwarded(request))

    async def _answer(self, dialect: Dialect, request: Request, tenant: str) -> Response:
        request_id = _request_id(request)
        async with AsyncExitStack() as stack:
            only = next(iter(self._cards)) if len(self._cards) == 1 else None
            record = stack.enter_context(self._access.request(request_id, tenant, only))
            async with self._bodies.body(request, tenant) as body:
                with record.admission():
                    ticket = await stack.enter_async_context(self._admission.place(tenant))
            asked = await dialect.parse(body, self._limits)
            self._check_model(asked.model)
            record.model = asked.model
            default = self._config.cards[asked.model].default_temperature
            sent = asked.as_generate_request(request_id, tenant, default)
            event_id = request.headers.get("last-event-id")
            cursor = Cursor.of_event(event_id, sent, body) if event_id else Cursor.first(sent, body)
            following = record.follow(
                continue_events(self._service, cursor.as_asked(sent), cursor.marks), ticket
            )
            fingerprint = _fingerprint(asked.model)
            reply = dialect.reply(asked, cursor, fingerprint, record.began, self._clock)
            _log.info("request %s is answered as %s", request_id, reply.id)
            feed = await stack.enter_async_context(EventFeed(following, request.receive))
            first = await self._next(feed, asked)
            if not isinstance(first, Started | Reading):  # documents are embedded before the mode
                raise EngineFailed("The answer began without a mode.")
            events = self._events(first, feed, asked)
            if not sent.is_streamed:
                return JSONResponse(await reply.render_whole(events))
            failure = record.noting(_failure)
            return EventStream(
                reply.render(events),
                reply.media_type,
                stack.pop_all(),
                request_id,
                lambda error: reply.render_error(failure(error, request_id).body),
            )

    async def _events(
        self, event: GenerationEvent | None, feed: EventFeed, asked: Question
    ) -> Events:
        """Yield `event`, the first one, and those that follow, to the receipt."""
        yield event
        while not isinstance(event, Finished):
            event = await self._next(feed, asked, self._config.heartbeat_s)
            yield event

    async def _next(
        self, feed: EventFeed, asked: Question, patience_s: float | None = None
    ) -> GenerationEvent | None:
        """Return the next event, or None when none comes within `patience_s` seconds.

        A refusal names the caller's own field, and without a measured time to retry it gets one.
        """
        try:
            return await feed.next(patience_s)
        except BadRequest as error:
            error.param = asked.field_of(error.param)
            raise
        except Overloaded as error:
            if error.retry_after_s is None:
                raise type(error)(str(error), self._admission.next_place_s()) from error
            raise

    async def _models(self, request: Request, tenant: str) -> Response:
        return JSONResponse({"object": "list", "data": [*self._cards.values()]})

    async def _model(self, request: Request, tenant: str) -> Response:
        model = request.path_params["model"]
        self._check_model(model)
        return JSONResponse(self._cards[model])

    async def _ready(self, request: Request, is_operator: bool) -> Response:
        try:
            async with asyncio.timeout(_READY_S):
                state = await self._service.ready()
        except Exception as error:  # any error means that the application is not ready
            raise TargetUnavailable("The state of the application is not known.") from error
        is_ready = bool(state["ready"])
        of_all = {name: state[name] for name in ("ready", "reason") if name in state}
        shown = state if is_operator else of_all
        if is_ready:
            return JSONResponse(shown)
        return JSONResponse(shown, 503, headers={"retry-after": "1"})

    async def _no_route(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        what = f"{request.method} {request.url.path}"
        message = {
            404: f"There is no {what}.",
            405: f"{what} is not allowed: see the Allow header.",
        }.get(error.status_code, error.detail)
        response = JSONResponse(error_body(message), error.status_code, headers=error.headers)
        await self._leave_unread(request, None, response)
        return response

    async def _leave_unread(self, request: Request, who: object, response: Response) -> None:
        """Close the connection after a refusal whose body has not ended within a second."""
        if not await self._bodies.drain(request, who):
            response.headers["connection"] = "close"

    def _check_model(self, model: str) -> None:
        if model not in self._cards:
            known = ", ".join(map(repr, self._cards))
            raise UnknownModel(f"The model {model!r} does not exist: this server has {known}.")


async def _health(request: Request) -> Response:
    return JSONResponse({"status": "ok"})


async def _note_leaving(request: Request, error: Exception) -> Response:
    _log.info("request %s: the caller left", _request_id(request))
    return Response(status_code=_CLIENT_LEFT_STATUS)


def _failure(error: Exception, request_id: str) -> HttpError:
    """Log the end of a request and return it as its caller is told."""
    failure = http_error(error)
    if failure.status >= 500 and failure.status != 503:
        _log.error("request %s failed", request_id, exc_info=error)
    else:
        # Without the error's message, which may quote the request.
        _log.info("request %s: %d %s", request_id, failure.status, type(error).__name__)
    return failure


def _origin(request: Request) -> tuple[str | None, str | None, str | None]:
    """Return the Authorization header, the peer's address and the Host header."""
    headers = request.headers
    client = request.client.host if request.client else None
    return headers.get("authorization"), client, headers.get("host")


def _is_forwarded(request: Request) -> bool:
    return any(name in request.headers for name in _FORWARDED)


def _request_id(request: Request) -> str:
    """Return the client's id, to be echoed, or a new one; the same for all calls on a request."""
    if not hasattr(request.state, "request_id"):
        given = request.headers.get("x-request-id", "")
        is_sane = 0 < len(given) <= 128 and given.isascii() and given.isprintable()
        request.state.request_id = given if is_sane else f"req_{secrets.token_hex(12)}"
    request_id: str = request.state.request_id
    return request_id


@cache
def _fingerprint(model: str) -> str:
    try:
        release = version("rapid-serve")
    except PackageNotFoundError:  # run from a source tree
        release = "source"
    return f"fp_{sha256(f'{release} {model}'.encode()).hexdigest()[:10]}"

"""The ASGI application of the HTTP API: routes, keys, limits, streaming and disconnects.

It needs no Ray: a deployment gives it a handle to the orchestrator, a test a scripted one.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import cache, cached_property, partial
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.api.accounts.account_routes import AccountRoutes
from deployments.api.accounts.operator_routes import OperatorRoutes, read_state
from deployments.api.backend.continuing import Cursor, continue_events
from deployments.api.backend.service import GenerationService
from deployments.api.console.console_files import ConsoleFiles, tidy_path
from deployments.api.dialects.chat.chat_dialect import ChatDialect
from deployments.api.dialects.chat.wire import Json, model_card
from deployments.api.dialects.completions.completion_dialect import CompletionDialect
from deployments.api.dialects.messages.messages_dialect import MessagesDialect
from deployments.api.dialects.responses.background import BackgroundAnswers
from deployments.api.dialects.responses.compacting import CompactDialect
from deployments.api.dialects.responses.conversation_routes import ConversationRoutes
from deployments.api.dialects.responses.response_routes import ResponseRoutes
from deployments.api.dialects.responses.responses_dialect import ResponsesDialect
from deployments.api.dialects.responses.responses_reply import ResponsesReply
from deployments.api.files.attaching import add_places, attach_stored
from deployments.api.files.file_routes import Endpoint, FileRoutes
from deployments.api.files.store_routes import StoreRoutes
from deployments.api.gate.admission import Admission
from deployments.api.gate.allowances import Allowances
from deployments.api.gate.authentication import Authentication
from deployments.api.gate.key_file import KeyFile
from deployments.api.gate.quotas import Quotas, Reservation
from deployments.api.gate.shares import Shares
from deployments.api.http.access_log import AccessLog, RequestRecord
from deployments.api.http.bodies import Bodies, BodyPace
from deployments.api.http.dialect import Dialect, Question
from deployments.api.http.error_responses import HttpError, error_body, http_error
from deployments.api.http.event_feed import ClientLeft, EventFeed, read_deadline
from deployments.api.http.event_stream import EventStream
from deployments.api.http.json_bodies import read_priority
from deployments.api.models.model_routes import CountedDialect, ModelRoutes, read_release
from deployments.api.openapi import describe
from deployments.api.reference_page import PAGE_HEADERS, render_page
from deployments.config.api_config import ApiConfig
from deployments.config.tenants import Tenants
from library.accounts.books import Accounts
from library.accounts.callers import Scope as KeyScope
from library.library_access import LibraryAccess
from rapid.errors import (
    BadRequest,
    ConfigurationError,
    Overloaded,
    RapidError,
    TooManyRequests,
    Unauthorized,
)
from rapid.ports import Clock

if TYPE_CHECKING:  # which loads Ray
    from deployments.metrics import IngressMetrics

_log = logging.getLogger(__name__)

_CLIENT_LEFT_STATUS = 499  # as proxies log it; it is never delivered

# What a page of an allowed origin may read of a response, beside its body.
_SHOWN_HEADERS = ["openai-processing-ms", "retry-after", "x-request-id"] + [
    f"x-ratelimit-{what}-{name}"
    for what in ("limit", "remaining", "reset")
    for name in ("requests", "tokens")
]

DIALECTS: dict[str, Dialect] = {
    "/v1/chat/completions": ChatDialect(),
    "/v1/completions": CompletionDialect(),
    "/v1/messages": MessagesDialect(),
}
"""The dialect of each path that takes questions, beside those that use the library."""


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
        accounts: Accounts | None = None,
        quotas: Quotas | None = None,
        library: LibraryAccess | None = None,
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
            accounts: Keys, limits and usage in a database; None for a server that has none.
            quotas: Where tenants' requests and tokens are counted; None counts them here alone.
            library: Where files are kept; None for a server that keeps none.
        """
        self._service = service
        self._accounts = accounts
        self._library = library
        self._sends_request_id = sends_request_id
        self._clock = clock
        self._admission = Admission(clock=clock)
        self._allowances = Allowances(self._admission, quotas or Quotas(), accounts)
        self._bodies = Bodies(self._admission, clock=clock, pace=pace)
        self._access = AccessLog(clock, metrics, accounts)
        self._background = BackgroundAnswers(library, lambda: self._config.heartbeat_s)
        self.configure(config)
        administration = accounts and AccountRoutes(accounts, self._bodies)
        models = ModelRoutes(
            service,
            self._bodies,
            self._admission,
            self._allowances,
            lambda: (self._config, self._cards),
            accounts,
            library,
        )
        console = ConsoleFiles(lambda: self._config.console, lambda: self._tenants, accounts)
        responses = ResponsesDialect(library)
        counted: list[tuple[str, CountedDialect, Json, Json]] = [
            ("/v1/messages/count_tokens", MessagesDialect(), {"max_tokens": 1}, {}),
            ("/v1/responses/input_tokens", responses, {}, {"object": "response.input_tokens"}),
        ]
        self._dialects = {
            **DIALECTS,
            "/v1/responses": responses,
            "/v1/responses/compact": CompactDialect(library),
        }
        self._app = Starlette(
            routes=[
                *(
                    self._route(
                        path, partial(self._answer, each), "POST", each.render_refusal, scope="ask"
                    )
                    for path, each in self._dialects.items()
                ),
                *(
                    self._route(path, answer, method, scope="documents")
                    for method, path, answer in self._file_endpoints()
                ),
                *(
                    self._route(path, answer, method, scope="ask")
                    for method, path, answer in self._memory_endpoints()
                ),
                *(
                    self._route(path, handler, method, scope=scope)
                    for method, path, scope, handler in (
                        *(administration or ()),
                        *OperatorRoutes(service, self._access),
                        *models.endpoints(),
                    )
                ),
                *(
                    self._route(
                        path,
                        partial(models.count, each, usual, told),
                        "POST",
                        each.render_refusal,
                        scope="ask",
                    )
                    for path, each, usual, told in counted
                ),
                self._route("/openapi.json", self._describe, scope=None),
                self._route("/docs", self._show_page, scope=None),
                self._route("/ready", self._ready, scope=None, is_open=True),
                self._public_route("/", console.show_page),
                self._public_route("/console/{name}", console.send_file),
                Route("/health", _health),
            ],
            exception_handlers={HTTPException: self._no_route},
            lifespan=self._lifespan,
        )
        self._app.router.redirect_slashes = False

    def configure(self, config: ApiConfig) -> None:
        """Take models, keys and limits; requests that were let in stay in."""
        key_file = KeyFile(config.keys_file, self._clock)
        keys = config.all_keys()  # which may be refused, so they come first
        self._served: ASGIApp = self._serve
        if config.allowed_origins:
            self._served = CORSMiddleware(
                self._serve,
                config.allowed_origins,
                ["GET", "POST", "DELETE"],
                ["*"],
                expose_headers=_SHOWN_HEADERS,
            )
        self._key_file = key_file
        self._tenants = Tenants(keys if config.has_keys else None)
        self._config = config
        self._allowances.configure(config, has_tenants=len({key.tenant for key in keys}) > 1)
        self._bodies.limit(config.max_body_bytes, config.max_slow_bodies)
        self._cards, created, silence_s = {}, int(time.time()), config.silence_s
        for name, card in config.cards.items():
            self._cards[name] = model_card(
                name,
                created,
                card.max_model_len,
                is_embedded=card.is_embedded,
                silence_s=silence_s,
                limits=config.request_limits,
            )

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        """Keep the accounts for as long as the server serves, and then end what it answers."""
        async with AsyncExitStack() as stack:
            if self._accounts is not None:
                await stack.enter_async_context(self._accounts.keep(self._allowances.refresh))
            # Serve waits for this as for requests, until `graceful_shutdown_timeout_s`.
            stack.push_async_callback(self._background.finish)
            yield

    @property
    def shares(self) -> Shares:
        """The tenants' shares, which other replicas of the ingress add to."""
        return self._admission.shares

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection; its response has the request's id and the time that it took."""
        began = self._clock()
        self._take_new_keys()
        if scope["type"] == "http":
            tidy_path(scope)
        status = 500

        async def tag_and_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers.update(scope["state"].get("rate_limits", {}))
                if self._sends_request_id:
                    headers["x-request-id"] = _request_id(Request(scope))
                headers["openai-processing-ms"] = str(round(1000 * (self._clock() - began)))
            await send(message)

        state = scope.setdefault("state", {})
        await self._served(scope, receive, tag_and_send)
        if state.get("key") is not None and (route := state["route"]) not in self._dialects:
            self._access.visit(_request_id(Request(scope)), state["key"], route, status, began)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    def _route(
        self,
        path: str,
        handler: Callable[[Request], Awaitable[Response]],
        method: str = "GET",
        render: Callable[[Json], Json] = dict,
        *,
        scope: KeyScope | None = "admin",
        is_open: bool = False,
    ) -> Route:
        """Return a route whose middleware identifies callers and renders errors.

        A key must have the `scope`, or any where it is None; an open route needs no key.
        """
        errors: dict[Any, Any] = {Exception: partial(self._refuse, render)}
        errors |= dict.fromkeys((ClientDisconnect, ClientLeft), _note_leaving)
        middleware = [
            Middleware(ExceptionMiddleware, handlers=errors),
            Middleware(
                Authentication,
                path,
                lambda: self._tenants,
                self._accounts,
                scope,
                is_open=is_open,
            ),
        ]
        return Route(path, handler, methods=[method], middleware=middleware)

    def _public_route(self, path: str, handler: Callable[[Request], Awaitable[Response]]) -> Route:
        """Return a route of what is no secret, which looks at no key."""
        errors: dict[Any, Any] = {
            HTTPException: self._no_route,
            RapidError: partial(self._refuse, dict),
        }
        return Route(path, handler, middleware=[Middleware(ExceptionMiddleware, handlers=errors)])

    async def _refuse(
        self, render: Callable[[Json], Json], request: Request, error: Exception
    ) -> Response:
        """Return the response to a request that ended with `error`."""
        request_id = _request_id(request)
        if isinstance(error, Unauthorized):
            self._access.refuse(request_id, error)
        failure = _failure(error, request_id)
        response = JSONResponse(render(failure.body), failure.status, headers=failure.headers)
        await self._leave_unread(request, getattr(request.state, "caller", None), response)
        return response

    def _take_new_keys(self) -> None:
        """Take the keys of a file that has changed."""
        if self._key_file.has_changed():
            try:
                self.configure(self._config)
            except ConfigurationError as error:
                _log.error("new keys are refused, those in force stay: %s", error)

    def _file_endpoints(self) -> Iterator[Endpoint]:
        """Yield the endpoints of files and vector stores."""
        if self._library is not None:
            yield from FileRoutes(self._library, self._bodies).endpoints()
            yield from StoreRoutes(self._library, self._bodies, self._service).endpoints()

    def _memory_endpoints(self) -> Iterator[Endpoint]:
        """Yield the endpoints of responses and conversations that are kept."""
        if self._library is not None:
            yield from ResponseRoutes(self._library, self._background).endpoints()
            yield from ConversationRoutes(self._library, self._bodies).endpoints()

    async def _answer(self, dialect: Dialect, request: Request) -> Response:
        request_id = _request_id(request)
        tenant: str = request.state.caller
        async with AsyncExitStack() as stack:
            only = next(iter(self._cards)) if len(self._cards) == 1 else None
            record = stack.enter_context(self._access.request(request_id, request.state.key, only))
            of_body = request, dialect.media_types, record, stack, read_priority
            body = await self._bodies.admit(*of_body)
            asked, sent = await dialect.parse(body, self._config, request_id, tenant)
            record.model = sent.model
            sent, files = await attach_stored(self._library, asked.stored, sent, self._config)
            event_id = request.headers.get("last-event-id")
            cursor = Cursor.of_event(event_id, sent) if event_id else Cursor.first(sent)
            sent = replace(sent, weight=self.shares.weight(tenant))
            record.answer_id = cursor.answer_id
            longest = sent.max_tokens
            if longest is None:
                longest = self._config.card_of(sent.model).default_max_tokens
            record.most_tokens = longest * sent.num_answers
            reserved = self._allowances.reserve(sent, len(body), record.most_tokens)
            record.reservation = reserved
            if reserved is not None and not reserved.is_likely:
                await _confirm(reserved, request, record)
            answer = partial(continue_events, self._service, sent, cursor)
            deadline = request.headers.get("x-request-deadline")
            most_s = read_deadline(deadline, self._clock() - record.began)
            fingerprint = _fingerprint(sent.model)
            reply = dialect.reply(asked, cursor, fingerprint, record.began, self._clock)
            explain = partial(self._explain, asked)
            later = reply if isinstance(reply, ResponsesReply) and reply.body.background else None
            receive = _stay if later else request.receive
            feed = EventFeed(answer, receive, record.note, explain, most_s)
            places = partial(add_places, access=self._library, files=files)

            def fail(error: Exception) -> Json:
                record.error = error
                return _failure(error, request_id).body

            async def render_error(error: Exception) -> bytes:
                # A response that fails tells all that it has said, which may be megabytes.
                return await asyncio.to_thread(reply.render_error, fail(error))

            if later is not None:
                if reserved is not None:
                    await _confirm(reserved, request, record)
                _log.info("request %s is answered later as %s", request_id, later.id)
                return await self._background.answer(tenant, later, feed, places, stack, fail)
            await stack.enter_async_context(feed)
            if reserved is not None:  # meanwhile the answer begins
                await _confirm(reserved, request, record)
            events = places(await feed.begin(self._config.heartbeat_s))
            _log.info("request %s is answered as %s", request_id, reply.id)
            if not sent.is_streamed:
                return await asyncio.to_thread(JSONResponse, await reply.render_whole(events))
            return EventStream(
                reply.render(events),
                reply.media_type,
                stack.pop_all(),
                request_id,
                render_error,
            )

    def _explain(self, asked: Question, error: Exception) -> Exception:
        """Return a refusal with the caller's own field, and a time to retry where it has none."""
        if isinstance(error, BadRequest):
            error.param = asked.field_of(error.param)
        elif isinstance(error, Overloaded) and error.retry_after_s is None:
            return type(error)(str(error), self._admission.next_place_s())
        return error

    async def _describe(self, request: Request) -> Response:
        return JSONResponse(await asyncio.to_thread(lambda: self._description))

    async def _show_page(self, request: Request) -> Response:
        page = await asyncio.to_thread(lambda: render_page(self._description))
        return HTMLResponse(page, headers=PAGE_HEADERS)

    @cached_property
    def _description(self) -> Json:
        return describe(self._app.routes)

    async def _ready(self, request: Request) -> Response:
        state = await read_state(self._service)
        is_ready = bool(state["ready"])
        of_all = {name: state[name] for name in ("ready", "reason") if name in state}
        is_operator = request.state.key is not None and "admin" in request.state.key.scopes
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


async def _confirm(reserved: Reservation, request: Request, record: RequestRecord) -> None:
    """Have the response say what is left of the limits, or refuse the request."""
    try:
        grant = await reserved.grant()
        request.state.rate_limits = grant.headers
        reserved.check(grant)
    except TooManyRequests:
        record.mode = None  # what may have begun is taken back
        raise


async def _health(request: Request) -> Response:
    return JSONResponse({"status": "ok"})


async def _stay() -> Message:
    """Receive nothing, as of a caller who does not leave."""
    await asyncio.Event().wait()
    raise AssertionError


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
    return f"fp_{sha256(f'{read_release()} {model}'.encode()).hexdigest()[:10]}"

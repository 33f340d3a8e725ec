"""The ASGI application of the HTTP API: routes, keys, limits, streaming and disconnects.

It needs no Ray: a deployment gives it a handle to the orchestrator, a test a scripted one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.api.accounts.account_routes import AccountRoutes
from deployments.api.accounts.operator_routes import OperatorRoutes
from deployments.api.backend.service import GenerationService
from deployments.api.console.console_files import ConsoleFiles, tidy_path
from deployments.api.dialects.answer_route import AnswerRoute
from deployments.api.dialects.chat.chat_dialect import ChatDialect
from deployments.api.dialects.chat.wire import Cards, Json, model_card
from deployments.api.dialects.completions.completion_dialect import CompletionDialect
from deployments.api.dialects.messages.messages_dialect import MessagesDialect
from deployments.api.dialects.responses.background import BackgroundAnswers
from deployments.api.dialects.responses.compacting import CompactDialect
from deployments.api.dialects.responses.conversation_routes import ConversationRoutes
from deployments.api.dialects.responses.response_routes import ResponseRoutes
from deployments.api.dialects.responses.responses_dialect import ResponsesDialect
from deployments.api.files.file_routes import Endpoint, FileRoutes
from deployments.api.files.store_routes import StoreRoutes
from deployments.api.gate.admission import Admission
from deployments.api.gate.allowances import Allowances
from deployments.api.gate.authentication import Authentication
from deployments.api.gate.key_file import KeyFile
from deployments.api.gate.quotas import Quotas
from deployments.api.gate.shares import Shares
from deployments.api.http.access_log import AccessLog
from deployments.api.http.bodies import Bodies, BodyPace
from deployments.api.http.dialect import Dialect
from deployments.api.http.refusals import Refusals
from deployments.api.http.request_ids import read_request_id
from deployments.api.models.model_routes import CountedDialect, ModelRoutes
from deployments.api.reference.reference_routes import ReferenceRoutes
from deployments.config.api_config import ApiConfig
from deployments.config.tenants import Tenants
from library.accounts.books import Accounts
from library.accounts.callers import Scope as KeyScope
from library.library_access import LibraryAccess
from rapid.errors import (
    ConfigurationError,
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
        self._refusals = Refusals(self._bodies, self._access)
        self.configure(config)

        def settings() -> tuple[ApiConfig, Cards]:
            return self._config, self._cards

        questions = AnswerRoute(
            service,
            self._bodies,
            self._admission,
            self._allowances,
            self._access,
            settings,
            library,
            self._background,
            clock,
        )
        administration = accounts and AccountRoutes(accounts, self._bodies)
        models = ModelRoutes(service, self._bodies, self._allowances, settings, accounts, library)
        operators = OperatorRoutes(service, self._access)
        reference = ReferenceRoutes(lambda: self._app.routes)
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
                        path,
                        partial(questions.answer, each),
                        "POST",
                        each.render_refusal,
                        scope="ask",
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
                        *operators,
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
                self._route("/openapi.json", reference.send_schema, scope=None),
                self._route("/docs", reference.show_page, scope=None),
                self._route("/ready", operators.show_readiness, scope=None, is_open=True),
                self._public_route("/", console.show_page),
                self._public_route("/console/{name}", console.send_file),
                Route("/health", _health),
            ],
            exception_handlers={HTTPException: self._refusals.refuse_path},
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
                    headers["x-request-id"] = read_request_id(Request(scope))
                headers["openai-processing-ms"] = str(round(1000 * (self._clock() - began)))
            await send(message)

        state = scope.setdefault("state", {})
        await self._served(scope, receive, tag_and_send)
        if state.get("key") is not None and (route := state["route"]) not in self._dialects:
            request_id = read_request_id(Request(scope))
            self._access.visit(request_id, state["key"], route, status, began)

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
        middleware = [
            self._refusals.of_route(render),
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
        return Route(path, handler, middleware=[self._refusals.of_public_route()])

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
            stores = StoreRoutes(self._library, self._bodies, self._service, self._allowances)
            yield from stores.endpoints()

    def _memory_endpoints(self) -> Iterator[Endpoint]:
        """Yield the endpoints of responses and conversations that are kept."""
        if self._library is not None:
            responses = ResponseRoutes(
                self._library, self._background, lambda: self._config.max_requests_of_each
            )
            yield from responses.endpoints()
            yield from ConversationRoutes(self._library, self._bodies).endpoints()


async def _health(request: Request) -> Response:
    return JSONResponse({"status": "ok"})

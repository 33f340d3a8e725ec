"""Authentication of the requests to a route, as middleware around its handler."""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.config.tenants import Tenants, key_in, refusal_of
from library.accounts.books import Accounts
from library.accounts.callers import TENANT, Caller
from rapid.errors import Forbidden, LibraryUnavailable, Unauthorized

_FORWARDED = ("forwarded", "via", "x-forwarded-for", "x-real-ip")


class Authentication:
    """Middleware that lets a handler know its caller, and lets nobody else pass.

    The handler finds the tenant in ``request.state.caller``, and the key in ``request.state.key``.
    Both are None at a route that is open, for a request without a key that is taken.
    """

    def __init__(
        self,
        app: ASGIApp,
        route: str,
        tenants: Callable[[], Tenants],
        accounts: Accounts | None,
        scope: str | None,
        *,
        is_open: bool = False,
    ) -> None:
        """Wrap a handler.

        Args:
            app: The handler.
            route: Its path, for the log.
            tenants: Returns the configured keys of the moment.
            accounts: Further keys; None for none.
            scope: What a key must be for; None takes any.
            is_open: Whether a request needs no key.
        """
        self._app, self._route = app, route
        self._tenants, self._accounts = tenants, accounts
        self._scope, self._is_open = scope, is_open

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Identify the caller, and only then call the handler."""
        request = Request(scope)
        request.state.route = self._route
        request.state.key = caller = await self._admit(request)
        request.state.caller = caller and caller.tenant
        TENANT.set(request.state.caller)
        await self._app(scope, receive, send)

    async def _admit(self, request: Request) -> Caller | None:
        try:
            caller = await self._identify(request)
        except (Unauthorized, LibraryUnavailable):
            has_key = self._tenants().has_keys and _authorization(request) is not None
            if has_key or not self._is_open:
                raise
            return None
        if self._scope is not None and self._scope not in caller.scopes:
            raise Forbidden(
                f"This API key is not for that: it needs the scope {self._scope!r}, and has "
                f"{', '.join(map(repr, sorted(caller.scopes))) or 'none'}."
            )
        return caller

    async def _identify(self, request: Request) -> Caller:
        """Return who calls, by the configured keys and by those of the database.

        A server without configured keys serves this machine, until a key is in the database.
        """
        tenants, accounts = self._tenants(), self._accounts
        authorization = _authorization(request)
        key = key_in(authorization)
        try:
            caller = _identify_configured(request, authorization, tenants)
        except Unauthorized:
            if accounts is None or key is None:
                raise
            if found := await accounts.find(key):
                return found
            raise refusal_of(key) from None
        if accounts is None or tenants.has_keys:
            return caller
        if key is not None and (found := await accounts.find(key)):
            return found
        if await accounts.has_keys():
            raise refusal_of(key)
        return caller


async def check_callers_place(
    request: Request, tenants: Tenants, accounts: Accounts | None
) -> None:
    """Check that a page without data may be shown to whoever asks for it.

    Raises:
        Unauthorized: The server has no keys, and the request is not from its own machine.
    """
    if tenants.has_keys or (accounts is not None and await accounts.has_keys()):
        return
    _identify_configured(request, None, tenants)


def _identify_configured(request: Request, authorization: str | None, tenants: Tenants) -> Caller:
    return tenants.identify(
        authorization,
        request.client.host if request.client else None,
        request.headers.get("host"),
        is_forwarded=any(name in request.headers for name in _FORWARDED),
    )


def _authorization(request: Request) -> str | None:
    """Return the Authorization header, or what Anthropic's clients send in its place."""
    key = request.headers.get("x-api-key")
    return request.headers.get("authorization", None if key is None else f"Bearer {key}")

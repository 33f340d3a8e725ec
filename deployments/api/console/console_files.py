"""The files of the console, which hold no data: the page calls the API with its reader's own key.

They are loaded from this server alone, and no text that the page shows becomes markup or script:
the policy below has the browser refuse both. Beside them are two texts to try the page with: a
generated one for the embedded models, which understand no other, and a real one for the others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from deployments.api.gate.authentication import check_callers_place
from deployments.config.tenants import Tenants
from evaluation.texts.text_questions import document_text
from library.accounts.books import Accounts
from rapid.embedded.generator import generate_document
from rapid.errors import Unauthorized

SAMPLES: dict[str, Callable[[], str]] = {
    "generated.txt": lambda: generate_document(7, 1000).text,
    "english.txt": lambda: document_text("objects"),
}
"""Texts by their files' names; `static/sample.js` asks about them."""

_log = logging.getLogger(__name__)

_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",  # asks each time, as a new release has other files by these names
}


class ConsoleFiles:
    """The endpoints of the console's files."""

    def __init__(
        self,
        is_on: Callable[[], bool],
        tenants: Callable[[], Tenants],
        accounts: Accounts | None,
    ) -> None:
        """Create the endpoints.

        Args:
            is_on: Whether there is a console now.
            tenants: Returns the configured keys of the moment.
            accounts: Further keys; None for none.
        """
        self._is_on, self._tenants, self._accounts = is_on, tenants, accounts
        self._has_warned = False
        self._files = StaticFiles(directory=Path(__file__).parent / "static")

    async def show_page(self, request: Request) -> Response:
        """Answer ``GET /``.

        Its links are relative, so that the page is whole under any path. So an address without a
        slash at its end, such as ``/next`` of an application under that path, is sent to the one
        with it, relatively too: a proxy in front may have a path of its own.
        """
        self._check_is_on()
        if not request.state.is_folder:
            return RedirectResponse(f"{request.scope.get('root_path', '').rpartition('/')[2]}/")
        return await self._send("index.html", request)

    async def send_file(self, request: Request) -> Response:
        """Answer ``GET /console/{name}``."""
        self._check_is_on()
        return await self._send(request.path_params["name"], request)

    def _check_is_on(self) -> None:
        if not self._is_on():
            raise HTTPException(404)

    async def _send(self, name: str, request: Request) -> Response:
        """Return a file.

        Raises:
            Unauthorized: The server has no keys, and the request is not from its own machine.
            HTTPException: There is no such file.
        """
        try:
            await check_callers_place(request, self._tenants(), self._accounts)
        except Unauthorized:
            if not self._has_warned:  # once, as anybody can ask again and again
                self._has_warned = True
                _log.warning("no console for other machines: the server has no keys (api.keys)")
            raise
        if name in SAMPLES:
            response: Response = PlainTextResponse(SAMPLES[name]())
        else:
            response = await self._files.get_response(name, request.scope)
        response.headers.update(_HEADERS)
        return response


def tidy_path(scope: Scope) -> None:
    """Take the slash from the end of a path, where some clients put one, but for the console's."""
    path: str = scope["path"]
    bare = path.rstrip("/")
    if bare == scope.get("root_path", "").rstrip("/"):
        scope.setdefault("state", {})["is_folder"] = path.endswith("/")
        bare += "/"
    scope["path"] = bare
